"""`Batcher`: many callers, and one model that is fast on lists."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

from batchwright.batcher.base_batcher import BaseBatcher, running_loop, time_allowed, urgency
from batchwright.batcher.batcher_stats import BatcherStats
from batchwright.batcher.dispatch_loop import DispatchLoop
from batchwright.batcher.entry import Entry
from batchwright.batcher.model import Model, Runner
from batchwright.batcher.token_lengths import Measure
from batchwright.batcher.waiting_limits import WaitingLimits
from batchwright.clock import Clock
from batchwright.policies import Backlog, BatchPolicy, MaxWait, auto
from batchwright.policies.checks import check_priority, check_size, check_time
from batchwright.request import InferenceRequest, InferenceResponse, Prompt

_NEVER = math.inf
_PRIORITY = 5
"""Priority of an item without one; the default of an `InferenceRequest`."""
_USUAL = 100
"""Priorities below need no further check."""


class Batcher(
    BaseBatcher[DispatchLoop, BatcherStats, Any, InferenceRequest | None, int, float, Hashable, float | None]
):
    """Batcher that collects single requests and passes them to a model in batches.

        async with Batcher(model) as batcher:
            response = await batcher.add_request("Why is the sky blue?")

    `model` has `generate_batch(prompts)`, or is a function from a list of items to the list of their outputs; either
    may be async, or else runs in a thread. An engine is also a model. `policy` decides which requests are batched
    together and when: "auto", which has no settings, or one from `batchwright.policies`. A policy belongs to one
    batcher.

    - `max_wait_ms`: how long a request may be held back from a free model to fill batches, by priority (`{9: 500}`:
      half a second from priority 9 on, others not at all; or one number for all), for the policy "auto". A request may
      have its own `max_wait_ms`, under any policy. Requests held back go along with one that is not.
    - `concurrency`: batches in the model at once.
    - `max_waiting`, `max_waiting_tokens`: the most that the queue holds, including requests to be computed again
      because their batch failed; more are refused with `Overloaded`.
    - `isolate_failures`: if a batch raises, compute it again in parts, so that only the request at fault fails.
    - `retries`: how often a request that failed by itself, not because of others in its batch, is retried: after 0.1 s,
      then 0.2 s and so on, up to 10 s, each reduced at random by up to half.
    - `length`: measures a prompt; by default, its tokens if the model has a `tokenizer`, else its `len`.

    It belongs to the event loop in which it is first used. Calls from other threads and loops are handed over to that
    loop, and `submit` works without one.
    """

    def __init__(
        self,
        model: Model | Runner,
        policy: BatchPolicy | str = "auto",
        *,
        max_wait_ms: float | Mapping[int, float] | None = None,
        concurrency: int = 1,
        max_waiting: int = 10_000,
        max_waiting_tokens: int | None = None,
        isolate_failures: bool = True,
        retries: int = 0,
        length: Callable[[Any], int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(BatcherStats(), clock)
        check_size("concurrency", concurrency)
        check_size("max_waiting", max_waiting)
        check_size("retries", retries, least=0)
        if max_waiting_tokens is not None:
            check_size("max_waiting_tokens", max_waiting_tokens)
        if isinstance(policy, str):
            if policy != "auto":
                raise ValueError(f"policy={policy!r}: must be 'auto' or a policy from batchwright.policies")
            policy = auto(timing=None if max_wait_ms is None else MaxWait(waits_in_seconds(max_wait_ms)))
        elif max_wait_ms is not None:
            raise TypeError(
                "max_wait_ms: it is for the policy 'auto'; give any other policy its own timing, MaxWait(...)"
            )
        if not isinstance(policy, BatchPolicy):
            raise TypeError(f"policy of type {type(policy).__name__}: must be 'auto' or a policy, such as simple(8)")
        if length is not None and not callable(length):
            raise TypeError(f"length={length!r}: must be a function that measures a prompt, such as len")
        self._backlog = Backlog(policy)
        self._recomputes = isolate_failures
        self._limits = WaitingLimits(max_waiting, max_waiting_tokens, isolate_failures, retries)
        self._runner = model if isinstance(model, Runner) else Runner(model, slots=concurrency)
        self._measure = Measure(self._runner.tokenizer, length)

    async def compute(
        self,
        item: Any,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
        max_wait_ms: float | None = None,
    ) -> Any:
        """Return the model's output for one item, which may be anything that the model takes, as `add_request` does.

        `priority` is 5 by default; `max_wait_ms` is how long the item may be held back, by default as the policy says.

        Raises what the model raised, and `DeadlineExceeded` after `deadline` seconds.
        """
        if priority is None:
            priority = _PRIORITY
        elif type(priority) is not int or not 0 <= priority < _USUAL:
            priority = urgency(_PRIORITY, priority)
        allowed = _NEVER if deadline is None else time_allowed(None, deadline)
        max_wait = None if max_wait_ms is None else in_seconds("max_wait_ms", max_wait_ms)
        core = self._core
        if core is None or (loop := core.loop) is not asyncio.get_running_loop():
            return await self._answer(item, None, priority, allowed, tenant, max_wait)
        # Does what `_answer` does, without its frame and others: most of the work here is done once for each request.
        # This is also why the future is created by its class, which is compiled, not by a method of the loop that calls
        # it.
        if deadline is not None or (now := core.moment) is None:
            now = self._clock.now()
        length = self._measure.length(item)
        future: asyncio.Future[Any] = asyncio.Future(loop=loop)
        entry = Entry(now, length, priority, now + allowed, tenant, max_wait, future=future, prompt=item)
        core.enter(entry)
        try:
            return await future
        except asyncio.CancelledError:
            core.leave(entry)
            raise

    def submit_item(
        self,
        item: Any,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
        max_wait_ms: float | None = None,
    ) -> concurrent.futures.Future[Any]:
        """Do as `compute`, for code without an event loop."""
        return self.hand_over(
            self.compute(item, priority=priority, deadline=deadline, tenant=tenant, max_wait_ms=max_wait_ms)
        )

    async def add_request(
        self,
        request: InferenceRequest | Prompt,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> InferenceResponse:
        if not isinstance(request, InferenceRequest):
            request = InferenceRequest.bare(request)
        urgent = urgency(request.priority, priority)
        allowed = time_allowed(request.deadline, deadline)
        max_wait = None if request.max_wait_ms is None else request.max_wait_ms / 1e3
        core = self._core
        if core is None or core.loop is not asyncio.get_running_loop():
            response: InferenceResponse = await self._answer(request.prompt, request, urgent, allowed, tenant, max_wait)
            return response
        # Does what `_answer` does, without its frame.
        now = core.moment if allowed == math.inf and core.moment is not None else self._clock.now()
        future: asyncio.Future[InferenceResponse] = asyncio.Future(loop=core.loop)
        entry = self._entry(future, now, request.prompt, request, urgent, allowed, tenant, max_wait)
        core.enter(entry)
        try:
            return await future
        except asyncio.CancelledError:
            core.leave(entry)
            raise

    def _make(self, loop: asyncio.AbstractEventLoop) -> DispatchLoop:
        return DispatchLoop(loop, self._runner, self._backlog, self._measure, self._clock, self._limits, self._stats)

    def _entry(
        self,
        future: asyncio.Future[Any],
        now: float,
        prompt: Any,
        request: InferenceRequest | None,
        priority: int,
        allowed: float,
        tenant: Hashable,
        max_wait: float | None,
    ) -> Entry:
        return Entry(
            now,
            self._measure.length(prompt),
            priority,
            now + allowed,
            tenant,
            max_wait,
            max_tokens=0 if request is None else request.max_tokens,
            future=future,
            prompt=prompt,
            request=request,
        )

    def _waiting(self) -> int:
        return len(self._backlog) + self._uncounted()

    def _uncounted(self) -> int:
        core = self._core
        return 0 if core is None else core.arrived

    def _waiting_entries(self) -> Sequence[Entry]:
        core = self._core
        if core is None:
            return cast("Sequence[Entry]", self._backlog.items)
        if core.loop is running_loop():
            core.place_arrived()
        return core.waiting

    async def _release(self) -> None:
        await self._runner.release()


def in_seconds(name: str, milliseconds: float, *, above_zero: bool = False) -> float:
    """Return milliseconds as seconds. Raises ValueError that uses the caller's `name`."""
    check_time(name, milliseconds, above_zero=above_zero)
    return milliseconds / 1e3


def waits_in_seconds(max_wait_ms: float | Mapping[int, float]) -> float | Mapping[int, float]:
    """Return `max_wait_ms`, one for all or by priority, in seconds. Raises ValueError."""
    if not isinstance(max_wait_ms, Mapping):
        return in_seconds("max_wait_ms", max_wait_ms)
    for priority in max_wait_ms:
        check_priority("max_wait_ms", priority)
    return {priority: in_seconds(f"max_wait_ms[{priority}]", wait) for priority, wait in max_wait_ms.items()}
