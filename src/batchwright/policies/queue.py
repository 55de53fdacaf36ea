"""The waiting items, in the order in which they are to be served."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from batchwright.policies.item import Item


class Queue:
    """Items sorted by `(key, ordinal)`: lower keys first, equal keys as they came.

    A key never changes while its item waits. So one sorted list does for every order, and taking a batch off its head
    is a slice. Entering behind all others, the usual case, costs an append.
    """

    def __init__(self, *, by_age: bool = False) -> None:
        """With `by_age` it knows which item is the oldest."""
        self.items: list[Item] = []
        """Read it, do not change it."""
        self.total_length = 0
        """Sum of the lengths."""
        self._arrivals: dict[Item, None] | None = {} if by_age else None
        self._ordinal = 0

    def __len__(self) -> int:
        return len(self.items)

    def add(self, items: Sequence[Item]) -> None:
        """Take in items in the order in which they came, their keys being set."""
        mine, ordinal, length = self.items, self._ordinal, 0
        last = mine[-1].key if mine else -math.inf
        for item in items:
            item.ordinal = ordinal
            ordinal += 1
            length += item.length
            if item.key >= last:
                mine.append(item)
                last = item.key
            else:
                insort(mine, item, key=_place)
        self._ordinal = ordinal
        self.total_length += length
        if self._arrivals is not None:
            self._arrivals.update(dict.fromkeys(items))

    def remove(self, item: Item) -> bool:
        """Take out one item. False when it is not here."""
        rank = self.rank(item)
        if self.items[rank : rank + 1] != [item]:
            return False
        del self.items[rank]
        self._forget((item,))
        return True

    def take(self, batch: Sequence[Item]) -> None:
        """Take out a batch, all of whose items are here."""
        batch, items = list(batch), self.items
        if items[: len(batch)] == batch:
            del items[: len(batch)]
        else:
            # Those behind the last of them are not looked at: they may be thousands.
            end = self.rank(max(batch, key=_place)) + 1
            gone = {item.ordinal for item in batch}
            items[:end] = [item for item in items[:end] if item.ordinal not in gone]
        self._forget(batch)

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
        """The item that came first, in a queue by age that is not empty."""
        assert self._arrivals is not None
        return next(iter(self._arrivals))

    def _forget(self, items: Sequence[Item]) -> None:
        if self._arrivals is not None:
            for item in items:
                del self._arrivals[item]
        self.total_length -= sum([item.length for item in items])


def _place(item: Item) -> tuple[float, int]:
    return item.key, item.ordinal
