"""`Batcher`: many callers, one model that is fast on lists."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import math
import threading
import weakref
from collections.abc import Callable, Coroutine, Hashable
from types import TracebackType
from typing import Any, Self, TypeVar

from batchwright.batcher.background import BackgroundLoop
from batchwright.batcher.core import Core, Limits
from batchwright.batcher.entry import Entry
from batchwright.batcher.lengths import Measure
from batchwright.batcher.model import Model, Runner
from batchwright.batcher.stats import BatcherStats
from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import BatcherClosed
from batchwright.policies import BatchPolicy, auto
from batchwright.policies.checks import check_size, check_time
from batchwright.request import InferenceRequest, InferenceResponse, Prompt

_T = TypeVar("_T")


class Batcher:
    """Collects single requests and gives them to a model in batches.

        async with Batcher(model) as batcher:
            response = await batcher.add_request("Why is the sky blue?")

    `model` has `generate_batch(prompts)`, or is a function from a list of items to the list of their outputs; both may
    be async or not (then they run in a thread). `policy` decides which requests go together and when: "auto", which has
    nothing to set, or one from `batchwright.policies`. A policy belongs to one batcher.

    - `concurrency`: batches in the model at once.
    - `max_waiting`, `max_waiting_tokens`: what the queue holds; more is refused with `Overloaded`.
    - `isolate_failures`: compute a batch that raised again in halves, so that only the request that is to blame fails.
    - `length`: measures a prompt; by default its tokens where the model has a `tokenizer`, else its `len`.

    It belongs to the event loop in which it is first used. Calls from other threads and loops are handed over to it,
    and `submit` works without any.
    """

    def __init__(
        self,
        model: Model | Runner,
        policy: BatchPolicy | str = "auto",
        *,
        concurrency: int = 1,
        max_waiting: int = 10_000,
        max_waiting_tokens: int | None = None,
        isolate_failures: bool = True,
        length: Callable[[Any], int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_size("concurrency", concurrency)
        check_size("max_waiting", max_waiting)
        if max_waiting_tokens is not None:
            check_size("max_waiting_tokens", max_waiting_tokens)
        if isinstance(policy, str):
            if policy != "auto":
                raise ValueError(f"policy={policy!r}: must be 'auto' or a policy from batchwright.policies")
            policy = auto()
        self._policy = policy
        self._limits = Limits(max_waiting, max_waiting_tokens, isolate_failures)
        self._runner = model if isinstance(model, Runner) else Runner(model, slots=concurrency)
        self._measure = Measure(getattr(model, "tokenizer", None), length)
        self._clock = clock or MonotonicClock()
        self._stats = BatcherStats()
        self._core: Core | None = None
        self._closed = False
        self._background: BackgroundLoop | None = None
        self._starting = threading.Lock()
        """Only for starting the background loop; the queue needs none."""

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
        is nearer than the request's own; `tenant` is whose share it takes under a fair policy. Cancelling the awaiting
        task takes the request out of the queue.

        Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded` (when it is certain to be late) and `BatcherClosed`
        when the request is not taken. One that is taken and then fails, or whose deadline passes, is answered with
        `error` set.
        """
        if not isinstance(request, InferenceRequest):
            request = InferenceRequest(request)
        allowed = _allowed(request.deadline, deadline)
        response: InferenceResponse = await self._at_home(
            request.prompt, request, request.priority if priority is None else priority, allowed, tenant
        )
        return response

    async def compute(
        self, item: Any, *, priority: int = 5, deadline: float | None = None, tenant: Hashable = None
    ) -> Any:
        """The model's output for one item, which may be anything that the model takes; otherwise as `add_request`.

        Raises what the model raised, and `DeadlineExceeded` after `deadline` seconds.
        """
        return await self._at_home(item, None, priority, _allowed(None, deadline), tenant)

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

    def submit_item(
        self, item: Any, *, priority: int = 5, deadline: float | None = None, tenant: Hashable = None
    ) -> concurrent.futures.Future[Any]:
        """`compute` for code without an event loop."""
        return self._hand_over(self.compute(item, priority=priority, deadline=deadline, tenant=tenant))

    async def settle(self) -> None:
        """Belong to this event loop from now on, unless it already belongs to another that runs.

        Need not be called: the first request does it. Raises `BatcherClosed`.
        """
        with self._starting:
            self._settle(asyncio.get_running_loop())

    def stats(self) -> BatcherStats:
        """What it has done until now: a copy."""
        while True:
            try:
                stats = copy.deepcopy(self._stats)
                break
            except RuntimeError:
                # In another thread a count was added that was not there before, in the middle of the copy.
                continue
        stats.waiting = len(self._policy)
        ended = stats.succeeded + stats.failed + stats.expired + stats.cancelled
        stats.running = max(0, stats.requests - ended - stats.waiting)
        return stats

    async def close(self, drain: bool = True) -> None:
        """Take no more requests; compute those that wait, or answer them with `BatcherClosed`. May be called again.

        Without `drain`, batches in the model are cancelled (its threads cannot be, but nobody waits for them).
        """
        self._closed = True
        core = self._core
        if core is not None and core.loop.is_running():
            if core.loop is asyncio.get_running_loop():
                await core.close(drain=drain)
            else:
                closing = asyncio.run_coroutine_threadsafe(core.close(drain=drain), core.loop)
                await asyncio.wrap_future(closing)
        self._runner.close()
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

    async def _at_home(
        self, prompt: Any, request: InferenceRequest | None, priority: int, allowed: float, tenant: Hashable
    ) -> Any:
        """Compute in the event loop to which this belongs, wherever the call comes from."""
        here = asyncio.get_running_loop()
        core = self._core
        if core is None or core.loop is not here:
            with self._starting:
                core = self._settle(here)
            if core.loop is not here:
                coroutine = self._compute(core, prompt, request, priority, allowed, tenant)
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, core.loop))
        return await self._compute(core, prompt, request, priority, allowed, tenant)

    async def _compute(
        self,
        core: Core,
        prompt: Any,
        request: InferenceRequest | None,
        priority: int,
        allowed: float,
        tenant: Hashable,
    ) -> Any:
        length = self._measure.length(prompt)
        now = self._clock.now()
        entry = Entry(core.loop.create_future(), prompt, request, now, length, priority, now + allowed, tenant)
        core.enter(entry)
        try:
            return await entry.future
        except asyncio.CancelledError:
            core.leave(entry)
            raise

    def _settle(self, here: asyncio.AbstractEventLoop) -> Core:
        """The core, moved to the event loop `here` if there is none, or the loop that it was in has ended."""
        core = self._core
        if core is not None and core.loop.is_running():
            return core
        if self._closed:
            raise BatcherClosed("the batcher is closed: it takes no more requests")
        if core is not None and not core.is_empty:
            if not core.loop.is_closed():
                raise RuntimeError("requests wait in an event loop that stands still: run it, or use another batcher")
            # Their callers ended with their loop.
            core.empty()
        self._core = Core(here, self._runner, self._policy, self._measure, self._clock, self._limits, self._stats)
        return self._core

    def _hand_over(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        try:
            loop = self._home()
        except BaseException:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def _home(self) -> asyncio.AbstractEventLoop:
        """The event loop of the core, which is one of our own where there is no other."""
        with self._starting:
            if self._closed:
                raise BatcherClosed("the batcher is closed: it takes no more requests")
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


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _allowed(own: float | None, given: float | None) -> float:
    """Seconds from submission; infinite without a limit."""
    if given is not None:
        check_time("deadline", given, above_zero=True)
    return min(math.inf if own is None else own, math.inf if given is None else given)
