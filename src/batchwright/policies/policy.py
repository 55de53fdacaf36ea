"""What a runtime asks of a policy, and a policy made of three parts.

The runtime tells a policy which requests wait, and asks it whenever the model could take a batch: what goes now, why,
and if nothing, when to ask again. A policy has no clock and does no waiting; time comes in as an argument. So it runs
the same in a service, in a simulator and in a test.

`Policy` is composed of three answers, each to its own question:

- **order**: who comes first? (as they came; priority and deadline; a fair share for each tenant)
- **shape**: which of those make a batch? (so many; like lengths under a budget; as many as keep a target)
- **timing**: when does a batch that is not full go? (at once; after a wait; at the end of a window)

Any order goes with any shape and any timing. Three rules hold whatever the parts:

- When the batch that the shape chose is full, it goes at once: there is nothing left to wait for.
- Where the timing holds requests back, one whose deadline would pass goes while there is still time to compute it.
- What drains goes at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from batchwright.policies.item import Item
from batchwright.policies.latency import LatencyModel
from batchwright.policies.queue import Queue


class Reason(StrEnum):
    """Why a batch was dispatched when it was."""

    FULL = "full"
    """Nothing more would have fitted."""
    IDLE = "idle"
    """The model was free, and the policy holds nothing back from a free model."""
    MAX_WAIT = "max_wait"
    """Its oldest request had waited as long as it may."""
    WINDOW = "window"
    """Its window had ended."""
    DEADLINE = "deadline"
    """Waiting longer would have missed a deadline."""
    DRAIN = "drain"
    """The batcher was closing."""
    RETRY = "retry"
    """It is a part of a batch that failed, computed again to find the request that is to blame."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Compute these now. They have left the queue."""

    items: Sequence[Item]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing goes now. Ask again at `until`, or when something has arrived or left; infinite: only then."""

    until: float


class BatchPolicy(Protocol):
    """Which requests are computed together, and when. No clock, no I/O, no threads."""

    @property
    def max_batch_tokens(self) -> int | None:
        """The budget of padded tokens of a batch, if there is one: lengths are then to be counted in tokens."""
        ...

    def __len__(self) -> int:
        """How many requests wait."""
        ...

    def add(self, item: Item) -> None:
        """A request has arrived. Raises `InvalidRequest` for one that no batch can hold."""
        ...

    def remove(self, item: Item) -> bool:
        """A waiting request is no longer wanted. False when it does not wait here."""
        ...

    def decide(self, now: float, *, drain: bool = False) -> Dispatch | Wait:
        """The model could take a batch: which? With `drain`, one is dispatched as long as anything waits."""
        ...

    def observe(self, cells: int, tokens: int, count: int, seconds: float) -> None:
        """A batch of `count` requests with `tokens` in all, `cells` with padding, took the model `seconds`."""
        ...

    def seconds(self, cells: int, count: int) -> float | None:
        """Expected model time of one batch; None when nothing is known."""
        ...

    def predict(self, item: Item | None = None) -> float | None:
        """Seconds of model time until the waiting `item` will be done; without one, until all that waits will be.

        None when nothing is known. The estimate for an item is on the low side: it is used to refuse.
        """
        ...

    @property
    def memory_limit_mb(self) -> float | None:
        """What a batch may take of memory now, where batches are fitted into it; else None."""
        ...

    def learn_memory(self, fitted: Sequence[Sequence[Item]], failed: Sequence[Sequence[Item]]) -> None:
        """Of one batch and the parts that it was divided into: which were computed, and which ran out of memory."""
        ...


class Order(Protocol):
    """Who comes first."""

    def key(self, item: Item) -> float:
        """The place of an item that arrives: lower keys first, equal keys as they came."""
        ...

    def level(self, item: Item) -> float:
        """Who may overtake it, its key being known: shapes may prefer items of the same or a lower level."""
        ...

    def served(self, batch: Sequence[Item]) -> None:
        """These were dispatched."""
        ...

    def removed(self, item: Item) -> None:
        """This one left without being served."""
        ...


@runtime_checkable
class BulkOrder(Protocol):
    """An order that looks at nothing but the item, and never refuses one: then many can be placed at once."""

    def place(self, items: Sequence[Item]) -> None:
        """Set the key and the level of each."""
        ...


class Shape(Protocol):
    """Which of the waiting make a batch."""

    @property
    def max_batch_size(self) -> int: ...

    @property
    def max_batch_tokens(self) -> int | None: ...

    keeps_order: bool
    """Whether nobody is overtaken by those who come after."""

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        """Some of `items` (at least one, in the order in which they are to be served), and whether they are full."""
        ...


@runtime_checkable
class MemoryBound(Protocol):
    """A shape that fits batches into memory: the policy checks arrivals with it, and tells it how batches fared."""

    @property
    def memory_limit_mb(self) -> float: ...

    def check(self, item: Item) -> None:
        """Raises `InvalidRequest` for an item that does not fit even alone."""
        ...

    def learn(self, fitted: Sequence[Sequence[Item]], failed: Sequence[Sequence[Item]]) -> None:
        """As `BatchPolicy.learn_memory`."""
        ...


class Timing(Protocol):
    """When a batch that is not full goes: when the item that has waited longest is released."""

    reason: Reason

    def release(self, item: Item) -> float:
        """Until when an item that arrives now may be held back. Asked once for each, in order of arrival."""
        ...


class Fifo:
    """Order: as they came."""

    def key(self, item: Item) -> float:
        return 0.0

    def level(self, item: Item) -> float:
        return 0.0

    def place(self, items: Sequence[Item]) -> None:
        for item in items:
            item.key = item.level = 0.0

    def served(self, batch: Sequence[Item]) -> None:
        pass

    def removed(self, item: Item) -> None:
        pass


class AtOnce:
    """Timing: whatever waits goes as soon as the model is free; while it is busy, requests gather by themselves."""

    reason = Reason.IDLE

    def release(self, item: Item) -> float:
        return -math.inf


class Policy:
    """A `BatchPolicy` made of an order, a shape and a timing, with a latency model that learns from every batch."""

    def __init__(self, shape: Shape, *, order: Order | None = None, timing: Timing | None = None) -> None:
        self.order: Order = order or Fifo()
        self.shape = shape
        self.timing: Timing = timing or AtOnce()
        self.latency = LatencyModel()
        self._memory = _memory_bound(shape)
        self._holds_back = type(self.timing) is not AtOnce
        self._bulk = None if self._holds_back or self._memory is not None else _bulk_order(self.order)
        self._queue = Queue(by_age=self._holds_back)
        self._padding = 1.0
        """Padded tokens for each token, in recent batches."""

    @property
    def max_batch_tokens(self) -> int | None:
        return self.shape.max_batch_tokens

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def takes_all(self) -> bool:
        """Whether it has nothing to ask of an item that arrives: then `add_all` does, instead of `add` for each."""
        return self._bulk is not None and type(self).add is Policy.add

    @property
    def memory_limit_mb(self) -> float | None:
        return None if self._memory is None else self._memory.memory_limit_mb

    def add(self, item: Item) -> None:
        if self._memory is not None:
            self._memory.check(item)
        item.key = self.order.key(item)
        item.level = self.order.level(item)
        if self._holds_back:
            item.release = self.timing.release(item)
        self._queue.add((item,))

    def add_all(self, items: Sequence[Item]) -> None:
        """Requests have arrived, in this order. Only where it `takes_all`."""
        if self._bulk is not None:
            self._bulk.place(items)
            self._queue.add(items)

    def remove(self, item: Item) -> bool:
        found = self._queue.remove(item)
        if found:
            self.order.removed(item)
        return found

    def decide(self, now: float, *, drain: bool = False) -> Dispatch | Wait:
        if not self._queue:
            return Wait(math.inf)
        batch, full = self.shape.choose(self._queue.items, now, self.latency)
        if drain:
            reason = Reason.DRAIN
        elif full:
            reason = Reason.FULL
        else:
            until, reason = self._when(now)
            if until > now:
                return Wait(until)
        self._queue.take(batch)
        self.order.served(batch)
        return Dispatch(batch, reason)

    def observe(self, cells: int, tokens: int, count: int, seconds: float) -> None:
        self.latency.observe(cells, count, seconds)
        if tokens:
            self._padding += (cells / tokens - self._padding) * 0.1

    def learn_memory(self, fitted: Sequence[Sequence[Item]], failed: Sequence[Sequence[Item]]) -> None:
        if self._memory is not None:
            self._memory.learn(fitted, failed)

    def seconds(self, cells: int, count: int) -> float | None:
        return self.latency.predict(cells, count)

    def predict(self, item: Item | None = None) -> float | None:
        queue = self._queue
        if item is None:
            count, cells = len(queue), queue.total_length * self._padding
        elif self.shape.keeps_order:
            ahead = queue.rank(item)
            # Padding is not certain.
            count, cells = ahead + 1, float(queue.length_of_first(ahead) + item.length)
        else:
            # It may overtake all others: only its own time is certain.
            return self.latency.predict(item.length, 1)
        return self.latency.predict(cells, count, -(-count // self.shape.max_batch_size))

    def _when(self, now: float) -> tuple[float, Reason]:
        """When the waiting should go, though they fill no batch."""
        until, reason = self._queue.oldest.release if self._holds_back else now, self.timing.reason
        if until > now:
            due = min([item.due for item in self._queue.items])
            # Nothing known of the model: every moment of waiting may be one too many.
            latest = due - (self.predict() or math.inf) if due < math.inf else math.inf
            if latest < until:
                return latest, Reason.DEADLINE
        return until, reason


def _bulk_order(order: Order) -> BulkOrder | None:
    # A class that inherits `place` may have its own key.
    return order if isinstance(order, BulkOrder) and "place" in vars(type(order)) else None


def _memory_bound(shape: Shape | None) -> MemoryBound | None:
    """The one among `shape` and those that it is wrapped around."""
    while shape is not None and not isinstance(shape, MemoryBound):
        shape = getattr(shape, "inner", None)
    return shape
