"""The requests that wait for a policy's decision, and what was learned about the model that computes them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from batchwright.policies.latency import LatencyModel
from batchwright.policies.policy import BatchPolicy, Dispatch, Item, Items, Wait, are_alike, compared

_LEAST_LATENESS = 1e-3
"""Resolution of the timers of event loops, in seconds."""
_LATENESS_KEPT = 0.95
"""Share of the expected lateness of timers that remains after one that was less late."""


class Backlog:
    """Waiting requests in serving order, and the policy that decides about them. It has no clock.

    It learns how long batches take, and tells `policy.memory`, if there is one, which ones fitted.
    """

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.latency = LatencyModel()
        self.draining = False
        """Whether everything that waits must be dispatched now."""
        self._waiting = SortedItems()
        self._padding = 1.0
        """Padded tokens per token in recent batches."""
        self._lateness = _LEAST_LATENESS
        """Greatest recent lateness of a timer in seconds."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    @property
    def items(self) -> Sequence[Item]:
        """Waiting requests in serving order. Not to be changed."""
        return self._waiting.items

    @property
    def takes_many(self) -> bool:
        """Whether `add` never raises, so that several arrivals can be added together later."""
        return not self.policy.refuses and self.policy.memory is None

    @property
    def memory_limit_mb(self) -> float | None:
        """Memory that a batch may take now, in MB; None if batches are not fitted into memory."""
        return None if self.policy.memory is None else self.policy.memory.limit_mb

    def add(self, items: Sequence[Item]) -> None:
        """Add new requests, given in order of arrival.

        Raises `InvalidRequest` for one that no batch can hold, and whatever the policy raises for one that it refuses.
        """
        if self.policy.memory is not None:
            for item in items:
                self.policy.memory.check(item)
        if items:
            items = compared(items)
            for item in items if not items.alike else ():
                if item.max_wait is not None:
                    item.release = item.arrival + item.max_wait
            self.policy.place(items)
            self._waiting.add(items)

    def remove(self, item: Item) -> bool:
        """Remove a request that is no longer wanted. False if it does not wait here."""
        found = self._waiting.remove(item)
        if found:
            self.policy.removed(item)
        return found

    def decide(self, now: float, *, drain: bool = False) -> Dispatch | Wait:
        """Return what a free model should compute now. The requests of a batch leave the queue.

        Raises whatever the policy raises, and ValueError for a batch with requests that do not wait.
        """
        if not self._waiting:
            return Wait(math.inf)
        self.draining = drain
        decision = self.policy.decide(self, now)
        if isinstance(decision, Wait):
            return decision
        # A copy, since the queue itself is about to change.
        batch = Items.of(decision.items, alike=self._waiting.items.alike)
        # First call what may raise: if it does, the requests still wait.
        self.policy.served(batch)
        self._waiting.take(batch)
        return Dispatch(batch, decision.reason)

    def observe(self, cells: int, tokens: int, count: int, seconds: float) -> None:
        """Learn that a batch of `count` requests with `tokens` in total, `cells` with padding, took `seconds`."""
        self.latency.observe(cells, count, seconds)
        if tokens:
            self._padding += (cells / tokens - self._padding) * 0.1

    def learn_memory(self, fitted: Sequence[Sequence[Item]], failed: Sequence[Sequence[Item]]) -> None:
        """Learn which parts of a batch were computed, and which ran out of memory."""
        if self.policy.memory is not None:
            self.policy.memory.learn(fitted, failed)

    def seconds(self, cells: int, count: int) -> float | None:
        """Return the expected model time of one batch; None if nothing is known."""
        return self.latency.predict(cells, count)

    def predict(self, item: Item | None = None) -> float | None:
        """Return the seconds of model time until the waiting `item` is done; without one, until all requests are.

        None if nothing is known. The estimate for an item is on the low side, since requests are refused by it.
        """
        waiting = self._waiting
        if item is None:
            count, cells = len(waiting), waiting.total_length * self._padding
        elif self.policy.keeps_order:
            ahead = waiting.rank(item)
            # Padding is not certain.
            count, cells = ahead + 1, float(waiting.length_of_first(ahead) + item.length)
        else:
            # It may overtake all others, so only its own time is certain.
            return self.latency.predict(item.length, 1)
        return self.latency.predict(cells, count, -(-count // self.policy.max_batch_size))

    def predict_high(self) -> float | None:
        """Return the seconds, rarely exceeded, from a time that was asked for until all waiting requests are done.

        None when nothing is known.
        """
        count, cells = len(self._waiting), self._waiting.total_length * self._padding
        seconds = self.latency.predict_high(cells, count, -(-count // self.policy.max_batch_size))
        return None if seconds is None else seconds + self._lateness

    def timer_was_late(self, seconds: float) -> None:
        """Learn that the policy was asked `seconds` after the time that it had requested."""
        self._lateness = max(seconds, _LEAST_LATENESS, self._lateness * _LATENESS_KEPT)


class SortedItems:
    """Items sorted by `(key, ordinal)`: lower keys first, equal keys in order of arrival.

    A key never changes while its item waits. So one sorted list serves every order, and taking a batch off its head is
    a slice. Entering behind all others, the usual case, is an append.
    """

    def __init__(self) -> None:
        self.items = Items.of((), alike=True)
        """Items in order; read-only."""
        self.total_length = 0
        """Sum of the items' lengths."""
        self._ordinal = 0

    def __len__(self) -> int:
        return len(self.items)

    def add(self, items: Sequence[Item]) -> None:
        """Add items, given in order of arrival, whose keys are set."""
        mine = self.items
        self._compare(items)
        last = mine[-1].key if mine else -math.inf
        for ordinal, item in enumerate(items, self._ordinal):
            item.ordinal = ordinal
        keys = [item.key for item in items]
        if keys[0] >= last and keys.count(keys[0]) == len(keys):
            mine += items
        else:
            for item in items:
                if item.key >= last:
                    mine.append(item)
                    last = item.key
                else:
                    insort(mine, item, key=_place)
        self._ordinal += len(items)
        self.total_length += _total_length(items)

    def _compare(self, items: Sequence[Item]) -> None:
        """Note whether all items are alike once these are added."""
        if not are_alike(items):
            self.items.alike = False
        elif not self.items:
            self.items.alike = True
        elif self.items[0].length != items[0].length or self.items[0].priority != items[0].priority:
            self.items.alike = False

    def remove(self, item: Item) -> bool:
        """Remove one item. False if it is not here."""
        rank = self.rank(item)
        if self.items[rank : rank + 1] != [item]:
            return False
        del self.items[rank]
        self.total_length -= item.length
        return True

    def take(self, batch: Sequence[Item]) -> None:
        """Remove a batch. Raises ValueError if any of its items are not here."""
        total = _total_length(batch)
        batch, items = list(batch), self.items
        if items[: len(batch)] == batch:
            del items[: len(batch)]
        else:
            # Items behind the last of them are not examined: there may be thousands.
            end = self.rank(max(batch, key=_place)) + 1
            gone = {item.ordinal for item in batch}
            kept = [item for item in items[:end] if item.ordinal not in gone]
            if end - len(kept) != len(batch):
                raise ValueError("not all of the batch wait")
            items[:end] = kept
        self.total_length -= total

    def rank(self, item: Item) -> int:
        """Return how many items go before this one."""
        return bisect_left(self.items, (item.key, item.ordinal), key=_place)

    def length_of_first(self, count: int) -> int:
        """Return the sum of the lengths of the first `count` items."""
        items = self.items
        if 2 * count <= len(items):
            return sum(item.length for item in items[:count])
        return self.total_length - sum(item.length for item in items[count:])


def _total_length(items: Sequence[Item]) -> int:
    return len(items) * items[0].length if are_alike(items) else sum([item.length for item in items])


def _place(item: Item) -> tuple[float, int]:
    return item.key, item.ordinal
