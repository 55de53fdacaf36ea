"""The default policy, which has nothing to configure.

The idea: dispatch whatever waits as soon as the model is free, and let requests gather while it is busy. If more wait
than fit into one batch, or their lengths differ, three questions are answered from what has been learned about the
model's latency (`latency.py`):

1. *Which belong together?* The waiting requests are divided into batches of similar length that take the least model
   time in total (`lengths.py`).
2. *How large may each be?* As large as possible with every request in it still on time. Requests that would be late
   even if computed alone immediately are left until nothing else waits.
3. *Which goes first?* The one that makes the others miss the fewest deadlines while they wait for it and, among equals,
   the one with the most answers. So a batch that can wait lets those go first that cannot. Requests without a deadline
   cannot miss any; they count by how long they have waited in proportion to the time of their batch (highest response
   ratio next), so they do not starve, nor do long ones starve behind short ones.

The order takes precedence over this: the batches compared are those with requests of the level that comes first, which
is a priority, including aging, or a tenant's turn (`orders.py`), and requests of later levels count for
nothing in them. Until the model's latency is known, requests go in order.

If urgent requests arrive too, batches of other requests are kept short. A request that arrives while a batch is
computed waits for its end, so a long batch of patient requests delays urgent ones. What a longer batch gains is that
fewer batches pay the fixed cost of a batch; in a batch that lasts ten times that cost, it is a tenth, and there is
little more to gain. So a batch takes patient requests only up to that time, or up to a tenth of the time that its
oldest request has waited: a backlog makes batches larger, and what they save works it off. If the fixed cost of a batch
is high, this shortens nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.policies.latency import LatencyModel
from batchwright.policies.lengths import PaddedLimits, capacity, divide, leading
from batchwright.policies.orders import Urgency
from batchwright.policies.policy import Item, NarrowedShape, Order, Policy, Shape, Timing, are_alike

_LOOK_AHEAD = 128
"""Most waiting requests that are considered; at least a whole batch always is."""
_WASTE = 0.1
"""Share of a batch's time that its fixed cost may be before patient requests are left out for urgent ones."""
_BACKLOG_SHARE = 0.1
"""Time that a batch may last in any case, as a share of the time that its oldest request has waited."""
_REMEMBERED = 64
"""Choices without urgent requests after which none are expected."""


@dataclass(slots=True)
class _Weight:
    """Scores of a candidate batch, over its requests of the first level."""

    seconds: float
    """Model time of the whole batch."""
    slacks: list[float]
    """Seconds left until each deadline, ascending."""
    in_time: int
    """Number of requests with a deadline, all of which the batch meets."""
    patience: float
    """Sum of the response ratios of requests without a deadline: (waiting + model time) / model time."""


class Goodput(PaddedLimits):
    """Shape that lets the most answers be on time."""

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        seen = items[: max(self.max_batch_size, _LOOK_AHEAD)]
        if not latency.batches:
            return self._first(seen)
        if are_alike(items):
            return leading(seen, seen[0].length, self.max_batch_size, self.max_batch_tokens)
        base, by_cell, by_item = latency.coefficients
        soonest = now + base + by_item
        patient = min([item.due for item in seen]) == math.inf
        hopeful = seen if patient else [item for item in seen if item.due >= soonest + by_cell * item.length]
        if not hopeful:
            return self._first(seen)
        level = hopeful[0].level
        batches = divide(hopeful, self.max_batch_size, self.max_batch_tokens, latency)
        candidates = batches
        if len(batches) > 1:
            candidates = [each for each in batches if any(item.level <= level for item in each[0])]
        if not patient:
            candidates = [_in_time(batch, full, now, latency) for batch, full in candidates]
        if len(candidates) == 1:
            return candidates[0]
        weights = [_weight(batch, level, now, latency) for batch, _ in candidates]
        return max(zip(candidates, weights, strict=True), key=lambda each: _worth(each[1], weights))[0]

    def _first(self, items: Sequence[Item]) -> tuple[Sequence[Item], bool]:
        """Return as many of the first requests of `items` as fit together, and whether they make a full batch."""
        longest = 0
        for count, item in enumerate(items[: self.max_batch_size]):
            longest = max(longest, item.length)
            if count >= capacity(longest, self.max_batch_size, self.max_batch_tokens):
                return items[:count], True
        return items[: self.max_batch_size], len(items) >= self.max_batch_size


