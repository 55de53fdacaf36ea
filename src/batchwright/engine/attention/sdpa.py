"""Attention by torch alone, on any device, with sequences of similar length together.

Gathering the paged keys of similar sequences into one padded tensor costs a copy, and lets one call run parallel over
(sequence, head). Sequences whose lengths differ by more than a quarter go into different calls, so little is padded.

Prompts go through `scaled_dot_product_attention`, and so do decodes on CUDA. On the CPU its tiles are made for many
queries; a decode has one for each head, so two batched products with a softmax between them are faster there.

Shapes: a call has n sequences, padded to `count` queries each and to `keys` keys, which is `blocks · block_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.attention.attention import AttentionShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention, PagedPlan, gather, head_rows
from batchwright.engine.step.batch import StepBatch

_LEAST_FILL = 0.75
_MOST_KEYS = 64 * 1024
"""Most padded keys of one group: bounds the memory of the gathered copy."""
_MOST_KEYS_ON_CPU = 16 * 1024
"""Most padded keys on the CPU, where the copy should still be in the processor's cache when it is read."""
_MOST_SCORES = 1024 * 1024
"""Most padded queries times padded keys of a group of several sequences: bounds the memory of its mask."""


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a step: `count` queries, from `row` of the batch on, at the last of `context` positions."""

    index: int
    """Index among the sequences of the batch."""
    row: int
    count: int
    context: int


class CallGroup:
    """Sequences of one call, with keys padded to the longest context, and queries to the greatest count.

    A sequence's queries are padded with copies of its last one, whose result is computed again.
    """

    def __init__(self, parts: list[Part], batch: StepBatch, block_size: int) -> None:
        """Make the indices of a call whose results are in the order of `parts`."""
        device = batch.block_tables.device
        blocks = -(-max(part.context for part in parts) // block_size)
        index, row, count, context = torch.tensor([[p.index, p.row, p.count, p.context] for p in parts]).to(device).T
        self.size, self.count = len(parts), max(part.count for part in parts)
        offsets = torch.minimum(torch.arange(self.count, device=device), count[:, None] - 1)
        self.rows = (row[:, None] + offsets).flatten()
        """Rows of the queries in the batch, [n · count] int64."""
        self.in_order = sum(part.count for part in parts) == self.size * self.count == batch.num_tokens
        """Whether the rows of the group are those of the batch, in order."""
        self._positions = (context - count)[:, None] + offsets
        self._contexts = context[:, None]
        self._tables = batch.block_tables[index, :blocks]
        self._keys = torch.arange(blocks * block_size, device=device)
        self._blocks: dict[int, Tensor] = {}
        self._padding: dict[int, Tensor] = {}
        self._hidden: dict[int | None, Tensor] = {}
        self._bias: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def blocks(self, kv_heads: int) -> Tensor:
        """Return the rows for `gather` -> [n, kv_heads, blocks] int64."""
        if kv_heads not in self._blocks:
            self._blocks[kv_heads] = head_rows(self._tables, kv_heads)
        return self._blocks[kv_heads]

    def padding(self, kv_heads: int) -> Tensor:
        """Return the rows past the ends of sequences, in gathered keys viewed as [any, head_dim] -> [any] int64."""
        if kv_heads not in self._padding:
            past = (self._keys >= self._contexts)[:, None, :].expand(-1, kv_heads, -1)
            self._padding[kv_heads] = past.flatten().nonzero()[:, 0]
        return self._padding[kv_heads]

    def hidden(self, window: int | None) -> Tensor:
        """Return which keys the queries do not see -> [n, 1, count, keys] bool."""
        if window not in self._hidden:
            positions = self._positions[:, None, :, None]
            hidden = self._keys > positions
            if window is not None:
                hidden |= self._keys <= positions - window
            self._hidden[window] = hidden
        return self._hidden[window]

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return `hidden` as a term to add to scores, -inf or 0 -> [n, 1, count, keys]."""
        if (window, dtype) not in self._bias:
            hidden = self.hidden(window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._bias[window, dtype] = bias.masked_fill_(hidden, -torch.inf)
        return self._bias[window, dtype]


class GroupedPlan(PagedPlan):
    """The calls of a step: sequences of similar length are together, decodes and prompts separate."""

    def __init__(self, batch: StepBatch, block_size: int) -> None:
        super().__init__(batch, block_size)
        parts, row = [], 0
        for index, (count, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
            parts.append(Part(index, row, count, context))
            row += count
        most_keys = _MOST_KEYS_ON_CPU if batch.slots.device.type == "cpu" else _MOST_KEYS
        self.groups = [CallGroup(group, batch, block_size) for group in _of_like_length(parts, most_keys)]


def _of_like_length(parts: list[Part], most_keys: int) -> list[list[Part]]:
    """Group `parts` of similar counts and contexts, at most `most_keys` padded keys in each, in the batch's order."""
    groups: list[list[Part]] = []
    count = shortest = longest = 0
    for part in sorted(parts, key=lambda part: (part.count, part.context), reverse=True):
        least, most = min(shortest, part.context), max(longest, part.context)
        keys = (len(groups[-1]) + 1) * most if groups else 0
        alike = part.count >= _LEAST_FILL * count and least >= _LEAST_FILL * most
        if groups and alike and keys <= most_keys and keys * count <= _MOST_SCORES:
            groups[-1].append(part)
            shortest, longest = least, most
        else:
            groups.append([part])
            count, shortest, longest = part.count, part.context, part.context
    return [sorted(group, key=lambda part: part.row) for group in groups]


class SdpaAttention(PagedAttention):
    """Attention by batched products or `scaled_dot_product_attention` over gathered keys."""

    name = "sdpa"

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._views: WeakKeyDictionary[CallGroup, dict[tuple[torch.Size, torch.dtype], _Gathered]] = WeakKeyDictionary()

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        """Attend with `query` [T, heads · head_dim] -> [T, heads · head_dim]."""
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
        """Attend with the group's `query` [n · count, heads · head_dim] -> [n · count, heads · head_dim]."""
        if group.count == 1 and query.device.type == "cpu":
            return self._decode(query, cache, shape, group)
        return _gathered_attention(query, cache, shape, group)

    def _decode(self, query: Tensor, cache: LayerCache, shape: AttentionShape, group: CallGroup) -> Tensor:
        """Attend with one query per sequence, `query` [n, heads · head_dim] -> [n, heads · head_dim].

        The heads that share a key head become query rows of it: their mask is the same.
        """
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
        """Return the memory for `group`, which layers of equal shape share within its step."""
        views = self._views.setdefault(group, {})
        key = (cache.keys.shape, cache.keys.dtype)
        if key not in views:
            views[key] = _Gathered(self._memory(cache, group), cache, group)
        return views[key]

    def _memory(self, cache: LayerCache, group: CallGroup) -> Tensor:
        """Return memory [2, size], kept from step to step: the system takes long to hand out fresh pages."""
        size, dtype = group.blocks(cache.keys.shape[1]).numel() * cache.keys[0, 0].numel(), cache.keys.dtype
        if dtype not in self._scratch or self._scratch[dtype].shape[1] < size:
            self._scratch[dtype] = torch.empty(2, size, dtype=dtype)
        return self._scratch[dtype][:, :size]


class _Gathered:
    """Memory in which the keys and values of a group's decodes are gathered, the same for each layer.

    Its views are made once per step: with few sequences the number of calls matters, even of calls that only make
    views.
    """

    def __init__(self, memory: Tensor, cache: LayerCache, group: CallGroup) -> None:
        """Make views of `memory` [2, n · kv_heads · keys · head_dim], for the keys and for the values."""
        _, kv_heads, block_size, head_dim = cache.keys.shape
        keys, values = memory
        by_head = (group.size * kv_heads, -1, head_dim)
        self.keys, self.values = (each.view(-1, block_size * head_dim) for each in (keys, values))
        """[n · kv_heads · blocks, block_size · head_dim] each."""
        self.value_rows = values.view(-1, head_dim)
        """[any, head_dim]."""
        self.keys_across = keys.view(by_head).transpose(1, 2)
        """[n · kv_heads, head_dim, keys]."""
        self.values_by_head = values.view(by_head)
        """[n · kv_heads, keys, head_dim]."""
        self.ignored = memory[:1, :1, None]


def _gathered_attention(query: Tensor, cache: LayerCache, shape: AttentionShape, group: CallGroup) -> Tensor:
    """Attend with the group's `query` [n · count, heads · head_dim] -> [n · count, heads · head_dim]."""
    _, kv_heads, _, head_dim = cache.keys.shape
    blocks, padding = group.blocks(kv_heads), group.padding(kv_heads)
    k, v = gather(cache.keys, blocks), gather(cache.values, blocks)
    for gathered in (k, v):  # as in `_decode`; nor does a bias hide the NaN of a score
        gathered.view(-1, head_dim).index_fill_(0, padding, 0)
    if group.count == 1:
        # The heads that share a key head become query rows of it.
        q = query.view(group.size, kv_heads, -1, head_dim)
        return _attention(q, k, v, shape, group).reshape(query.shape)
    q = query.view(group.size, group.count, shape.heads, head_dim).transpose(1, 2)
    return _attention(q, k, v, shape, group).transpose(1, 2).reshape(query.shape)


def _attention(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, group: CallGroup) -> Tensor:
    """Attend with q [n, h, rows, head_dim] to k, v [n, kv_heads, keys, head_dim] -> [n, h, rows, head_dim].

    Uses torch's own attention or, with a softcap, which it lacks, separate operations.
    """
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
