"""What every batcher is to its callers, whatever computes behind it: one event loop, entered from anywhere.

A front has a core, which lives in one event loop and is touched by nothing else; this is why no core locks anything.
The front finds that loop: the one in which it is first used, another when that one has ended, and one of its own, on a
thread, for callers that have none. Calls from other loops and threads are handed over to it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Hashable
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, TypeVarTuple

from batchwright.batcher.background import BackgroundLoop
from batchwright.batcher.entry import Entry
from batchwright.batcher.stats import BatcherStats
from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import BatcherClosed, InvalidRequest
from batchwright.policies.checks import check_time
from batchwright.request import InferenceRequest, InferenceResponse, Prompt

_LARGEST_PRIORITY = 10**9

_T = TypeVar("_T")
_StatsT = TypeVar("_StatsT", bound=BatcherStats)


class Home(Protocol):
    """A core: what computes, in one event loop. All of it is called in the thread of that loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits or is computed."""
        ...

    def enter(self, entry: Any) -> None:
        """Take a new entry, whose future will be answered. Raises when it is not taken."""
        ...

    def leave(self, entry: Any) -> None:
        """The caller of `entry` has gone."""
        ...

    def abandon(self) -> None:
        """The loop has ended, and all callers with it: forget them."""
        ...

    async def close(self, *, drain: bool) -> None:
        """Take nothing more. Returns when all is answered."""
        ...


_CoreT = TypeVar("_CoreT", bound=Home)
_What = TypeVarTuple("_What")


class Front(ABC, Generic[_CoreT, _StatsT, *_What]):
    """The face of a batcher. `What` is what a request is told by, from which `_entry` makes the core's entry."""

    def __init__(self, stats: _StatsT, clock: Clock | None) -> None:
        self._stats = stats
        self._clock = clock or MonotonicClock()
        self._core: _CoreT | None = None
        self._closed = False
        self._background: BackgroundLoop | None = None
        self._starting = threading.Lock()
        """Only for settling in an event loop; the queue needs none."""

    @abstractmethod
    def _make(self, loop: asyncio.AbstractEventLoop) -> _CoreT:
        """A core in this loop. What it keeps from the one before belongs to the front."""

    @abstractmethod
    def _entry(self, future: asyncio.Future[Any], now: float, *what: *_What) -> Entry:
        """Raises what is to be said of a request that can never be computed."""

    @abstractmethod
    def _waiting(self) -> int:
        """How many requests wait."""

    @abstractmethod
    async def _release(self) -> None:
        """Let go of what the model needed. Called when all is answered, perhaps more than once."""

    @abstractmethod
    def _ask(
        self, request: InferenceRequest | Prompt, priority: int | None, deadline: float | None, tenant: Hashable
    ) -> Coroutine[Any, Any, InferenceResponse]:
        """`_answer` to one request, told as `add_request` is."""

    async def add_request(
        self,
        request: InferenceRequest | Prompt,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> InferenceResponse:
        """Have one request computed, in a batch with others, and return its answer.

        `priority` (lower is sooner) goes before the request's own; `deadline` is in seconds from now, and counts if it
        is nearer than the request's own; `tenant` is whose share it takes under a fair order. Cancelling the awaiting
        task takes the request out of the queue, or out of the batch where that can be.

        Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded` (when it is certain to be late) and `BatcherClosed`
        when the request is not taken. One that is taken and then fails, or whose deadline passes, is answered with
        `error` set.
        """
        return await self._ask(request, priority, deadline, tenant)

    def submit(
        self,
        request: InferenceRequest | Prompt,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> concurrent.futures.Future[InferenceResponse]:
        """`add_request` for code without an event loop: `batcher.submit(request).result()`.

        May be called from any thread. Cancelling the future cancels the request.
        """
        return self._hand_over(self.add_request(request, priority=priority, deadline=deadline, tenant=tenant))

    async def settle(self) -> None:
        """Belong to this event loop from now on, unless it already belongs to another that runs.

        Need not be called: the first request does it. Raises `BatcherClosed`.
        """
        self._settled(asyncio.get_running_loop())

    def stats(self) -> _StatsT:
        """What it has done until now: a copy."""
        while True:
            try:
                stats = copy.deepcopy(self._stats)
                break
            except RuntimeError:
                # In another thread a count was added that was not there before, in the middle of the copy.
                continue
        stats.waiting = self._waiting()
        ended = stats.succeeded + stats.failed + stats.expired + stats.cancelled
        stats.running = max(0, stats.requests - ended - stats.waiting)
        return stats

    async def close(self, drain: bool = True) -> None:
        """Take no more requests; compute those that wait, or answer them with `BatcherClosed`. May be called again.

        Without `drain`, what is in the model is cancelled (its threads cannot be, but nobody waits for them).
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
        if background is not None:
            await asyncio.to_thread(background.stop)

    def shutdown(self, drain: bool = True) -> None:
        """`close` for code without an event loop. Raises RuntimeError in a thread that runs one."""
        if _running_loop() is not None:
            raise RuntimeError("shutdown would stop the event loop that it is called in: await close instead")
        asyncio.run(self.close(drain))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _answer(self, *what: *_What) -> Any:
        """Have one request computed in the event loop to which this belongs, wherever the call comes from."""
        here = asyncio.get_running_loop()
        core = self._core
        if core is None or core.loop is not here:
            with self._starting:
                core = self._settle(here)
                handed = None
                if core.loop is not here:
                    handed = asyncio.run_coroutine_threadsafe(self._answer(*what), core.loop)
            if handed is not None:
                return await asyncio.wrap_future(handed)
        entry = self._entry(here.create_future(), self._clock.now(), *what)
        core.enter(entry)
        try:
            return await entry.future
        except asyncio.CancelledError:
            core.leave(entry)
            raise

    def _settled(self, here: asyncio.AbstractEventLoop) -> _CoreT:
        with self._starting:
            return self._settle(here)

    def _settle(self, here: asyncio.AbstractEventLoop) -> _CoreT:
        """The core, moved to the event loop `here` if there is none, or the loop that it was in has ended."""
        self._require_open()
        core = self._core
        if core is not None and core.loop.is_running():
            return core
        if core is not None and not core.is_empty:
            if not core.loop.is_closed():
                raise RuntimeError("requests wait in an event loop that stands still: run it, or use another batcher")
            core.abandon()
        self._core = self._make(here)
        return self._core

    def _hand_over(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        try:
            with self._starting:
                # Before closing or after it: what is handed over while the loop is being stopped would hang.
                return asyncio.run_coroutine_threadsafe(coroutine, self._home())
        except BaseException:
            coroutine.close()
            raise

    def _home(self) -> asyncio.AbstractEventLoop:
        """The event loop of the core, which is one of our own where there is no other."""
        self._require_open()
        core = self._core
        if core is None or not core.loop.is_running():
            if self._background is None:
                self._background = BackgroundLoop()
                weakref.finalize(self, self._background.stop)
            # Made here, not by the first request: closing must find it, and with it what was submitted before.
            core = self._settle(self._background.loop)
        if core.loop is _running_loop():
            raise RuntimeError("submit would wait for the event loop that it is called in: await add_request instead")
        return core.loop

    def _require_open(self) -> None:
        if self._closed:
            raise BatcherClosed("the batcher is closed: it takes no more requests")


def time_allowed(own: float | None, given: float | None) -> float:
    """Seconds from submission until the nearer of two deadlines; infinite without any. Raises ValueError."""
    if given is None:
        return math.inf if own is None else own
    if type(given) is not float or not 0.0 < given < math.inf:
        check_time("deadline", given, above_zero=True)
    return given if own is None else min(own, given)


def urgency(own: int, given: int | None) -> int:
    """The priority that counts: `given` if there is one. Raises `InvalidRequest` for what is no priority."""
    priority = own if given is None else given
    # A NaN would tear the order of all who wait, and what no float holds cannot be aged.
    if not isinstance(priority, int):
        raise InvalidRequest(f"priority={priority!r}: must be a whole number", param="priority")
    if abs(priority) > _LARGEST_PRIORITY:
        raise InvalidRequest(
            f"priority: must be from -{_LARGEST_PRIORITY} to {_LARGEST_PRIORITY}, and is beyond", param="priority"
        )
    return priority


async def _elsewhere(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]) -> _T:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