def _in_time(batch: Sequence[Item], full: bool, now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
    """Return as many of `batch` as would all be on time if padded to its longest, and whether that is a full batch."""
    dues = sorted([item.due for item in batch])
    if dues[0] == math.inf:
        return batch, full
    longest = max([item.length for item in batch])
    size = len(batch)
    while size > 1 and dues[len(dues) - size] - now < _seconds(latency, longest, size):
        size -= 1
    if size == len(batch):
        return batch, full
    latest = now + _seconds(latency, longest, size)
    return [item for item in batch if item.due >= latest][:size] or batch[:1], True


def _weight(batch: Sequence[Item], level: float, now: float, latency: LatencyModel) -> _Weight:
    seconds = _seconds(latency, max(item.length for item in batch), len(batch))
    counted = [item for item in batch if item.level <= level]
    patient = [now - item.arrival for item in counted if item.due == math.inf]
    patience = len(patient) + sum(patient) / seconds
    slacks = sorted(item.due - now for item in counted)
    return _Weight(seconds, slacks, len(counted) - len(patient), patience)


def _seconds(latency: LatencyModel, longest: int, count: int) -> float:
    # Never 0: it is a divisor.
    return max(latency.predict(longest * count, count) or 0.0, 1e-9)


def _worth(mine: _Weight, weights: Sequence[_Weight]) -> tuple[float, int]:
    """Return the rank of `mine` among `weights`: its patience less the deadlines that others miss; then its answers."""
    lost = sum(bisect_left(other.slacks, mine.seconds + other.seconds) for other in weights if other is not mine)
    return mine.patience - lost, mine.in_time


class LatencyCappedBatches(NarrowedShape):
    """Shape that drops less urgent requests from another shape's batch that would delay urgent ones for little gain."""

    def __init__(self, inner: Shape) -> None:
        super().__init__(inner)
        self.keeps_order = False  # less urgent requests may be overtaken
        self._urgent: float = math.inf
        """Most urgent priority seen recently."""
        self._without = 0
        """Choices since it was last seen."""

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        batch, full = self.inner.choose(items, now, latency)
        first = last = batch[0].priority
        if not are_alike(items):
            priorities = [item.priority for item in batch]
            first, last = min(priorities), max(priorities)
        self._without += 1
        if first <= self._urgent or self._without > _REMEMBERED:
            self._urgent, self._without = first, 0
        if last <= self._urgent or not latency.batches:
            return batch, full
        kept = self._shortened(batch, now, latency)
        return kept, full or len(kept) < len(batch)

    def _shortened(self, batch: Sequence[Item], now: float, latency: LatencyModel) -> Sequence[Item]:
        base, by_token, by_item = latency.coefficients
        waited = now - min(item.arrival for item in batch)
        allowed = max(base / _WASTE, _BACKLOG_SHARE * waited)
        kept: list[int] = []
        longest = 0
        for place, item in sorted(enumerate(batch), key=lambda pair: pair[1].priority):
            grown = max(longest, item.length)
            seconds = base + (by_token * grown + by_item) * (len(kept) + 1)
            if not kept or item.priority <= self._urgent or seconds <= allowed:
                kept.append(place)
                longest = grown
        return [batch[place] for place in sorted(kept)]


def auto(
    max_batch_size: int = 64,
    max_batch_tokens: int | None = None,
    *,
    order: Order | None = None,
    timing: Timing | None = None,
) -> Policy:
    """Return the default policy. The limits are what the model can hold at once, and not settings to tune."""
    shape = LatencyCappedBatches(Goodput(max_batch_size, max_batch_tokens))
    return Policy(shape, order=order or Urgency(), timing=timing)
