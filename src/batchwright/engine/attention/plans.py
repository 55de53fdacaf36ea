"""How a step's sequences are put into calls of torch, and the indices and masks of each, made once for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.engine.attention.paged import StepPlan, head_rows
from batchwright.engine.attention.reference import visible
from batchwright.engine.batch import StepBatch

_LEAST_FILL = 0.75
_MOST_KEYS = 64 * 1024
"""Padded keys of one group: bounds the memory of the gathered copy."""
_MOST_KEYS_ON_CPU = 16 * 1024
"""There the copy should still lie in the processor's cache when it is read."""


class Decodes:
    """Sequences with one query each, whose keys are padded to the longest."""

    def __init__(self, group: list[tuple[int, int, int]], batch: StepBatch, block_size: int) -> None:
        """`group` holds (context, row of the batch, index of the sequence), in the order of the results."""
        device = batch.block_tables.device
        blocks = -(-max(context for context, _, _ in group) // block_size)
        self.rows = torch.tensor([row for _, row, _ in group], device=device)
        """[n] int64."""
        self._tables = batch.block_tables[torch.tensor([index for _, _, index in group], device=device), :blocks]
        self._contexts = torch.tensor([context for context, _, _ in group], device=device)[:, None]
        self._keys = torch.arange(blocks * block_size, device=device)[None, :]
        self._blocks: dict[int, Tensor] = {}
        self._padding: dict[int, Tensor] = {}
        self._hidden: dict[int | None, Tensor] = {}

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
        """[n, 1, 1, keys] bool: what the queries do not see."""
        if window not in self._hidden:
            hidden = self._keys >= self._contexts
            if window is not None:
                hidden |= self._keys < self._contexts - window
            self._hidden[window] = hidden[:, None, None, :]
        return self._hidden[window]


class Prefill:
    """`count` queries of one sequence, from `row` of the batch on, the last of `context` positions."""

    def __init__(self, row: int, count: int, context: int, table: Tensor) -> None:
        """`table` [1, blocks] holds all keys."""
        self.row, self.count, self.context = row, count, context
        self._table = table
        self._blocks: dict[int, Tensor] = {}
        self._visible: dict[int | None, Tensor] = {}

    def blocks(self, kv_heads: int) -> Tensor:
        """[1, kv_heads, blocks] int64: rows for `gather`."""
        if kv_heads not in self._blocks:
            self._blocks[kv_heads] = head_rows(self._table, kv_heads)
        return self._blocks[kv_heads]

    def visible(self, window: int | None) -> Tensor:
        """[count, context] bool."""
        if window not in self._visible:
            self._visible[window] = visible(self.count, self.context, window, self._table.device)
        return self._visible[window]


class GroupedPlan(StepPlan):
    """Decodes of like length side by side, prompts one by one."""

    def __init__(self, batch: StepBatch, block_size: int) -> None:
        super().__init__(batch, block_size)
        self.prefills: list[Prefill] = []
        decodes, row = [], 0
        for index, (count, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
            if count == 1:
                decodes.append((context, row, index))
            else:
                table = batch.block_tables[index : index + 1, : -(-context // block_size)]
                self.prefills.append(Prefill(row, count, context, table))
            row += count
        groups = _of_like_length(decodes, _MOST_KEYS_ON_CPU if batch.slots.device.type == "cpu" else _MOST_KEYS)
        self.decodes = [Decodes(group, batch, block_size) for group in groups]
        self.in_order = not self.prefills and len(groups) == 1
        """Whether the only group is the batch, row for row."""


def _of_like_length(decodes: list[tuple[int, int, int]], most_keys: int) -> list[list[tuple[int, int, int]]]:
    """`decodes`, that begin with their contexts, in groups of at most `most_keys` padded keys, in the batch's order."""
    groups: list[list[tuple[int, int, int]]] = []
    longest = 0
    for item in sorted(decodes, reverse=True):
        group = groups[-1] if groups else None
        if group and item[0] >= _LEAST_FILL * longest and (len(group) + 1) * longest <= most_keys:
            group.append(item)
        else:
            longest = item[0]
            groups.append([item])
    return [sorted(group, key=lambda item: item[1]) for group in groups]
