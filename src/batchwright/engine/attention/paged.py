"""The cache layout shared by the torch implementations: [blocks, kv_heads, block_size, head_dim].

What one head holds in one block is one row of memory. So one copy of rows gathers the keys of many sequences into
[sequences, kv_heads, keys, head_dim], which torch's products read as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.engine.attention.attention import AttentionBackend, KVShape, LayerCache
from batchwright.engine.native.large_pages import prefer_huge_pages
from batchwright.engine.step.batch import StepBatch


class PagedPlan:
    """What a step's attention needs in every layer, worked out in the first."""

    def __init__(self, batch: StepBatch, block_size: int) -> None:
        self._slots, self._block_size = batch.slots, block_size
        self._stored: dict[int, Tensor] = {}

    def stored_rows(self, kv_heads: int) -> Tensor:
        """[T · kv_heads] int64: where each head's key and value go, in a cache seen as [any, head_dim]."""
        if kv_heads not in self._stored:
            block, offset = self._slots // self._block_size, self._slots % self._block_size
            self._stored[kv_heads] = head_rows(block, kv_heads).mul_(self._block_size).add_(offset[:, None]).flatten()
        return self._stored[kv_heads]


class PagedAttention(AttentionBackend):
    """Storage for backends that read their cache with torch."""

    def refusal(self, shape: KVShape) -> str | None:
        return None

    def allocate(self, shape: KVShape) -> LayerCache:
        size = (shape.num_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
        cache = LayerCache(*(torch.empty(size, dtype=shape.dtype, device=shape.device) for _ in range(2)))
        if shape.device.type == "cpu":
            prefer_huge_pages(cache.keys)
            prefer_huge_pages(cache.values)
        return cache

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        _, kv_heads, block_size, head_dim = cache.keys.shape
        rows = self.plan(batch, block_size).stored_rows(kv_heads)
        cache.keys.view(-1, head_dim).index_copy_(0, rows, key.reshape(-1, head_dim))
        cache.values.view(-1, head_dim).index_copy_(0, rows, value.reshape(-1, head_dim))

    def plan(self, batch: StepBatch, block_size: int) -> PagedPlan:
        """The plan of `batch`, made when it has none."""
        if not isinstance(batch.attention_plan, PagedPlan):
            batch.attention_plan = PagedPlan(batch, block_size)
        return batch.attention_plan


def head_rows(blocks: Tensor, kv_heads: int) -> Tensor:
    """[n, kv_heads, ...] int64: where the heads of `blocks` [n, ...] lie among all heads of all blocks."""
    heads = torch.arange(kv_heads, device=blocks.device).view(1, -1, *[1] * (blocks.dim() - 1))
    return blocks.long().unsqueeze(1) * kv_heads + heads


def gather(cache: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """The keys or values of `rows` [n, kv_heads, blocks], as [n, kv_heads, blocks · block_size, head_dim].

    They are copied into `out` [n · kv_heads · blocks, block_size · head_dim] if it is given.
    """
    _, _, block_size, head_dim = cache.shape
    sequences, kv_heads, blocks = rows.shape
    found = torch.index_select(cache.view(-1, block_size * head_dim), 0, rows.flatten(), out=out)
    return found.view(sequences, kv_heads, blocks * block_size, head_dim)
