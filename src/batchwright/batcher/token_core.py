"""The common part of the token-level loops: slots, deadlines, and an answer for every request.

A core belongs to one asyncio event loop, like the one in `dispatch_loop.py`, and needs no locks for the same reason.
Invariants, whatever the model does:

- Each sequence is answered exactly once, unless its caller is gone. At that moment it leaves its slot, or the queue,
  and the slot is reused before the next step.
- A model call for which no caller waits any more is cancelled, if the model can be.
- An idle core keeps nothing alive.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from batchwright.batcher.batcher_stats import ContinuousStats
from batchwright.batcher.model import WrongOutputs
from batchwright.batcher.token_entry import TokenEntry
from batchwright.batcher.waiting_limits import WaitingLimits, overloaded
from batchwright.clock import Clock
from batchwright.errors import BatcherClosed
from batchwright.policies import Item
from batchwright.policies.slots import Slots

_log = logging.getLogger("batchwright.batcher")


@dataclass(frozen=True, slots=True)
class Shared:
    """State that outlives a core when its batcher moves to another event loop."""

    slots: Slots
    places: int
    """Sequences that are computed at once; others wait."""
    limits: WaitingLimits
    clock: Clock
    stats: ContinuousStats

    @property
    def waiting(self) -> int:
        """Number of waiting sequences."""
        return max(0, len(self.slots) - self.places)

    @property
    def waiting_items(self) -> Sequence[Item]:
        """Waiting sequences, the next one first."""
        return [*self.slots.live, *self.slots.waiting][self.places :]


class TokenCore(ABC):
    """The slots of one model in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, shared: Shared) -> None:
        self.loop = loop
        self._shared = shared
        self._slots = shared.slots
        self._clock = shared.clock
        self._stats = shared.stats
        self._closing = False
        self._emptied: list[asyncio.Future[None]] = []
        self._stay: float | None = None
        """Recent average of the seconds for which a sequence keeps its slot."""

    @property
    def is_empty(self) -> bool:
        return not len(self._slots)

    @property
    def held(self) -> int:
        """Number of unanswered requests that have left their slots, since they have probably ended."""
        return 0

    def enter(self, sequence: TokenEntry) -> None:
        """Take a new sequence. Raises `BatcherClosed` and `Overloaded`."""
        if self._closing:
            raise BatcherClosed("the batcher is closed: it takes no more requests")
        self._check_room(sequence)
        self._slots.add(sequence)
        self._stats.requests += 1
        if sequence.due < math.inf:
            self._stats.with_deadline += 1
            self._watch(sequence)
        self._wake()

    def leave(self, sequence: TokenEntry, *, is_moved: bool = False) -> None:
        """Free the slot of `sequence`, whose caller is gone."""
        if not sequence.future.cancelled():
            # It was answered before its caller could see the answer.
            return
        self._stats.cancelled += 1
        self._free(sequence)
        if not is_moved:
            sequence.abandon(self._clock.now())
        self._left(sequence)

    async def close(self, *, drain: bool) -> None:
        """Compute all requests to their end or, without `drain`, answer them with `BatcherClosed`."""
        self._closing = True
        if not drain:
            self._fail_all(BatcherClosed("the batcher was closed before the request was finished"))
        if not self.is_empty:
            emptied = self.loop.create_future()
            self._emptied.append(emptied)
            await emptied

    def abandon(self) -> None:
        """Forget all requests: the event loop has ended, along with all callers."""
        self._stats.cancelled += len(self._take_all())

    @abstractmethod
    def _wake(self) -> None:
        """Place waiting requests: one has arrived, or a slot has become free. Called often."""

    @abstractmethod
    def _left(self, sequence: TokenEntry) -> None:
        """Record that `sequence`, which may be in the model, is not wanted any more; it has left the slots."""

    def _take_all(self) -> list[TokenEntry]:
        """Remove and return all requests."""
        return cast(list[TokenEntry], self._slots.clear())

    def _watch(self, sequence: TokenEntry) -> None:
        """Ensure that `sequence` is answered at its deadline."""
        sequence.timer = self.loop.call_later(max(0.0, sequence.due - self._clock.now()), self._late, sequence)

    def _place(self) -> Sequence[TokenEntry]:
        """Fill the slots, and return the requests that got one."""
        placed = cast("Sequence[TokenEntry]", self._slots.fill())
        if placed:
            now, stats = self._clock.now(), self._stats
            for sequence in placed:
                sequence.started = now
                stats.queue_ms.add((now - sequence.arrival) * 1e3)
                stats.tokens += sequence.length
                stats.cells += sequence.length
        return placed

    def _count_step(self, size: int, taken: int, seconds: float) -> None:
        """Count a step of `size` sequences that took the model `seconds`, with `taken` slots taken."""
        stats = self._stats
        stats.count_batch("full" if taken >= self._slots.size else "idle", size)
        stats.model_seconds += seconds
        stats.model_ms.add(seconds * 1e3)

    def _accept(self, sequence: TokenEntry, token: Any, now: float) -> None:
        """Take the model's result for one sequence: its next token, an empty one at its end, or an exception."""
        if sequence.future.done():
            return
        if isinstance(token, str):
            reason = sequence.accept(token, now, self._stats)
            if reason is not None:
                self._free(sequence)
                if sequence.started is not None:
                    self._learn(now - sequence.started)
                sequence.finish(reason, now, self._stats)
        elif isinstance(token, BaseException):
            self._fail([sequence], token)
        else:
            self._fail(
                [sequence],
                WrongOutputs(
                    f"the model returned {type(token).__name__} for a token: it must be text, or an exception"
                ),
            )

    def _learn(self, stay: float) -> None:
        self._stay = stay if self._stay is None else self._stay + (stay - self._stay) * 0.1

    def _fail(self, sequences: Iterable[TokenEntry], error: BaseException) -> None:
        now = self._clock.now()
        for sequence in sequences:
            if sequence.waits_for_answer:
                self._free(sequence)
                sequence.fail(error, now, self._stats)

    def _fail_all(self, error: BaseException) -> None:
        """Answer all requests with this error, and stop using the model."""
        everybody = self._take_all()
        self._fail(everybody, error)
        for sequence in everybody:
            self._left(sequence)

    def _ended_early(self, task: asyncio.Task[None], sequences: Iterable[TokenEntry] | None = None) -> None:
        """Answer `sequences` (default: all) of a task that was ended from outside or by an internal error."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("computing failed outside of the model", exc_info=error)
        reason = error or BatcherClosed("the event loop ended the batcher before the request was finished")
        if sequences is None:
            self._fail_all(reason)
        else:
            self._fail(sequences, reason)

    def _late(self, sequence: TokenEntry) -> None:
        if sequence.waits_for_answer:
            self._free(sequence)
            sequence.expire(self._clock.now(), self._stats)
            self._left(sequence)

    def _free(self, sequence: TokenEntry) -> None:
        self._slots.remove(sequence)
        if sequence.timer is not None:
            sequence.timer.cancel()
            sequence.timer = None
        if self.is_empty:
            for emptied in self._emptied:
                if not emptied.done():
                    emptied.set_result(None)
            self._emptied.clear()
        else:
            self._wake()

    def _check_room(self, sequence: TokenEntry) -> None:
        if len(self._slots) < self._shared.places:
            return
        waiting = self._shared.waiting
        reason = self._shared.limits.exceeded(waiting, self._slots.waiting_length, sequence.length)
        if reason is not None:
            self._stats.count_refusal(sequence, "overloaded")
            after = None if self._stay is None else self._stay * max(1.0, waiting / self._shared.places)
            raise overloaded(reason, after)
