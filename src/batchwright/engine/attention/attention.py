"""What an attention implementation does, and the shapes it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from batchwright.engine.step.batch import StepBatch


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV cache of one layer."""

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of queries and outputs, and of keys and values unless these are `quantized`."""
    device: torch.device
    quantized: bool = False
    """Keys and values in 8 bits, with a float32 scale for each head of each token."""

    @property
    def bytes_per_head(self) -> int:
        """What one head keeps of a block, of keys or of values."""
        per_token = self.head_dim + 4 if self.quantized else self.head_dim * self.dtype.itemsize
        return self.block_size * per_token

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block."""
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
    """Keys and values of one layer, laid out as its backend likes."""

    keys: Tensor
    values: Tensor


class AttentionBackend(ABC):
    """Writes keys and values into paged caches and attends to them."""

    name: str
    note: str = ""
    """Why a faster implementation was not chosen."""

    @abstractmethod
    def refusal(self, shape: KVShape) -> str | None:
        """Why it cannot work with this cache, or None."""

    @abstractmethod
    def allocate(self, shape: KVShape) -> LayerCache:
        """A cache for one layer, not yet written to: memory is taken as blocks are used.

        Raises torch's out-of-memory error.
        """

    @abstractmethod
    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        """Write `key` and `value` [T, kv_heads, head_dim] to the slots of `batch`."""

    @abstractmethod
    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        """Attention of `query` [T, heads · head_dim] (rows may be strided): the same shape, contiguous.

        All of the step's keys and values must have been stored.
        """
