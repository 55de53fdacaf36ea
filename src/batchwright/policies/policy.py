"""What a policy decides, and a policy made of three parts.

The runtime keeps waiting requests in a `Backlog`, and asks the policy whenever the model could take a batch: what goes
now and why or, if nothing does, when to ask again. A policy has no clock and does not wait; time is an argument. So it
runs the same in a service, in a simulator and in a test. A custom policy is a subclass of `BatchPolicy` that defines
`decide`, and `place` for an order of its own.

`Policy` is composed of three answers, each to its own question:

- **order**: which request comes first? (order of arrival; priority and deadline; a fair share for each tenant)
- **shape**: which of those make a batch? (a fixed number; like lengths under a budget; as many as meet a target)
- **timing**: when does a batch that is not full go? (at once; after a wait; at the end of a window)

Any order goes with any shape and any timing. Four rules hold for all parts:

- A batch that its shape calls full goes immediately: there is nothing left to wait for.
- A request that is held back and has a deadline goes while there is still time to compute it, even in a batch that
  takes longer than usual.
- Requests that are held back go along with one that has to go, if that is in the batch that would go next.
- A batcher that is closing dispatches immediately.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from batchwright.policies.latency import LatencyModel

if TYPE_CHECKING:
    from batchwright.policies.backlog import Backlog
    from batchwright.policies.memory import Memory


class Item(msgspec.Struct, eq=False):
    """One waiting request. Equal only to itself.

    `arrival` and `due` are seconds on the runtime's clock; `due` is infinite if there is no deadline. `length` is in
    tokens, or in whatever unit the runtime measures: only its proportion to others matters.

    A subclass adds fields, as to any `msgspec.Struct`; it cannot define `__init__`.
    """

    arrival: float
    length: int = 1
    priority: int = 5
    """Priority; lower is sooner."""
    due: float = math.inf
    tenant: Hashable = None
    """Tenant whose share of the model it uses, if a policy divides the model among tenants."""
    max_wait: float | None = None
    """Seconds for which it may be held back; None: as long as the timing says."""
    max_tokens: int = 0
    """Most tokens that may be generated for it."""
    key: float = 0.0
    """Place in the queue, lower first. Set once, by the order, when the item enters."""
    level: float = 0.0
    """Level, lower is sooner; items of one level may overtake each other. Set once, by the order, on entry."""
    release: float = -math.inf
    """Time until which it may be held back. Set when the item enters: from its `max_wait`, or by a timing that holds
    requests back."""
    ordinal: int = -1
    """Serial number, set by the queue; -1 if the item is in none."""


class Items(list[Item]):
    """Items that may be known to be alike, so that there is no need to examine each of them.

    Items are alike if they have the same length and priority, no deadline and no `max_wait` of their own.
    """

    __slots__ = ("alike",)

    alike: bool
    """Whether all are alike. False: they may differ."""

    @classmethod
    def of(cls, items: Iterable[Item], *, alike: bool) -> Items:
        """Return a copy of `items`."""
        made = cls(items)
        made.alike = alike
        return made


def are_alike(items: Sequence[Item]) -> bool:
    """Return whether `items` are known to be alike."""
    return isinstance(items, Items) and items.alike


def sizes(items: Sequence[Item]) -> tuple[int, int]:
    """Return the sum of the lengths of `items`, and the sum if each is padded to the longest."""
    if are_alike(items) and items:
        total = items[0].length * len(items)
        return total, total
    lengths = [item.length for item in items]
    return sum(lengths), max(lengths, default=0) * len(lengths)


def compared(items: Sequence[Item]) -> Items:
    """Return `items`, at least one, marked with whether they are alike."""
    first, never = items[0], math.inf
    length, priority = first.length, first.priority
    for item in items:
        if item.length != length or item.priority != priority or item.due != never or item.max_wait is not None:
            return Items.of(items, alike=False)
    return Items.of(items, alike=True)


class Reason(StrEnum):
    """Reason why a batch was dispatched when it was."""

    FULL = "full"
    """Nothing more would have fitted."""
    IDLE = "idle"
    """The model was free, and the policy holds nothing back from a free model."""
    MAX_WAIT = "max_wait"
    """One of its requests had waited as long as it may."""
    WINDOW = "window"
    """Its window, or a shorter wait of one of its requests, had ended."""
    DEADLINE = "deadline"
    """Waiting longer would have missed a deadline."""
    DRAIN = "drain"
    """The batcher was closing."""
    RETRY = "retry"
    """It is a part of a batch that failed, computed again to isolate the request that caused the failure."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision to compute these requests now; they have left the queue."""

    items: Sequence[Item]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Wait:
    """The decision to dispatch nothing before `until`, or before a request arrives or leaves; infinite: only then."""

    until: float


class BatchPolicy(ABC):
    """Which requests are computed together, and when. No clock, no I/O, no threads.

    A custom policy defines `decide`; the other methods have defaults that suit most policies.
    """

    max_batch_tokens: int | None = None
    """Budget of padded tokens of a batch, or None; with one, lengths are counted in tokens."""
    memory: Memory | None = None
    """Memory that batches have to fit into, or None. The runtime informs it of the outcome of batches."""
    refuses = False
    """Whether `place` may raise: requests are then placed one by one as they arrive, not many at once."""
    keeps_order = False
    """Whether no request is overtaken by a later one, so that its dispatch time can be predicted."""
    max_batch_size = sys.maxsize

    def place(self, items: Sequence[Item]) -> None:
        """Set the `key` of new requests: lower keys go first, equal keys in order of arrival (the default)."""
        for item in items:
            item.key = item.level = 0.0

    @abstractmethod
    def decide(self, waiting: Backlog, now: float) -> Dispatch | Wait:
        """Return the batch for a model that is free, or when to ask again; called only while requests wait.

        If `waiting.draining` is set, a batch must be dispatched.
        """

    def served(self, batch: Sequence[Item]) -> None:
        """Note that the requests in `batch` were dispatched."""

    def removed(self, item: Item) -> None:
        """Note that a request left without being served."""


