"""The interface of attention implementations, and the shapes that they take.

Shapes in this package: a step has T tokens (rows), one query each, of S sequences. `heads` counts query heads and
`kv_heads` key heads, each of which `heads / kv_heads` query heads share. A `query` is [T, heads · head_dim], `key` and
`value` are [T, kv_heads, head_dim], and a paged cache is [blocks, kv_heads, block_size, head_dim]. `->` precedes the
shape of a result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from batchwright.engine.step.batch import StepBatch


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the KV cache of one layer."""

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Dtype of queries and outputs, and of keys and values unless they are `quantized`."""
    device: torch.device
    quantized: bool = False
    """Whether keys and values have 8 bits, with a float32 scale for each head of each token."""

    @property
    def bytes_per_head(self) -> int:
        """Bytes of the keys, or of the values, of one head in one block."""
        per_token = self.head_dim + 4 if self.quantized else self.head_dim * self.dtype.itemsize
        return self.block_size * per_token

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the keys and values of one block."""
        return 2 * self.kv_heads * self.bytes_per_head


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How one layer attends. A query sees its own position and all before it, or the last `window` of them."""

    heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    """Scores become `softcap · tanh(score / softcap)` (Gemma 2)."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, in the layout of the backend that allocated them."""

    keys: Tensor
    values: Tensor


class AttentionBackend(ABC):
    """Attention over paged KV caches."""

    name: str
    note: str = ""
    """Why a faster implementation was not chosen."""

    @abstractmethod
    def refusal(self, shape: KVShape) -> str | None:
        """Return why this backend cannot work with a cache of `shape`, or None if it can."""

    @abstractmethod
    def allocate(self, shape: KVShape) -> LayerCache:
        """Return an uninitialized cache for one layer; its memory is allocated only as blocks are used.

        Raises torch's out-of-memory error.
        """

    @abstractmethod
    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        """Write `key` and `value` [T, kv_heads, head_dim] to the slots of `batch`."""

    @abstractmethod
    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        """Attend with `query` [T, heads · head_dim], whose rows may be strided -> [T, heads · head_dim], contiguous.

        All keys and values of the step must be stored already.
        """
