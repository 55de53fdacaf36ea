"""Batches of similar length under a budget of padded tokens.

The idea: a batch is padded to its longest request, so different lengths in one batch waste the difference. A batch
costs α + (β · longest + γ) · items. In some best division, the requests of one batch are adjacent when sorted by
length, since exchanging two that are not can only shorten the padding. So the division with the least model time in
total is found exactly, by dynamic programming over where a batch begins: few large batches if the fixed cost of a batch
dominates, narrow ones if padding does. The beginning of the best last batch of the j shortest never moves down as j
grows (the cost has the quadrangle property), so the search continues from where it last ended; and it is known how
expensive a request has to become before a later beginning is better, so mostly there is nothing to search.

`length_aware` divides the waiting requests in this way whenever the model is free, and dispatches the batch that holds
the first request in order. So lengths decide what goes along with it, never whether it goes: no request is stranded
because its length is rare. A request longer than the whole budget goes alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from batchwright.policies.checks import check_size
from batchwright.policies.latency import LatencyModel
from batchwright.policies.policy import Item, Order, Policy, Shape, Timing

_LOOK_AHEAD = 4
"""Number of full batches of waiting requests that `LikeLengths` considers."""
_A_BIT_LESS = 1.0 - 1e-12
"""Factor by which a cost is lowered so that rounding does not hide an equally good beginning."""
_UNKNOWN = (1e9, 1.0, 0.0)
"""Coefficients before any are learned: as few batches as possible, then as little padding."""


class PaddedLimits(Shape):
    """Base of shapes that look at lengths, with a limit on items and, optionally, one on padded tokens."""

    def __init__(self, max_batch_size: int, max_batch_tokens: int | None = None) -> None:
        check_size("max_batch_size", max_batch_size)
        if max_batch_tokens is not None:
            check_size("max_batch_tokens", max_batch_tokens)
        self._size = max_batch_size
        self._tokens = max_batch_tokens

    @property
    def max_batch_size(self) -> int:
        return self._size

    @property
    def max_batch_tokens(self) -> int | None:
        return self._tokens


class LikeLengths(PaddedLimits):
    """Shape that takes the first request in order, with others of similar length."""

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        seen = items[: _LOOK_AHEAD * self.max_batch_size]
        batches = divide(seen, self.max_batch_size, self.max_batch_tokens, latency)
        # It is first in every batch of its length, of which there may be several.
        return max((batch for batch in batches if batch[0][0] is seen[0]), key=lambda batch: len(batch[0]))


def length_aware(
    max_batch_tokens: int | None = 4096,
    max_batch_size: int = 32,
    *,
    order: Order | None = None,
    timing: Timing | None = None,
) -> Policy:
    """Return a policy that groups similar lengths, with at most this many padded tokens and requests in a batch."""
    return Policy(LikeLengths(max_batch_size, max_batch_tokens), order=order, timing=timing)


def capacity(longest: int, max_size: int, max_tokens: int | None) -> int:
    """Return how many items a batch holds if each is padded to `longest`; at least one."""
    if max_tokens is None or not longest:
        return max_size
    return max(1, min(max_size, max_tokens // longest))


def leading(items: Sequence[Item], length: int, max_size: int, max_tokens: int | None) -> tuple[Sequence[Item], bool]:
    """Return as many of the first of `items`, all of one length, as a batch holds, and whether it is full."""
    room = capacity(length, max_size, max_tokens)
    return items[:room], len(items) >= room


def divide(
    items: Sequence[Item], max_size: int, max_tokens: int | None, latency: LatencyModel
) -> list[tuple[Sequence[Item], bool]]:
    """Divide `items` into batches of similar length, each in the given order and with whether it is full.

    A batch of one length takes as many of the first such requests in `items` as it may; further ones are in no batch.
    Several batches may contain the same requests: dispatch one, then divide again.
    """
    lengths = [item.length for item in items]
    longest = max(lengths)
    if min(lengths) == longest:
        return [leading(items, longest, max_size, max_tokens)]
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
    """Return the ranges of the best division of ascending `lengths`."""
    base, by_cell, by_item = coefficients
    total = len(lengths)
    costs = [0.0] * (total + 1)
    begins = [0] * (total + 1)
    last, dearest = 0, math.inf
    for end, longest in enumerate(lengths, 1):
        each = by_cell * longest + by_item
        first = end - (max_size if max_tokens is None else capacity(longest, max_size, max_tokens))
        if last < end - 1:
            dear = (costs[end - 1] * _A_BIT_LESS - costs[last]) / (end - 1 - last)
            if dear < dearest:
                dearest = dear
        if each >= dearest or first > last:
            last = _begin(costs, each, last if last > first else first, end)
            known = costs[last]
            later = range(last + 1, end)
            dearest = min([(costs[begin] * _A_BIT_LESS - known) / (begin - last) for begin in later], default=math.inf)
        costs[end] = costs[last] + each * (end - last) + base
        begins[end] = last
    ranges, end = [], total
    while end:
        ranges.append((begins[end], end))
        end = begins[end]
    ranges.reverse()
    return ranges


def _begin(costs: Sequence[float], each: float, first: int, end: int) -> int:
    """Return where the last batch of the `end` shortest begins, at `first` or later; the first of equal places."""
    best = costs[first] + each * (end - first)
    # Costs only grow: once they alone reach the best total, nothing later is better.
    beyond = bisect_left(costs, best, first + 1, end)
    tried = [costs[begin] + each * (end - begin) for begin in range(first + 1, beyond)]
    if tried and (least := min(tried)) < best:
        return first + 1 + tried.index(least)
    return first
