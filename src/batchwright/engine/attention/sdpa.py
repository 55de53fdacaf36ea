"""Attention through torch alone, on any device: sequences of like length together.

Gathering the paged keys of similar sequences into one padded tensor costs a copy, and lets one call run parallel over
(sequence, head). Sequences whose lengths differ by more than a quarter go into different calls, so little is padded.

Prompts go through `scaled_dot_product_attention`, and so do decodes on CUDA. On the CPU its tiles are made for many
queries; a decode has one for each head, so there two batched products with a softmax between them are faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.attention.attention import AttentionShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention, gather
from batchwright.engine.attention.plans import CallGroup, GroupedPlan
from batchwright.engine.step.batch import StepBatch


class SdpaAttention(PagedAttention):
    """Batched products or `scaled_dot_product_attention` over gathered keys."""

    name = "sdpa"

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._views: WeakKeyDictionary[CallGroup, dict[tuple[torch.Size, torch.dtype], _Gathered]] = WeakKeyDictionary()

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        plan = self.plan(batch, cache.keys.shape[2])
        if len(plan.groups) == 1 and plan.groups[0].in_order:
            return self._attend(query, cache, shape, plan.groups[0])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in plan.groups:
            out.index_copy_(0, group.rows, self._attend(query.index_select(0, group.rows), cache, shape, group))
        return out

    def plan(self, batch: StepBatch, block_size: int) -> GroupedPlan:
        if not isinstance(batch.attention_plan, GroupedPlan):
            batch.attention_plan = GroupedPlan(batch, block_size)
        return batch.attention_plan

    def _attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, group: CallGroup) -> Tensor:
        """Attention of the group's queries [n · count, heads · dim], its shape."""
        if group.count == 1 and query.device.type == "cpu":
            return self._decode(query, cache, shape, group)
        return _gathered_attention(query, cache, shape, group)

    def _decode(self, query: Tensor, cache: LayerCache, shape: AttentionShape, group: CallGroup) -> Tensor:
        """One query for each sequence. The heads that share a key head become query rows of it: their mask is alike."""
        _, kv_heads, _, head_dim = cache.keys.shape
        gathered, blocks, hidden = self._gathered(cache, group), group.blocks(kv_heads), group.hidden(shape.window)
        gather(cache.keys, blocks, gathered.keys)
        gather(cache.values, blocks, gathered.values)
        # A padded key may be another sequence's: masking its score hides its NaN, but not the NaN of its value.
        gathered.value_rows.index_fill_(0, group.padding(kv_heads), 0)
        q = query.reshape(gathered.keys_across.shape[0], -1, head_dim)
        scores = torch.baddbmm(gathered.ignored, q, gathered.keys_across, beta=0, alpha=shape.scale)
        if shape.softcap is not None:
            scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
        scores.unflatten(0, (-1, kv_heads)).masked_fill_(hidden, -torch.inf)
        return torch.bmm(scores.softmax(-1), gathered.values_by_head).view(query.shape)

    def _gathered(self, cache: LayerCache, group: CallGroup) -> _Gathered:
        """Layers alike share one, for the step that `group` belongs to."""
        views = self._views.setdefault(group, {})
        key = (cache.keys.shape, cache.keys.dtype)
        if key not in views:
            views[key] = _Gathered.over(self._memory(cache, group), cache, group)
        return views[key]

    def _memory(self, cache: LayerCache, group: CallGroup) -> Tensor:
        """[2, size]. It is kept from step to step: the system takes long to hand out fresh pages."""
        size, dtype = group.blocks(cache.keys.shape[1]).numel() * cache.keys[0, 0].numel(), cache.keys.dtype
        if dtype not in self._scratch or self._scratch[dtype].shape[1] < size:
            self._scratch[dtype] = torch.empty(2, size, dtype=dtype)
        return self._scratch[dtype][:, :size]


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Where the keys and values of a group's decodes are gathered: the same memory for each layer, as calls want it.

    It is laid out once a step. For few sequences it is the number of calls that costs, those that only make views too.
    """

    keys: Tensor
    """[n · kv_heads · blocks, block_size · head_dim]; so are `values`."""
    values: Tensor
    value_rows: Tensor
    """[any, head_dim]."""
    keys_across: Tensor
    """[n · kv_heads, head_dim, keys]."""
    values_by_head: Tensor
    """[n · kv_heads, keys, head_dim]."""
    ignored: Tensor

    @classmethod
    def over(cls, memory: Tensor, cache: LayerCache, group: CallGroup) -> _Gathered:
        """`memory` [2, size] takes the keys and the values."""
        _, kv_heads, block_size, head_dim = cache.keys.shape
        keys, values = memory
        by_head = (group.size * kv_heads, -1, head_dim)
        return cls(
            keys=keys.view(-1, block_size * head_dim),
            values=values.view(-1, block_size * head_dim),
            value_rows=values.view(-1, head_dim),
            keys_across=keys.view(by_head).transpose(1, 2),
            values_by_head=values.view(by_head),
            ignored=memory[:1, :1, None],
        )


def _gathered_attention(query: Tensor, cache: LayerCache, shape: AttentionShape, group: CallGroup) -> Tensor:
    """Through torch's own attention, or step by step where that cannot do it."""
    _, kv_heads, _, head_dim = cache.keys.shape
    blocks, padding = group.blocks(kv_heads), group.padding(kv_heads)
    k, v = gather(cache.keys, blocks), gather(cache.values, blocks)
    for gathered in (k, v):  # see `_decode`; a bias does not hide the NaN of a score either
        gathered.view(-1, head_dim).index_fill_(0, padding, 0)
    if group.count == 1:
        # The heads that share a key head become query rows of it.
        q = query.view(group.size, kv_heads, -1, head_dim)
        return _attention(q, k, v, shape, group).reshape(query.shape)
    q = query.view(group.size, group.count, shape.heads, head_dim).transpose(1, 2)
    return _attention(q, k, v, shape, group).transpose(1, 2).reshape(query.shape)


def _attention(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, group: CallGroup) -> Tensor:
    """q [n, heads, rows, dim] over k, v [n, kv_heads, keys, dim]."""
    if shape.softcap is None:
        bias = group.bias(shape.window, q.dtype)
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, scale=shape.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(-1, -2)).float() * shape.scale
    scores = shape.softcap * torch.tanh(scores / shape.softcap)
    return scores.masked_fill(group.hidden(shape.window), -torch.inf).softmax(-1).to(v.dtype) @ v
