"""The base of all batchers: requests come from any event loop or thread, and are computed in one loop.

A batcher has a core, which belongs to one event loop and is used only there, so it needs no locks. The batcher chooses
that loop: the one in which it is first used; another one when that has ended; its own, on a thread, for callers without
a loop. Calls from other loops and threads are forwarded to it, and repeated in another loop if it ends before they are
answered. A forked process starts without a loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import math
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Hashable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar, TypeVarTuple

from batchwright.batcher.batcher_stats import BatcherStats
from batchwright.batcher.cross_loop import MOVED, BackgroundLoop, CrossLoopCall, watch_end
from batchwright.batcher.entry import Entry
from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import BatcherClosed, GenerationError, InvalidRequest
from batchwright.policies.checks import check_time
from batchwright.request import InferenceRequest, InferenceResponse, Prompt

_LARGEST_PRIORITY = 10**9
_TURNS_TO_END = 20
"""Turns after which an event loop that cancelled its tasks is taken to go on. `asyncio.run` takes fewer to end."""

_T = TypeVar("_T")
_StatsT = TypeVar("_StatsT", bound=BatcherStats)


class BatcherCore(Protocol):
    """The part that computes, in one event loop. All methods are called in the thread of that loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits or is being computed."""
        ...

    def enter(self, entry: Any) -> None:
        """Take a new entry, whose future will be answered. Raises if the entry is not taken."""
        ...

    def leave(self, entry: Any, *, is_moved: bool = False) -> None:
        """Record that the caller of `entry` is gone; `is_moved`: it waits for another entry, in another event loop."""
        ...

    def abandon(self) -> None:
        """Forget all entries: the loop has ended, along with all callers."""
        ...

    async def close(self, *, drain: bool) -> None:
        """Take no more entries, and return once all are answered."""
        ...


class Closable(ABC):
    """An object that `with` and `async with` close; after an error in the block, without computing waiting requests."""

    @abstractmethod
    async def close(self, drain: bool = True) -> None:
        """Take no more requests; compute waiting ones or, without `drain`, answer them with `BatcherClosed`."""

    def shutdown(self, drain: bool = True) -> None:
        """Do as `close`, for code without an event loop. Raises RuntimeError in a thread that runs one."""
        if running_loop() is not None:
            raise RuntimeError("shutdown would stop the event loop that it is called in: await close instead")
        asyncio.run(self.close(drain))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.close(drain=error is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shutdown(drain=error is None)


_CoreT = TypeVar("_CoreT", bound=BatcherCore)
_What = TypeVarTuple("_What")


class BaseBatcher(Closable, Generic[_CoreT, _StatsT, *_What]):
    """Base of all batchers. `What` are the types of the values from which `_entry` creates the entry of a request."""

    def __init__(self, stats: _StatsT, clock: Clock | None) -> None:
        if clock is not None and not callable(getattr(clock, "now", None)):
            raise TypeError(f"clock={clock!r}: must have now(), which gives seconds; leave it out for the real clock")
        self._stats = stats
        self._clock = clock or MonotonicClock()
        self._core: _CoreT | None = None
        self._closed = False
        self._background: BackgroundLoop | None = None
        self._starting = threading.Lock()
        """Lock for binding to an event loop; the queue needs none."""
        self._recomputes = False
        """Whether a request that has begun may be computed again."""
        self._cross_loop_calls: set[CrossLoopCall] = set()
        """Unanswered calls from other event loops."""
        self._submitted: set[concurrent.futures.Future[Any]] = set()
        """Calls submitted to our own loop."""
        self._watch: object = None
        """Guard that reports the end of the core's event loop as long as it is kept alive."""
        self._may_end: asyncio.AbstractEventLoop | None = None
        """Event loop that may be ending: a task was cancelled, but not by its caller, as `asyncio.run` does."""
        _BATCHERS.add(self)

    @abstractmethod
    def _make(self, loop: asyncio.AbstractEventLoop) -> _CoreT:
        """Create a core in this loop. State that it takes over from the previous core belongs to the batcher."""

    @abstractmethod
    def _entry(self, future: asyncio.Future[Any], now: float, *what: *_What) -> Entry:
        """Return the entry of a request. Raises the error for a request that can never be computed."""

    @abstractmethod
    def _waiting(self) -> int:
        """Return the number of waiting requests."""

    def _uncounted(self) -> int:
        """Return the number of requests that were taken but are not counted in the statistics yet."""
        return 0

    @abstractmethod
    def _waiting_entries(self) -> Sequence[Entry]:
        """Return the waiting requests, the next one first."""

    @abstractmethod
    async def _release(self) -> None:
        """Release the model's resources. Called once everything is answered, possibly more than once."""

    @abstractmethod
    async def add_request(
        self,
        request: InferenceRequest | Prompt,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> InferenceResponse:
        """Compute one request, in a batch with others, and return its answer.

        `priority` (lower is sooner) overrides the request's own; `deadline` is in seconds from now, and applies if it
        is earlier than the request's own; `tenant` is whose share it uses under a fair order. Cancelling the awaiting
        task removes the request from the queue, or from the batch if possible.

        Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded` (if it is certain to be late) and `BatcherClosed` if
        the request is not accepted. The response to an accepted request that fails, or whose deadline passes, has
        `error` set.
        """

    def submit(
        self,
        request: InferenceRequest | Prompt,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> concurrent.futures.Future[InferenceResponse]:
        """Do as `add_request`, for code without an event loop: `batcher.submit(request).result()`.

        May be called from any thread. Cancelling the future cancels the request.
        """
        return self.hand_over(self.add_request(request, priority=priority, deadline=deadline, tenant=tenant))

    async def settle(self) -> None:
        """Bind this batcher to the running event loop, unless it is bound to another running one.

        Calling it is optional: the first request does the same. Raises `BatcherClosed`.
        """
        self._settled(asyncio.get_running_loop())

    @property
    def queue(self) -> Sequence[Any]:
        """Requests (or bare items) that are waiting now, in the order in which they would be dispatched if no more
        came.

        When read outside the batcher's event loop, it may have the newest ones last.
        """
        return tuple(
            entry.prompt if entry.request is None else entry.request for entry in list(self._waiting_entries())
        )

    def stats(self) -> _StatsT:
        """Return a copy of the statistics since the batcher was created."""
        while True:
            try:
                stats = copy.deepcopy(self._stats)
                break
            except RuntimeError:
                # Another thread added a new counter in the middle of the copy.
                continue
        stats.requests += self._uncounted()
        stats.waiting = self._waiting()
        ended = stats.succeeded + stats.failed + stats.expired + stats.cancelled
        stats.running = max(0, stats.requests - ended - stats.waiting)
        return stats

    async def close(self, drain: bool = True) -> None:
        """Take no more requests; compute waiting ones, or answer them with `BatcherClosed`. May be called repeatedly.

        Without `drain`, calls of the model are cancelled. Its threads cannot be: `close` does not wait for them, but
        Python does when it exits, so a blocking model that may hang needs a timeout of its own.
        """
        with self._starting:
            self._closed = True
            core = self._core
        if core is not None and core.loop.is_running():
            if core.loop is asyncio.get_running_loop():
                await core.close(drain=drain)
            else:
                await _elsewhere(core.loop, core.close(drain=drain))
        await self._release()
        with self._starting:
            background, self._background = self._background, None
            submitted = [asyncio.wrap_future(future) for future in self._submitted]
            if core is not None and not core.loop.is_running():
                # The core will answer no one.
                for call in list(self._cross_loop_calls):
                    call.move(core.loop)
        if background is not None:
            if submitted:
                # All have an answer, which may still be in transit from the core's loop.
                await asyncio.wait(submitted)
            await asyncio.to_thread(background.stop)

    async def _answer(self, *what: *_What) -> Any:
        """Compute one request in the event loop to which the batcher is bound, wherever the call comes from."""
        here = asyncio.get_running_loop()
        while (core := self._core) is None or core.loop is not here:
            call = self._sent(here, what)
            if call is not None:
                answer = await asyncio.wrap_future(call.answer)
                if answer is not MOVED:
                    return answer
        entry = self._entry(here.create_future(), self._clock.now(), *what)
        core.enter(entry)
        try:
            return await entry.future
        except asyncio.CancelledError:
            core.leave(entry)
            raise

    def _sent(self, here: asyncio.AbstractEventLoop, what: tuple[*_What]) -> CrossLoopCall | None:
        """Hand a request over to the batcher's event loop; None if that is now `here`."""
        with self._starting:
            core = self._settle(here)
            if core.loop is here:
                return None
            call = CrossLoopCall(core.loop)
            self._cross_loop_calls.add(call)
            call.answer.add_done_callback(lambda _: self._cross_loop_calls.discard(call))
            call.begin(lambda: self._host(core, call, *what), turns=_TURNS_TO_END if core.loop is self._may_end else 0)
            return call

    async def _host(self, core: _CoreT, call: CrossLoopCall, *what: *_What) -> Any:
        """Do as `_answer`, for a caller that outlives this event loop; `MOVED` if the request must be entered again."""
        if core is not self._core:
            return MOVED
        entry = self._entry(core.loop.create_future(), self._clock.now(), *what)
        core.enter(entry)
        try:
            return await entry.future
        except asyncio.CancelledError:
            ends = not call.answer.cancelled()
            if ends and entry.future.done() and not entry.future.cancelled():
                # It was answered, and counted, in the turn in which its loop began to end.
                return entry.future.result()
            began = entry.started is not None or entry.group is not None
            if ends:
                self._may_end = core.loop
            is_moved = ends and (self._recomputes or not began)
            if core is self._core:
                core.leave(entry, is_moved=is_moved)
                if is_moved:
                    # It is counted in the loop in which it ends.
                    self._stats.requests -= 1
                    self._stats.cancelled -= 1
            if not ends:
                raise
        if is_moved:
            return MOVED
        raise GenerationError(
            "the event loop that computed the request ended before it was finished, and what has begun is not computed "
            "again: keep that loop running, or submit the request once more"
        )

    def _settled(self, here: asyncio.AbstractEventLoop) -> _CoreT:
        with self._starting:
            return self._settle(here)

    def _settle(self, here: asyncio.AbstractEventLoop) -> _CoreT:
        """Return the core, moved to the event loop `here` if it has none or its loop has ended."""
        self._require_open()
        core = self._core
        if core is not None and core.loop.is_running():
            return core
        if core is not None and not core.is_empty and not core.loop.is_closed():
            raise RuntimeError("requests wait in an event loop that stands still: run it, or use another batcher")
        self._leave()
        self._core = self._make(here)
        if here is running_loop():
            self._watch = watch_end(self._core, weakref.WeakMethod(self._ended))
        return self._core

    def _leave(self) -> None:
        """Forget the core's callers, since its event loop has ended, and let callers elsewhere enter again."""
        core, self._core, self._watch, self._may_end = self._core, None, None, None
        if core is not None:
            core.abandon()
            for call in list(self._cross_loop_calls):
                call.move(core.loop)

    def _ended(self, core: _CoreT) -> None:
        """Record that the event loop of a core is ending: a request that comes now would not be answered there."""
        with self._starting:
            if core is self._core:  # otherwise another loop was used since, and perhaps this one again
                self._leave()

    def hand_over(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run a call to this batcher in its own loop, which no caller can end, and forward it from there."""
        try:
            with self._starting:
                # Either before closing or after it: a call handed over while the loop is being stopped would hang.
                future = asyncio.run_coroutine_threadsafe(coroutine, self._own_loop())
                self._submitted.add(future)
        except BaseException:
            coroutine.close()
            raise
        future.add_done_callback(self._submitted.discard)
        return future

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """Our own event loop, to which the core is bound unless it is bound to another."""
        self._require_open()
        core = self._core
        if core is not None and core.loop is running_loop():
            raise RuntimeError("submit would wait for the event loop that it is called in: await add_request instead")
        if self._background is None:
            self._background = BackgroundLoop()
            self._stop_at_end = weakref.finalize(self, self._background.stop)
        if core is None or not core.loop.is_running():
            # Bound here, not by the first request: `close` must find the core, and with it what was submitted before.
            self._settle(self._background.loop)
        return self._background.loop

    def _fork(self) -> None:
        """Start afresh in a forked process: its loops do not run, and their requests are the parent's."""
        self._starting = threading.Lock()
        if self._background is not None:
            self._background.disown()
            self._stop_at_end.detach()
        self._background = None
        self._cross_loop_calls.clear()
        self._submitted.clear()
        core, self._core, self._watch = self._core, None, None
        if core is not None:
            core.abandon()

    def _require_open(self) -> None:
        if self._closed:
            raise BatcherClosed("the batcher is closed: it takes no more requests")


def time_allowed(own: float | None, given: float | None) -> float:
    """Return the seconds from submission until the earlier of two deadlines; infinite if none. Raises ValueError."""
    if given is None:
        return math.inf if own is None else own
    if not isinstance(given, float) or not 0.0 < given < math.inf:
        check_time("deadline", given, above_zero=True)
    return given if own is None else min(own, given)


def urgency(own: int, given: int | None) -> int:
    """Return the priority that applies: `given` if not None. Raises `InvalidRequest` for an invalid one."""
    priority = own if given is None else given
    if type(priority) is int and -_LARGEST_PRIORITY <= priority <= _LARGEST_PRIORITY:
        return priority
    # A NaN would break the order of all waiting requests, and a priority that no float can hold cannot be aged.
    if not isinstance(priority, int):
        raise InvalidRequest(f"priority={priority!r}: must be a whole number", param="priority")
    if abs(priority) > _LARGEST_PRIORITY:
        raise InvalidRequest(
            f"priority: must be from -{_LARGEST_PRIORITY} to {_LARGEST_PRIORITY}, and is beyond", param="priority"
        )
    return priority


async def _elsewhere(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]) -> _T:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_BATCHERS: weakref.WeakSet[BaseBatcher[Any, Any, *tuple[Any, ...]]] = weakref.WeakSet()


def _start_afresh() -> None:
    for front in list(_BATCHERS):
        front._fork()  # noqa: SLF001 - of this module, and nobody else's business


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
