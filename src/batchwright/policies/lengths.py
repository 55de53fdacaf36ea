"""Which lengths belong together.

The idea: a batch costs α + (β · longest + γ) · items. Sorted by length, the requests of one batch stand side by side in
some best division, since exchanging two that do not can only shorten what is padded. So the division with the least
model time in all is found exactly, by dynamic programming over where a batch begins: few large batches where a batch
costs much by itself, narrow ones where padding does. Where the best batch of the j shortest begins never moves down as
j grows (the cost has the quadrangle property), so the search goes on from where it last ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchwright.policies.checks import check_size
from batchwright.policies.item import Item
from batchwright.policies.latency import LatencyModel

_UNKNOWN = (1e9, 1.0, 0.0)
"""Before anything is known: as few batches as possible, then as little padding."""


class PaddedLimits:
    """What batches of a shape that looks at lengths hold: so many items, and so many padded tokens if that is given."""

    keeps_order = False

    def __init__(self, max_batch_size: int, max_batch_tokens: int | None = None) -> None:
        check_size("max_batch_size", max_batch_size)
        if max_batch_tokens is not None:
            check_size("max_batch_tokens", max_batch_tokens)
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens


def capacity(longest: int, max_size: int, max_tokens: int | None) -> int:
    """How many items a batch holds when each is padded to `longest`. One is always allowed."""
    if max_tokens is None or not longest:
        return max_size
    return max(1, min(max_size, max_tokens // longest))


def divide(
    items: Sequence[Item], max_size: int, max_tokens: int | None, latency: LatencyModel
) -> list[tuple[Sequence[Item], bool]]:
    """Batches of like length for all of `items`, each in the order given, and whether it is full.

    A batch of one length takes those that come first in `items`, and as many as it may. So several such batches may
    name the same requests: dispatch one, then divide again.
    """
    lengths = [item.length for item in items]
    longest = max(lengths)
    if min(lengths) == longest:
        room = capacity(longest, max_size, max_tokens)
        return [(items[:room], len(items) >= room)]
    by_length = sorted(range(len(items)), key=lengths.__getitem__)
    lengths.sort()
    batches: list[tuple[Sequence[Item], bool]] = []
    for begin, end in _cuts(lengths, max_size, max_tokens, latency.coefficients if latency.batches else _UNKNOWN):
        low, high = lengths[begin], lengths[end - 1]
        room = capacity(high, max_size, max_tokens)
        if low == high:
            members = [item for item in items if item.length == low][:room]
        else:
            members = [items[index] for index in sorted(by_length[begin:end])]
        batches.append((members, len(members) >= room))
    return batches


def _cuts(
    lengths: Sequence[int], max_size: int, max_tokens: int | None, coefficients: tuple[float, float, float]
) -> list[tuple[int, int]]:
    """The ranges of the best division of ascending `lengths`."""
    base, by_cell, by_item = coefficients
    total = len(lengths)
    costs = [0.0] * (total + 1)
    begins = [0] * (total + 1)
    last = 0
    for end in range(1, total + 1):
        each = by_cell * lengths[end - 1] + by_item
        best = math.inf
        for begin in range(max(last, end - capacity(lengths[end - 1], max_size, max_tokens)), end):
            cost = costs[begin] + each * (end - begin)
            if cost < best:
                best, last = cost, begin
        costs[end] = best + base
        begins[end] = last
    ranges, end = [], total
    while end:
        ranges.append((begins[end], end))
        end = begins[end]
    ranges.reverse()
    return ranges
