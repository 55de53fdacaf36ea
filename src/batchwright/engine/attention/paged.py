"""The cache layout shared by the torch implementations: token-major, [slots, kv_heads, head_dim]."""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.engine.attention.interface import AttentionBackend, KVShape, LayerCache
from batchwright.engine.batch import StepBatch


class TokenMajorAttention(AttentionBackend):
    """Storage for backends that read their cache with torch."""

    def __init__(self) -> None:
        self._block_size = 0

    def refusal(self, shape: KVShape) -> str | None:
        return None

    def allocate(self, shape: KVShape) -> LayerCache:
        self._block_size = shape.block_size
        size = (shape.num_blocks * shape.block_size, shape.kv_heads, shape.head_dim)
        return LayerCache(
            torch.empty(size, dtype=shape.dtype, device=shape.device),
            torch.empty(size, dtype=shape.dtype, device=shape.device),
        )

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        cache.keys.index_copy_(0, batch.slots, key)
        cache.values.index_copy_(0, batch.slots, value)

    def _gather(self, cache: Tensor, tables: Tensor) -> Tensor:
        """The cache of `tables` [n, blocks], as [n, kv_heads, blocks · block_size, head_dim]."""
        _, kv_heads, head_dim = cache.shape
        sequences, blocks = tables.shape
        # Whole blocks are copied as rows of memory, which is many times faster than indexing by tensor.
        rows = cache.view(-1, self._block_size * kv_heads * head_dim).index_select(0, tables.flatten())
        return rows.view(sequences, blocks * self._block_size, kv_heads, head_dim).transpose(1, 2)
