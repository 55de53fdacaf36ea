"""What a policy decides, and a policy made of three parts.

The runtime keeps the requests that wait in a `Backlog`, and asks the policy whenever the model could take a batch: what
goes now, why, and if nothing, when to ask again. A policy has no clock and does no waiting; time comes in as an
argument. So it runs the same in a service, in a simulator and in a test. A policy of one's own is a subclass of
`BatchPolicy` with two methods, `place` and `decide`.

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
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from batchwright.policies.item import Item
from batchwright.policies.latency import LatencyModel

if TYPE_CHECKING:
    from batchwright.policies.backlog import Backlog
    from batchwright.policies.memory import Memory


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


class BatchPolicy(ABC):
    """Which requests are computed together, and when. No clock, no I/O, no threads.

    `place` and `decide` are what a policy of one's own defines; the rest has defaults that suit most.
    """

    max_batch_tokens: int | None = None
    """The budget of padded tokens of a batch, if there is one: lengths are then to be counted in tokens."""
    memory: Memory | None = None
    """What batches are fitted into, if they are. Told by the runtime how batches fared."""
    refuses = False
    """Whether `place` may raise: requests are then placed one by one as they arrive, not many at once."""
    holds_back = False
    """Whether it looks at which request is the oldest."""
    keeps_order = False
    """Whether nobody is overtaken by those who come after: then it can be foreseen when a request goes."""
    max_batch_size = sys.maxsize

    def place(self, items: Sequence[Item]) -> None:
        """Set the `key` of requests that have arrived, in this order: lower keys go first, equal keys as they came.

        By default, as they came.
        """
        for item in items:
            item.key = item.level = 0.0

    @abstractmethod
    def decide(self, waiting: Backlog, now: float) -> Dispatch | Wait:
        """The batch that the model, which could take one, is given now; or when to ask again. Something does wait.

        When `waiting.draining`, a batch must be dispatched.
        """

    def served(self, batch: Sequence[Item]) -> None:
        """Note that these were dispatched."""

    def removed(self, item: Item) -> None:
        """Note that this one left without being served."""


class Order(ABC):
    """Who comes first."""

    refuses = False
    """Whether `place` may raise."""

    @abstractmethod
    def place(self, items: Sequence[Item]) -> None:
        """Set the key and the level of requests that have arrived, in this order.

        Lower keys go first, equal keys as they came. Shapes may prefer items of the same or a lower level.
        """

    def served(self, batch: Sequence[Item]) -> None:
        """Note that these were dispatched."""

    def removed(self, item: Item) -> None:
        """Note that this one left without being served."""


class Shape(ABC):
    """Which of the waiting make a batch."""

    keeps_order = False
    """Whether nobody is overtaken by those who come after."""
    memory: Memory | None = None
    """What it fits batches into, if it does."""

    @property
    @abstractmethod
    def max_batch_size(self) -> int: ...

    @property
    def max_batch_tokens(self) -> int | None:
        return None

    @abstractmethod
    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        """Some of `items` (at least one, in the order in which they are to be served), and whether they are full."""


class NarrowedShape(Shape):
    """A shape that takes fewer of those that another shape, `inner`, chose."""

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
    """When a batch that is not full goes: when the item that has waited longest is released."""

    reason: Reason
    holds_back = True
    """Whether anything is ever held back."""

    @abstractmethod
    def release(self, item: Item) -> float:
        """Until when an item that arrives now may be held back. Asked once for each, in order of arrival."""


class Fifo(Order):
    """Order: as they came."""

    def place(self, items: Sequence[Item]) -> None:
        for item in items:
            item.key = item.level = 0.0


class AtOnce(Timing):
    """Timing: whatever waits goes as soon as the model is free; while it is busy, requests gather by themselves."""

    reason = Reason.IDLE
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
        self.holds_back = self.timing.holds_back

    @property
    def max_batch_size(self) -> int:  # type: ignore[override]  # it may change as memory is learned
        return self.shape.max_batch_size

    def place(self, items: Sequence[Item]) -> None:
        self.order.place(items)
        if self.holds_back:
            for item in items:
                item.release = self.timing.release(item)

    def decide(self, waiting: Backlog, now: float) -> Dispatch | Wait:
        batch, full = self.shape.choose(waiting.items, now, waiting.latency)
        if waiting.draining:
            return Dispatch(batch, Reason.DRAIN)
        if full:
            return Dispatch(batch, Reason.FULL)
        until, reason = self._when(waiting, now)
        return Wait(until) if until > now else Dispatch(batch, reason)

    def served(self, batch: Sequence[Item]) -> None:
        self.order.served(batch)

    def removed(self, item: Item) -> None:
        self.order.removed(item)

    def _when(self, waiting: Backlog, now: float) -> tuple[float, Reason]:
        """When the waiting should go, though they fill no batch."""
        until, reason = waiting.oldest.release if self.holds_back else now, self.timing.reason
        if until > now:
            due = min([item.due for item in waiting.items])
            # Nothing known of the model: every moment of waiting may be one too many.
            latest = due - (waiting.predict() or math.inf) if due < math.inf else math.inf
            if latest < until:
                return latest, Reason.DEADLINE
        return until, reason
