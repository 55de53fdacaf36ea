"""Attention through torch's own fused kernels, on any device: decodes of like length together, prompts one by one.

Gathering the paged keys of similar sequences into one padded tensor costs a copy, and lets one call run parallel over
(sequence, head). Sequences whose lengths differ by more than a quarter go into different calls, so little is padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.attention.interface import AttentionShape, LayerCache
from batchwright.engine.attention.paged import TokenMajorAttention
from batchwright.engine.attention.reference import visible
from batchwright.engine.batch import StepBatch

_LEAST_FILL = 0.75
_MOST_KEYS = 64 * 1024
"""Padded keys of one group: bounds the memory of the gathered copy."""


@dataclass(slots=True)
class _Decodes:
    rows: Tensor
    """[n] int64 rows of the batch."""
    tables: Tensor
    """[n, blocks]."""
    contexts: Tensor
    """[n, 1] int64."""


@dataclass(slots=True)
class _Prefill:
    row: int
    count: int
    context: int
    table: Tensor


@dataclass(slots=True)
class _Plan:
    decodes: list[_Decodes]
    prefills: list[_Prefill]


class SdpaAttention(TokenMajorAttention):
    """`scaled_dot_product_attention` over gathered keys."""

    name = "sdpa"

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        plan = batch.attention_plan
        if not isinstance(plan, _Plan):
            plan = batch.attention_plan = _plan(batch, self._block_size)
        kv_heads, head_dim = cache.keys.shape[1:]
        query = query.unflatten(-1, (shape.heads, head_dim))
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in plan.decodes:
            # The heads that share a key head become query rows of it: their mask is the same.
            q = query.index_select(0, group.rows).unflatten(1, (kv_heads, shape.heads // kv_heads))
            key = torch.arange(group.tables.shape[1] * self._block_size, device=query.device)[None, :]
            mask = key < group.contexts
            if shape.window is not None:
                mask &= key >= group.contexts - shape.window
            k, v = self._gather(cache.keys, group.tables), self._gather(cache.values, group.tables)
            # A padded key may be another sequence's: masking alone would not hide its NaN.
            padding = (key >= group.contexts)[:, None, :, None]
            k, v = k.masked_fill_(padding, 0), v.masked_fill_(padding, 0)
            out.index_copy_(0, group.rows, _attend(q, k, v, mask[:, None, None, :], shape).flatten(1, 2))
        for item in plan.prefills:
            rows = slice(item.row, item.row + item.count)
            k = self._gather(cache.keys, item.table)[:, :, : item.context]
            v = self._gather(cache.values, item.table)[:, :, : item.context]
            mask = visible(item.count, item.context, shape.window, query.device)
            q = query[rows].transpose(0, 1)[None]
            out[rows] = _attend(q, k, v, mask, shape)[0].transpose(0, 1)
        return out.flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shape: AttentionShape) -> Tensor:
    """q [n, heads, rows, dim] over k, v [n, kv_heads, keys, dim] with a bool mask that broadcasts to the scores."""
    if shape.softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=shape.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)).float() * shape.scale
    scores = shape.softcap * torch.tanh(scores / shape.softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v


def _plan(batch: StepBatch, block_size: int) -> _Plan:
    prefills, decodes, row = [], [], 0
    for index, (count, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
        if count == 1:
            decodes.append((context, row, index))
        else:
            table = batch.block_tables[index : index + 1, : -(-context // block_size)]
            prefills.append(_Prefill(row, count, context, table))
        row += count
    decodes.sort(reverse=True)
    groups: list[list[tuple[int, int, int]]] = []
    for item in decodes:
        group = groups[-1] if groups else None
        if group and item[0] >= _LEAST_FILL * group[0][0] and (len(group) + 1) * group[0][0] <= _MOST_KEYS:
            group.append(item)
        else:
            groups.append([item])
    return _Plan([_decodes(group, batch, block_size) for group in groups], prefills)


def _decodes(group: list[tuple[int, int, int]], batch: StepBatch, block_size: int) -> _Decodes:
    device = batch.block_tables.device
    longest = group[0][0]
    indices = torch.tensor([index for _, _, index in group], device=device)
    return _Decodes(
        rows=torch.tensor([row for _, row, _ in group], device=device),
        tables=batch.block_tables[indices, : -(-longest // block_size)],
        contexts=torch.tensor([context for context, _, _ in group], device=device)[:, None],
    )
