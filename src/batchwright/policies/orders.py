"""Orders of waiting requests: by priority and deadline, and by fair shares of tenants. No request starves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from batchwright.policies.checks import check_time
from batchwright.policies.latency import LatencyModel
from batchwright.policies.policy import Item, NarrowedShape, Order, Policy, Shape, are_alike
from batchwright.policies.simple import BySize, MaxWait

_CLOCKS_KEPT = 1024


class Urgency(Order):
    """Order by priority and deadline, where one step of priority is worth `aging` seconds of waiting.

    The place of a request is fixed when it arrives, at `arrival + aging · priority`; lower is sooner. Among requests of
    similar age the lowest priority goes first, but one that has waited `aging` seconds longer has made up one step.
    Within a priority, requests go in order of arrival.

    A deadline nearer than `aging` counts as if the request had arrived that much earlier: it goes before others of its
    priority, the nearest deadline first, but never before those of the next priority that arrived with it.
    """

    def __init__(self, aging: float = 10.0) -> None:
        check_time("aging", aging, above_zero=True)
        self.aging = aging

    def place(self, items: Sequence[Item]) -> None:
        aging = self.aging
        if are_alike(items):
            level = items[0].priority
            before = aging * level
            for item in items:
                item.key = before + item.arrival
                item.level = level
            return
        for item in items:
            due, priority = item.due - aging, item.priority
            item.key = aging * priority + (due if due < item.arrival else item.arrival)
            item.level = priority


def priority(batch_size: int = 16, max_wait: float | Mapping[int, float] = 0.1, aging: float = 10.0) -> Policy:
    """Return a policy of batches of `batch_size`, most urgent first, or smaller once one has waited `max_wait` s.

    `max_wait` may be a mapping from priorities to seconds, as for `MaxWait`.
    """
    return Policy(BySize(batch_size), order=Urgency(aging), timing=MaxWait(max_wait))


class FairShare(Order):
    """Order in which tenants take turns by weight (1 by default); a tenant's items go in order of arrival.

    Start-time fair queueing (Goyal et al. 1996): each tenant has a virtual clock that advances with the tokens it
    sends, more slowly for a greater weight, and a request goes at the time that its tenant's clock showed when it
    arrived. A tenant that sends much runs ahead and waits; one that sends little is served immediately. A clock that
    has fallen behind is set to the time of what is being served, so that no tenant saves up a share by sending nothing.
    While two tenants both wait, the tokens that each is given differ from its share by no more than a request of each.

    `weight_of` returns a factor of the item by which its tenant's weight is multiplied. Raises ValueError, naming the
    tenant, for a weight that is not a finite number above 0.
    """

    refuses = True

    def __init__(
        self, weights: Mapping[Hashable, float] | None = None, *, weight_of: Callable[[Item], float] | None = None
    ) -> None:
        if weights is not None and not isinstance(weights, Mapping):
            raise TypeError(f"weights of type {type(weights).__name__}: must map each tenant to its weight")
        self._weight_of = weight_of
        self.weights = dict(weights or {})
        for tenant, weight in self.weights.items():
            check_time(f"weights[{tenant!r}]", weight, above_zero=True)
        self._now = 0.0
        """Virtual time, which is the place of the last request served."""
        self._clocks: dict[Hashable, float] = {}
        self._most = _CLOCKS_KEPT
        self._waiting = 0

    def place(self, items: Sequence[Item]) -> None:
        for item in items:
            # Overtaking would take from another tenant's share.
            item.key = item.level = self._turn(item)

    def _turn(self, item: Item) -> float:
        try:
            clock = self._clocks.get(item.tenant, 0.0)
        except TypeError as error:
            raise TypeError(f"tenant={item.tenant!r}: must be hashable, such as a text or a number") from error
        start = max(self._now, clock)
        self._clocks[item.tenant] = start + self._cost(item)
        self._waiting += 1
        return start

    def served(self, batch: Sequence[Item]) -> None:
        self._now = max(self._now, min(item.key for item in batch))
        self._left(len(batch))
        if len(self._clocks) > self._most:
            # A clock that is not ahead of the virtual time says nothing.
            self._clocks = {tenant: clock for tenant, clock in self._clocks.items() if clock > self._now}
            self._most = max(_CLOCKS_KEPT, 2 * len(self._clocks))

    def removed(self, item: Item) -> None:
        clock = self._clocks.get(item.tenant)
        if clock is not None:
            self._clocks[item.tenant] = clock - self._cost(item)
        self._left(1)

    def _left(self, number: int) -> None:
        self._waiting -= number
        if not self._waiting:
            # No request waited for what was served: no tenant is owed anything.
            self._clocks.clear()

    def _cost(self, item: Item) -> float:
        weight = self.weights.get(item.tenant, 1.0)
        if self._weight_of is not None:
            weight *= self._weight_of(item)
        return max(item.length, 1) / weight


class EvenBatches(NarrowedShape):
    """Shape that drops from another shape's batch what would make a tenant wait for larger parts of other tenants.

    Tenants with more tokens in the batch than the one whose turn it is may together at most double its part, or add as
    many tokens as cost no more than the fixed cost of a batch. Nothing is dropped while no latency is known.
    """

    def __init__(self, inner: Shape) -> None:
        super().__init__(inner)
        self.keeps_order = False  # what is dropped may be overtaken

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        batch, full = self.inner.choose(items, now, latency)
        tokens: Counter[Hashable] = Counter()
        for item in batch:
            tokens[item.tenant] += item.length
        if len(tokens) <= 1:
            return batch, full
        ordered = sorted(batch, key=_place)
        own = tokens[ordered[0].tenant]
        base, by_token, _ = latency.coefficients
        allowed = max(float(own), base / by_token if latency.batches and by_token > 0.0 else math.inf)
        kept: list[Item] = []
        for item in ordered:
            if tokens[item.tenant] > own:
                if item.length > allowed:
                    continue
                allowed -= item.length
            kept.append(item)
        return kept, full or len(kept) < len(batch)


def _place(item: Item) -> tuple[float, int]:
    return item.key, item.ordinal
