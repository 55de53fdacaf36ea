"""The default: nothing to set.

The idea: dispatch whatever waits as soon as the model is free, and let requests gather while it is busy. When more wait
than go into one batch, or their lengths differ, three questions are answered with what has been learned of the model's
latency (`latency.py`):

1. *Which belong together?* The waiting requests are divided into batches of like length that take the least model time
   in all (`lengths.py`).
2. *How large may each be?* As large as it can be with every request in it still in time. Those that would come too late
   even alone and at once are left until nothing else waits.
3. *Which goes first?* The one that costs the others the fewest deadlines while they wait for it, and of equal ones the
   one with the most answers. So a batch that can wait lets those go first that cannot. Requests without a deadline
   cannot miss any; they weigh against it by how long they have waited in proportion to their batch (highest response
   ratio next), so they do not starve, and long ones not behind short ones.

The order stands above this: the batches compared are those with requests of the level that comes first, which is a
priority, aging included (`priority.py`), or a tenant's turn (`fair.py`), and requests of later levels count for nothing
in them. Until the model's latency is known, requests go in order. Where urgent requests come too, batches of others are
kept short if that costs little (`latency_cap.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.policies.item import Item
from batchwright.policies.latency import LatencyModel
from batchwright.policies.latency_cap import LatencyCappedBatches
from batchwright.policies.lengths import PaddedLimits, capacity, divide
from batchwright.policies.policy import Order, Policy, Timing
from batchwright.policies.priority import Urgency

_LOOK_AHEAD = 128
"""At most so many waiting requests are looked at, and at least one batch of them."""


@dataclass(slots=True)
class _Weight:
    """What a batch has to say for itself, and against the others."""

    seconds: float
    """Model time."""
    slacks: list[float]
    """How long from now each of those that count may still take, ascending."""
    in_time: int
    """How many of those that count have a deadline, which they keep."""
    patience: float
    """Response ratios of the others, summed: waiting and model time over model time."""


class Goodput(PaddedLimits):
    """Shape: the batch that lets the most answers be in time."""

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        seen = items[: max(self.max_batch_size, _LOOK_AHEAD)]
        if not latency.batches:
            return self._first(seen)
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
        """As many of the first as go together."""
        longest = 0
        for count, item in enumerate(items[: self.max_batch_size]):
            longest = max(longest, item.length)
            if count >= capacity(longest, self.max_batch_size, self.max_batch_tokens):
                return items[:count], True
        return items[: self.max_batch_size], len(items) >= self.max_batch_size


def _in_time(batch: Sequence[Item], full: bool, now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
    """The most of `batch` that can go together and all be in time, and whether that is full."""
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
    # Never 0: it is divided by.
    return max(latency.predict(longest * count, count) or 0.0, 1e-9)


def _worth(mine: _Weight, weights: Sequence[_Weight]) -> tuple[float, int]:
    """What speaks for letting this one go first: patience worn out, less deadlines missed; then answers in time."""
    lost = sum(bisect_left(other.slacks, mine.seconds + other.seconds) for other in weights if other is not mine)
    return mine.patience - lost, mine.in_time


def auto(
    max_batch_size: int = 64,
    max_batch_tokens: int | None = None,
    *,
    order: Order | None = None,
    timing: Timing | None = None,
) -> Policy:
    """The default. The limits are what the model can hold at once, not settings to tune."""
    shape = LatencyCappedBatches(Goodput(max_batch_size, max_batch_tokens))
    return Policy(shape, order=order or Urgency(), timing=timing)
