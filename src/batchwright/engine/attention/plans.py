"""How a step's sequences are put into calls of torch, and the indices and masks of each, made once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchwright.engine.attention.paged import PagedPlan, head_rows
from batchwright.engine.step.batch import StepBatch

_LEAST_FILL = 0.75
_MOST_KEYS = 64 * 1024
"""Padded keys of one group: bounds the memory of the gathered copy."""
_MOST_KEYS_ON_CPU = 16 * 1024
"""There the copy should still lie in the processor's cache when it is read."""
_MOST_SCORES = 1024 * 1024
"""Padded queries times padded keys of a group of several: bounds the memory of its mask."""


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a step: `count` queries, from `row` of the batch on, are the last of `context` positions."""

    index: int
    """Among the sequences of the batch."""
    row: int
    count: int
    context: int


class CallGroup:
    """Sequences whose keys are padded to the longest context, and whose queries to the greatest count.

    A sequence's queries are padded with repetitions of its last one: what is computed for them is the same again.
    """

    def __init__(self, parts: list[Part], batch: StepBatch, block_size: int) -> None:
        """`parts` in the order of the results."""
        device = batch.block_tables.device
        blocks = -(-max(part.context for part in parts) // block_size)
        index, row, count, context = torch.tensor([[p.index, p.row, p.count, p.context] for p in parts]).to(device).T
        self.size, self.count = len(parts), max(part.count for part in parts)
        offsets = torch.minimum(torch.arange(self.count, device=device), count[:, None] - 1)
        self.rows = (row[:, None] + offsets).flatten()
        """[n · count] int64: the queries in the batch."""
        self.in_order = sum(part.count for part in parts) == self.size * self.count == batch.num_tokens
        """Whether the group is the batch, row for row."""
        self._positions = (context - count)[:, None] + offsets
        self._contexts = context[:, None]
        self._tables = batch.block_tables[index, :blocks]
        self._keys = torch.arange(blocks * block_size, device=device)
        self._blocks: dict[int, Tensor] = {}
        self._padding: dict[int, Tensor] = {}
        self._hidden: dict[int | None, Tensor] = {}
        self._bias: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def blocks(self, kv_heads: int) -> Tensor:
        """[n, kv_heads, blocks] int64: rows for `gather`."""
        if kv_heads not in self._blocks:
            self._blocks[kv_heads] = head_rows(self._tables, kv_heads)
        return self._blocks[kv_heads]

    def padding(self, kv_heads: int) -> Tensor:
        """[any] int64: what lies past the end of its sequence, in gathered keys seen as [any, head_dim]."""
        if kv_heads not in self._padding:
            past = (self._keys >= self._contexts)[:, None, :].expand(-1, kv_heads, -1)
            self._padding[kv_heads] = past.flatten().nonzero()[:, 0]
        return self._padding[kv_heads]

    def hidden(self, window: int | None) -> Tensor:
        """[n, 1, count, keys] bool: what the queries do not see."""
        if window not in self._hidden:
            positions = self._positions[:, None, :, None]
            hidden = self._keys > positions
            if window is not None:
                hidden |= self._keys <= positions - window
            self._hidden[window] = hidden
        return self._hidden[window]

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """`hidden` as what is added to scores: -inf, elsewhere 0."""
        if (window, dtype) not in self._bias:
            hidden = self.hidden(window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._bias[window, dtype] = bias.masked_fill_(hidden, -torch.inf)
        return self._bias[window, dtype]


class GroupedPlan(PagedPlan):
    """Sequences of like length side by side, decodes and prompts apart."""

    def __init__(self, batch: StepBatch, block_size: int) -> None:
        super().__init__(batch, block_size)
        parts, row = [], 0
        for index, (count, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
            parts.append(Part(index, row, count, context))
            row += count
        most_keys = _MOST_KEYS_ON_CPU if batch.slots.device.type == "cpu" else _MOST_KEYS
        self.groups = [CallGroup(group, batch, block_size) for group in _of_like_length(parts, most_keys)]


def _of_like_length(parts: list[Part], most_keys: int) -> list[list[Part]]:
    """`parts` in groups of like counts and contexts, of at most `most_keys` padded keys, in the batch's order."""
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