class Order(ABC):
    """Rule for which request comes first."""

    refuses = False
    """Whether `place` may raise."""

    @abstractmethod
    def place(self, items: Sequence[Item]) -> None:
        """Set the key and the level of new requests, given in order of arrival.

        Lower keys go first, equal keys in order of arrival. Shapes may prefer items of the same or a lower level.
        """

    def served(self, batch: Sequence[Item]) -> None:
        """Note that the requests in `batch` were dispatched."""

    def removed(self, item: Item) -> None:
        """Note that a request left without being served."""


class Shape(ABC):
    """Rule for which of the waiting requests make a batch."""

    keeps_order = False
    """Whether no request is overtaken by a later one."""
    memory: Memory | None = None
    """Memory that batches have to fit into, or None."""

    @property
    @abstractmethod
    def max_batch_size(self) -> int: ...

    @property
    def max_batch_tokens(self) -> int | None:
        return None

    @abstractmethod
    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        """Return some of `items` (at least one, in serving order), and whether they make a full batch."""


class NarrowedShape(Shape):
    """Shape that drops some of the requests chosen by another shape, `inner`."""

    def __init__(self, inner: Shape) -> None:
        self.inner = inner
        self.keeps_order = inner.keeps_order
        self.memory = inner.memory

    @property
    def max_batch_size(self) -> int:
        return self.inner.max_batch_size

    @property
    def max_batch_tokens(self) -> int | None:
        return self.inner.max_batch_tokens


class Timing(ABC):
    """Rule for when a batch that is not full goes: as soon as any of its items is released."""

    reason: Reason
    """Reason for a batch in which an item had been held back until its release."""
    holds_back = True
    """Whether it holds back items that do not state how long they may be held back."""

    @abstractmethod
    def release(self, item: Item) -> float:
        """Return the time until which a new item may be held back; -inf: not at all.

        Called once for each item, in order of arrival, if the timing holds items back.
        """


class Fifo(Order):
    """Order of arrival."""

    def place(self, items: Sequence[Item]) -> None:
        for item in items:
            item.key = item.level = 0.0


class AtOnce(Timing):
    """Timing that dispatches as soon as the model is free; requests gather while it is busy.

    An item with its own `max_wait` is held back for that long, unless it fits into a batch of others that goes sooner.
    """

    reason = Reason.MAX_WAIT
    holds_back = False

    def release(self, item: Item) -> float:
        return -math.inf


class Policy(BatchPolicy):
    """A policy made of an order, a shape and a timing."""

    def __init__(self, shape: Shape, *, order: Order | None = None, timing: Timing | None = None) -> None:
        self.order = order or Fifo()
        self.shape = shape
        self.timing = timing or AtOnce()
        self.memory = shape.memory
        self.max_batch_tokens = shape.max_batch_tokens
        self.keeps_order = shape.keeps_order
        self.refuses = self.order.refuses

    @property
    def max_batch_size(self) -> int:  # type: ignore[override]  # it may change as memory is learned
        return self.shape.max_batch_size

    def place(self, items: Sequence[Item]) -> None:
        self.order.place(items)
        if self.timing.holds_back:
            for item in items:
                item.release = self.timing.release(item)

    def decide(self, waiting: Backlog, now: float) -> Dispatch | Wait:
        batch, full = self.shape.choose(waiting.items, now, waiting.latency)
        if waiting.draining:
            return Dispatch(batch, Reason.DRAIN)
        if full:
            return Dispatch(batch, Reason.FULL)
        if are_alike(waiting.items) and not self.timing.holds_back:
            return Dispatch(batch, Reason.IDLE)
        release = min([item.release for item in batch])
        if release <= now:
            return Dispatch(batch, Reason.IDLE if release == -math.inf else self.timing.reason)
        return self._hold_back(batch, waiting, now)

    def served(self, batch: Sequence[Item]) -> None:
        self.order.served(batch)

    def removed(self, item: Item) -> None:
        self.order.removed(item)

    def _dispatch(self, batch: Sequence[Item], now: float) -> Dispatch:
        release = min([item.release for item in batch])
        if release == -math.inf:
            return Dispatch(batch, Reason.IDLE)
        return Dispatch(batch, self.timing.reason if release <= now else Reason.DEADLINE)

    def _hold_back(self, batch: Sequence[Item], waiting: Backlog, now: float) -> Dispatch | Wait:
        """Wait until an item has to go or, if one has to go now, dispatch it: in `batch` if that contains it."""
        items, margin = waiting.items, math.inf
        if min([item.due for item in items]) < math.inf:
            # Nothing is known about the model: every moment of waiting may be one too many.
            margin = waiting.predict_high() or math.inf
        leaves = [item.release if item.due == math.inf else min(item.release, item.due - margin) for item in items]
        if (first := min(leaves)) > now:
            return Wait(first)
        leaving = [item for item, time in zip(items, leaves, strict=True) if time <= now]
        if not set(leaving).intersection(batch):
            batch, _ = self.shape.choose(leaving, now, waiting.latency)
        return self._dispatch(batch, now)
