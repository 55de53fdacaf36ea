"""Batches that do not keep more urgent requests waiting for little gain.

The idea: whoever comes while a batch is computed waits for its end, so a long batch of patient requests costs urgent
ones their time. What a longer batch gains is that fewer batches pay what any batch costs; of one that lasts ten times
that, it is a tenth, and there is little more to gain. So where more urgent requests come too, a batch takes patient
ones only up to that time, or up to a tenth of what its oldest request has waited: a backlog makes batches larger, and
what they save works it off. Where any batch costs much by itself, this shortens nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchwright.policies.item import Item
from batchwright.policies.latency import LatencyModel
from batchwright.policies.policy import NarrowedShape, Shape

_WASTE = 0.1
"""Of the time of a batch: what any batch costs may be so much before others are made to wait for more."""
_BACKLOG_SHARE = 0.1
"""Of what its oldest request has waited: a batch may last so long in any case."""
_REMEMBERED = 64
"""Batches without urgent requests after which none are expected."""


class LatencyCappedBatches(NarrowedShape):
    """Shape: what another shape chose, without the less urgent that would make others wait for little."""

    def __init__(self, inner: Shape) -> None:
        super().__init__(inner)
        self._urgent: float = math.inf
        """The most urgent priority of late."""
        self._without = 0
        """Batches since it was last seen."""

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        batch, full = self.inner.choose(items, now, latency)
        priorities = [item.priority for item in batch]
        self._without += 1
        if (first := min(priorities)) <= self._urgent or self._without > _REMEMBERED:
            self._urgent, self._without = first, 0
        if max(priorities) <= self._urgent or not latency.batches:
            return batch, full
        kept = self._shortened(batch, now, latency)
        return kept, full or len(kept) < len(batch)

    def _shortened(self, batch: Sequence[Item], now: float, latency: LatencyModel) -> Sequence[Item]:
        base, by_token, by_item = latency.coefficients
        waited = now - min(item.arrival for item in batch)
        allowed = max(base / _WASTE, _BACKLOG_SHARE * waited)
        kept: list[Item] = []
        longest = 0
        for item in sorted(batch, key=_priority):
            grown = max(longest, item.length)
            seconds = base + (by_token * grown + by_item) * (len(kept) + 1)
            if not kept or item.priority <= self._urgent or seconds <= allowed:
                kept.append(item)
                longest = grown
        return kept


def _priority(item: Item) -> int:
    return item.priority
