"""The order of independent fields in the prompts of a table's rows that makes prompts begin alike the most.

Rows often repeat in some columns what others say: the product of a review, the article of a comment. Where the fields
of a prompt may come in any order, what is repeated comes first, so that it is computed once and then found in a cache.
Which field is the best to begin with differs from row to row. The groups are found greedily and recursively, much as
in "Optimizing LLM Queries in Relational Data Analytics Workloads" (Liu et al., 2025): the value that saves the most
begins all rows that have it; within these the next one is found among the other fields, and likewise among the rows
without it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Row = Sequence[str]
"""The texts of a row's fields, in the order of the template."""

_LEAST_ROWS = 2
"""Least number of rows with a value for it to be worth a group."""


@dataclass(slots=True)
class _Group:
    """Rows that begin alike, and how they are divided after that."""

    rest: tuple[int, ...]
    """Order of the fields of rows that are in none of the groups."""
    groups: dict[tuple[int, str], tuple[int, _Group]] = field(default_factory=dict)
    """By a field and its value: the rank of the group, the least first, and the group."""


class FieldOrder:
    """Says for each row in which order its fields come. Rows that it was not made from get one too."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """Find the groups among `rows`, all of which have the same number of fields. Takes memory for the values."""
        count = len(rows[0]) if rows else 0
        found = []
        # Maximizing the saving per row finds groups within groups; maximizing the total, large ones.
        for weight in (0.0, 1.0):
            self._root = _grouped(rows, range(len(rows)), tuple(range(count)), weight)
            found.append((_shared(rows, [self.of(row) for row in rows]), -weight, self._root))
        self._root = max(found, key=lambda each: each[:2])[2]

    def of(self, row: Row) -> tuple[int, ...]:
        """Return the numbers of the fields of `row`, the first one first."""
        group, left, order = self._root, set(range(len(row))), list[int]()
        while True:
            found = min(
                (group.groups[name, row[name]] + (name,) for name in left if (name, row[name]) in group.groups),
                key=lambda each: each[0],
                default=None,
            )
            if found is None:
                order += (name for name in group.rest if name in left)
                return (*order, *sorted(left.difference(order)))
            _, group, name = found
            order.append(name)
            left.discard(name)


@dataclass(frozen=True, slots=True)
class FieldReuse:
    """What the prefixes of rows share, as shares of the bytes of all their fields."""

    before: float
    """In the order of the template."""
    after: float
    """In the order that was found."""
    rows: int
    """Number of rows that were compared."""


def reuse_of(rows: Sequence[Row], order: FieldOrder) -> FieldReuse:
    """Return how much of `rows` is in a cache by the time it is computed, if the cache holds all that was."""
    total = max(1, sum(len(value.encode()) for row in rows for value in row))
    before = _shared(rows, [tuple(range(len(row))) for row in rows])
    return FieldReuse(before / total, _shared(rows, [order.of(row) for row in rows]) / total, len(rows))


def _shared(rows: Sequence[Row], orders: Sequence[tuple[int, ...]]) -> int:
    """Return the bytes of whole fields that were in an earlier row, at the same place and after the same ones."""
    seen, found = set[int](), 0
    for row, order in zip(rows, orders, strict=True):
        prefix = 0
        for name in order:
            prefix = hash((prefix, name, row[name]))
            if prefix in seen:
                found += len(row[name].encode())
            seen.add(prefix)
    return found


def _grouped(rows: Sequence[Row], members: Sequence[int], names: tuple[int, ...], weight: float) -> _Group:
    """Return the groups among some rows by some fields; `weight`: the power to which their sizes count."""
    having = _having(rows, members, names)
    saved = Counter[int]()
    for (name, value), each in having.items():
        saved[name] += len(value) * (len(each) - 1)
    found = _Group(tuple(sorted(names, key=lambda name: (-saved[name], name))))
    if len(names) < 2:
        return found
    # The heap may count rows that earlier groups took: each value is evaluated again when its turn comes.
    heap = [(-_saved(rows, each, names, weight), *key) for key, each in having.items() if len(each) >= _LEAST_ROWS]
    heapq.heapify(heap)
    taken = set[int]()
    while heap:
        _, name, value = heapq.heappop(heap)
        left = [member for member in having[name, value] if member not in taken]
        saves = _saved(rows, left, names, weight)
        if not saves:
            continue
        if len(left) < len(having[name, value]) and heap and saves < -heap[0][0]:
            having[name, value] = left
            heapq.heappush(heap, (-saves, name, value))
            continue
        taken.update(left)
        inside = _grouped(rows, left, tuple(each for each in names if each != name), weight)
        found.groups[name, value] = len(found.groups), inside
    return found


def _having(rows: Sequence[Row], members: Sequence[int], names: tuple[int, ...]) -> dict[tuple[int, str], list[int]]:
    """Return the rows that have each value of each field."""
    having: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for member in members:
        row = rows[member]
        for name in names:
            having[name, row[name]].append(member)
    return having


def _saved(rows: Sequence[Row], members: Sequence[int], names: tuple[int, ...], weight: float) -> float:
    """Return the characters of each row that need not be computed if all begin with what they have in common.

    They are multiplied by the number of rows to the power of `weight`: 1 for the characters of all, 0 for those of
    each, so that many rows with a short value in common are not taken before some of them that share a longer one.
    """
    if len(members) < _LEAST_ROWS:
        return 0.0
    first = rows[members[0]]
    common = [name for name in names if all(rows[member][name] == first[name] for member in members[1:])]
    count = len(members)
    return sum(len(first[name]) for name in common) * (1.0 - 1.0 / count) * math.pow(count, weight)
