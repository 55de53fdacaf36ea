"""The waiting items, in the order in which they are to be served."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence

from batchwright.policies.item import Item


class Queue:
    """Items sorted by `(key, ordinal)`: lower keys first, equal keys as they came.

    A key never changes while its item waits. So one sorted list does for every order, and taking a batch off its head
    is a slice. Entering behind all others, the usual case, costs an append.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        """Read it, do not change it."""
        self.total_length = 0
        """Sum of the lengths."""
        self.with_deadline = 0
        """How many items have a deadline."""
        self._arrivals: OrderedDict[int, Item] = OrderedDict()
        self._ordinal = 0

    def __len__(self) -> int:
        return len(self.items)

    def add(self, item: Item) -> None:
        item.ordinal = self._ordinal
        self._ordinal += 1
        items = self.items
        if not items or items[-1].key <= item.key:
            items.append(item)
        else:
            insort(items, item, key=_place)
        self._arrivals[item.ordinal] = item
        self.total_length += item.length
        if item.due < math.inf:
            self.with_deadline += 1

    def remove(self, item: Item) -> bool:
        """Take out one item. False when it is not here."""
        if item.ordinal not in self._arrivals:
            return False
        del self.items[self.rank(item)]
        self._forget(item)
        return True

    def take(self, batch: Sequence[Item]) -> None:
        """Take out a batch, all of whose items are here."""
        size = len(batch)
        items = self.items
        if all(mine is theirs for mine, theirs in zip(items, batch, strict=False)):
            del items[:size]
        else:
            # Those behind the last of them are not looked at: they may be thousands.
            end = self.rank(max(batch, key=_place)) + 1
            gone = {item.ordinal for item in batch}
            items[:end] = [item for item in items[:end] if item.ordinal not in gone]
        for item in batch:
            self._forget(item)

    def rank(self, item: Item) -> int:
        """How many items go before this one."""
        return bisect_left(self.items, (item.key, item.ordinal), key=_place)

    def length_of_first(self, count: int) -> int:
        """Sum of the lengths of the first `count`."""
        items = self.items
        if 2 * count <= len(items):
            return sum(item.length for item in items[:count])
        return self.total_length - sum(item.length for item in items[count:])

    @property
    def oldest(self) -> Item:
        """The item that came first. Raises `StopIteration` when there is none."""
        return next(iter(self._arrivals.values()))

    def _forget(self, item: Item) -> None:
        del self._arrivals[item.ordinal]
        item.ordinal = -1
        self.total_length -= item.length
        if item.due < math.inf:
            self.with_deadline -= 1


def _place(item: Item) -> tuple[float, int]:
    return item.key, item.ordinal
