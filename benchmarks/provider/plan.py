"""What a client that knows all limits and all answers in advance could get."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.provider.amounts import Quantity, Usage
from benchmarks.provider.limits import Limits

_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Work:
    """A request whose outcome is known in advance."""

    estimate: Usage
    actual: Usage
    seconds: float
    """Seconds from its admission to its end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Times at which a client that knows all limits and all answers gets them."""

    admitted: Sequence[float]
    """The time of each request's admission, in their order."""
    ended: Sequence[float]
    """The time of each request's end, in their order."""
    work: Sequence[Work]

    @property
    def makespan(self) -> float:
        """Seconds from the beginning to the end of the last request."""
        return max(self.ended, default=0.0)

    def delivered(self, until: float, quantity: Quantity = Quantity.TOKENS) -> float:
        """How much has ended by a time."""
        done = (work for end, work in zip(self.ended, self.work, strict=True) if end <= until)
        return sum(work.actual.amount(quantity) for work in done)


def best_plan(limits: Limits, work: Iterable[Work], *, start: float = 0.0) -> Plan:
    """The plan of a client that sends each request at the very moment at which the limits admit it.

    `limits` must be fresh, and are used up. The requests are sent in their order: for the shortest makespan, give them
    by descending `seconds`. Raises ValueError for a request that no limit will ever admit.
    """
    every = tuple(work)
    admitted: list[float] = []
    ended: list[float] = []
    under_way: list[tuple[float, int]] = []
    now = start
    for number, each in enumerate(every):
        while True:
            while under_way and under_way[0][0] <= now:
                end, earlier = heapq.heappop(under_way)
                limits.settle(end, every[earlier].estimate, every[earlier].actual)
            refusal = limits.refusal(now, each.estimate)
            if refusal is None:
                limits.admit(now, each.estimate)
                break
            # A wait shorter than the clock's resolution must pass too.
            later = math.inf if refusal.retry_after is None else now + max(refusal.retry_after, _SLACK)
            now = min(later, under_way[0][0] if under_way else math.inf)
            if math.isinf(now):
                raise ValueError(f"request {number} is never admitted: {refusal.message}")
        admitted.append(now)
        ended.append(now + each.seconds)
        heapq.heappush(under_way, (ended[-1], number))
    return Plan(admitted, ended, every)
