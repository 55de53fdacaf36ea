"""Order by priority and deadline, without starvation.

The idea: a request's place is fixed when it arrives, at `arrival + aging · priority`. Lower is sooner. A priority is
worth `aging` seconds of waiting for each step: among requests of like age the lowest number goes first, but one that
has waited `aging` seconds longer has made up one step. So nothing starves: later arrivals have later places. Within one
priority it is first come, first served.

A deadline nearer than `aging` counts as if the request had come so much earlier: it goes before others of its priority,
the nearest deadline first, and never before those of the next priority that came with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.policies.checks import check_time
from batchwright.policies.item import Item
from batchwright.policies.policy import Order, Policy
from batchwright.policies.simple import BySize, MaxWait


class Urgency(Order):
    """Order by priority and deadline, in which one step of priority is worth `aging` seconds of waiting."""

    def __init__(self, aging: float = 10.0) -> None:
        check_time("aging", aging, above_zero=True)
        self.aging = aging

    def place(self, items: Sequence[Item]) -> None:
        aging = self.aging
        for item in items:
            due, priority = item.due - aging, item.priority
            item.key = aging * priority + (due if due < item.arrival else item.arrival)
            item.level = priority


def priority(batch_size: int = 16, max_wait: float = 0.1, aging: float = 10.0) -> Policy:
    """Return a policy of batches of `batch_size`, most urgent first, or smaller once one has waited `max_wait` s."""
    return Policy(BySize(batch_size), order=Urgency(aging), timing=MaxWait(max_wait))
