"""Slots in the steps of a model that computes token by token.

The idea (iteration-level scheduling, Yu et al. 2022): a step has a fixed number of slots. A request keeps its slot from
its first token to its last, and one that ends leaves its slot to the first waiting request in the very next step. So no
slot stays empty while a request waits, and no request waits for the longest of a batch. An order decides which request
is first; a request that has a slot never loses it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from batchwright.policies.backlog import SortedItems
from batchwright.policies.checks import check_size
from batchwright.policies.orders import Urgency
from batchwright.policies.policy import Item, Order


class Slots:
    """`size` slots, and the requests that wait for one. Raises ValueError for a size below 1."""

    def __init__(self, size: int, order: Order | None = None) -> None:
        check_size("size", size)
        self.size = size
        self.order: Order = order or Urgency()
        self._queue = SortedItems()
        self._live: dict[Item, None] = {}

    def __len__(self) -> int:
        """Return the number of requests, waiting or in a slot."""
        return len(self._queue) + len(self._live)

    @property
    def live(self) -> Collection[Item]:
        """Requests that have a slot, the one that has had it longest first."""
        return self._live.keys()

    @property
    def waiting(self) -> Sequence[Item]:
        """Requests without a slot, the next one first. Not to be changed."""
        return self._queue.items

    @property
    def waiting_length(self) -> int:
        """Sum of the lengths of the waiting requests."""
        return self._queue.total_length

    def add(self, item: Item) -> None:
        """Add a request, which waits until `fill` gives it a slot."""
        self.order.place((item,))
        self._queue.add((item,))

    def fill(self) -> Sequence[Item]:
        """Give the free slots to the first of the waiting requests, and return those."""
        free = self.size - len(self._live)
        if free <= 0 or not self._queue:
            return ()
        placed = self._queue.items[:free]
        self._queue.take(placed)
        # Before the order is notified, so that not even a faulty order can lose them.
        self._live.update(dict.fromkeys(placed))
        self.order.served(placed)
        return placed

    def remove(self, item: Item) -> bool:
        """Remove a request that has ended or is no longer wanted. False if it is not here."""
        if item in self._live:
            del self._live[item]
            return True
        found = self._queue.remove(item)
        if found:
            self.order.removed(item)
        return found

    def clear(self) -> list[Item]:
        """Remove and return all requests; those that had a slot come first."""
        removed = [*self._live, *self._queue.items]
        for item in removed:
            self.remove(item)
        return removed
