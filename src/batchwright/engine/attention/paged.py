"""The cache layout [blocks, kv_heads, block_size, head_dim] of torch's and Triton's attention, and the reference.

The keys of one head in one block are one contiguous row of memory. Copying rows therefore gathers the keys of n
sequences as [n, kv_heads, keys, head_dim], which torch's products read without another copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.engine.attention.attention import AttentionBackend, AttentionShape, KVShape, LayerCache
from batchwright.engine.native.large_pages import prefer_huge_pages
from batchwright.engine.step.batch import StepBatch


class PagedPlan:
    """Indices that the attention of a step needs in every layer, computed in the first one."""

    def __init__(self, batch: StepBatch, block_size: int) -> None:
        self._slots, self._block_size = batch.slots, block_size
        self._stored: dict[int, Tensor] = {}

    def stored_rows(self, kv_heads: int) -> Tensor:
        """Return the rows of a cache viewed as [any, head_dim] that each head's key goes to -> [T · kv_heads] int64."""
        if kv_heads not in self._stored:
            block, offset = self._slots // self._block_size, self._slots % self._block_size
            self._stored[kv_heads] = head_rows(block, kv_heads).mul_(self._block_size).add_(offset[:, None]).flatten()
        return self._stored[kv_heads]


class PagedAttention(AttentionBackend):
    """Storage for backends whose caches are [blocks, kv_heads, block_size, head_dim]."""

    def refusal(self, shape: KVShape) -> str | None:
        return None

    def variants(self) -> list[PagedAttention]:
        """Return the methods among which this backend chooses for each step: each can fail independently."""
        return [self]

    def allocate(self, shape: KVShape) -> LayerCache:
        size = (shape.num_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
        cache = LayerCache(*(torch.empty(size, dtype=shape.dtype, device=shape.device) for _ in range(2)))
        if shape.device.type == "cpu":
            prefer_huge_pages(cache.keys)
            prefer_huge_pages(cache.values)
        return cache

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        """Write `key` and `value` [T, kv_heads, head_dim] to the slots of `batch`."""
        _, kv_heads, block_size, head_dim = cache.keys.shape
        rows = self.plan(batch, block_size).stored_rows(kv_heads)
        cache.keys.view(-1, head_dim).index_copy_(0, rows, key.reshape(-1, head_dim))
        cache.values.view(-1, head_dim).index_copy_(0, rows, value.reshape(-1, head_dim))

    def plan(self, batch: StepBatch, block_size: int) -> PagedPlan:
        """Return the plan of `batch`, which is made now if it has none."""
        if not isinstance(batch.attention_plan, PagedPlan):
            batch.attention_plan = PagedPlan(batch, block_size)
        return batch.attention_plan


def head_rows(blocks: Tensor, kv_heads: int) -> Tensor:
    """Return the indexes of the heads of `blocks` [n, ...] among all blocks' heads -> [n, kv_heads, ...] int64."""
    heads = torch.arange(kv_heads, device=blocks.device).view(1, -1, *[1] * (blocks.dim() - 1))
    return blocks.long().unsqueeze(1) * kv_heads + heads


def gather(cache: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy keys or values at `rows` [n, kv_heads, blocks] of a cache -> [n, kv_heads, blocks · block_size, head_dim].

    The memory is `out` [n · kv_heads · blocks, block_size · head_dim] if it is given.
    """
    _, _, block_size, head_dim = cache.shape
    sequences, kv_heads, blocks = rows.shape
    found = torch.index_select(cache.view(-1, block_size * head_dim), 0, rows.flatten(), out=out)
    return found.view(sequences, kv_heads, blocks * block_size, head_dim)


class ReferenceAttention(PagedAttention):
    """Textbook softmax(q·kᵀ·scale)·v in float32, one sequence at a time: the reference for the others."""

    name = "reference"

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        """Attend with `query` [T, heads · head_dim] -> [T, heads · head_dim]."""
        _, kv_heads, _, head_dim = cache.keys.shape
        out = torch.empty(query.shape[0], shape.heads, head_dim, dtype=query.dtype, device=query.device)
        row = 0
        for index, (count, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
            blocks = head_rows(batch.block_tables[index : index + 1], kv_heads)
            q = query[row : row + count].unflatten(-1, (shape.heads, head_dim)).transpose(0, 1).float()
            k = gather(cache.keys, blocks)[0, :, :context].float()
            v = gather(cache.values, blocks)[0, :, :context].float()
            group = shape.heads // kv_heads
            scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            scores = scores.masked_fill(~visible(count, context, shape.window, query.device), -torch.inf)
            attended = scores.softmax(-1) @ v.repeat_interleave(group, 0)
            out[row : row + count] = attended.transpose(0, 1).to(query.dtype)
            row += count
        return out.flatten(1)


def visible(count: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each of the last `count` of `context` positions sees -> [count, context] bool."""
    query = torch.arange(context - count, context, device=device)[:, None]
    key = torch.arange(context, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
