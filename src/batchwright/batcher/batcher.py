"""`Batcher`: many callers, and one model that is fast on lists."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

from batchwright.batcher.base_batcher import BaseBatcher, time_allowed, urgency
from batchwright.batcher.batcher_stats import BatcherStats
from batchwright.batcher.dispatch_loop import DispatchLoop
from batchwright.batcher.entry import Entry
from batchwright.batcher.model import Model, Runner
from batchwright.batcher.token_lengths import Measure
from batchwright.batcher.waiting_limits import WaitingLimits
from batchwright.clock import Clock
from batchwright.policies import Backlog, BatchPolicy, auto
from batchwright.policies.checks import check_size
from batchwright.request import InferenceRequest, InferenceResponse, Prompt, SamplingParams

_PARAMS = SamplingParams()
_PRIORITY = 5
"""Priority of an item that comes without one; that of an `InferenceRequest`."""


class Batcher(BaseBatcher[DispatchLoop, BatcherStats, Any, InferenceRequest | None, int, float, Hashable]):
    """Batcher that collects single requests and gives them to a model in batches.

        async with Batcher(model) as batcher:
            response = await batcher.add_request("Why is the sky blue?")

    `model` has `generate_batch(prompts)`, or is a function from a list of items to the list of their outputs; both may
    be async or not (then they run in a thread). `policy` decides which requests go together and when: "auto", which has
    nothing to set, or one from `batchwright.policies`. A policy belongs to one batcher.

    - `concurrency`: batches in the model at once.
    - `max_waiting`, `max_waiting_tokens`: what the queue holds, with those who are to be computed again because their
      batch failed; more is refused with `Overloaded`.
    - `isolate_failures`: compute a batch that raised again in parts, so that only the request that is to blame fails.
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
        super().__init__(BatcherStats(), clock)
        check_size("concurrency", concurrency)
        check_size("max_waiting", max_waiting)
        if max_waiting_tokens is not None:
            check_size("max_waiting_tokens", max_waiting_tokens)
        if isinstance(policy, str):
            if policy != "auto":
                raise ValueError(f"policy={policy!r}: must be 'auto' or a policy from batchwright.policies")
            policy = auto()
        if not isinstance(policy, BatchPolicy):
            raise TypeError(f"policy of type {type(policy).__name__}: must be 'auto' or a policy, such as simple(8)")
        if length is not None and not callable(length):
            raise TypeError(f"length={length!r}: must be a function that measures a prompt, such as len")
        self._backlog = Backlog(policy)
        self._recomputes = isolate_failures
        self._limits = WaitingLimits(max_waiting, max_waiting_tokens, isolate_failures)
        self._runner = model if isinstance(model, Runner) else Runner(model, slots=concurrency)
        self._measure = Measure(getattr(model, "tokenizer", None), length)

    async def compute(
        self, item: Any, *, priority: int | None = None, deadline: float | None = None, tenant: Hashable = None
    ) -> Any:
        """Return the model's output for one item, which may be anything that the model takes, as `add_request` does.

        `priority` is 5 where none is given.

        Raises what the model raised, and `DeadlineExceeded` after `deadline` seconds.
        """
        urgent = urgency(_PRIORITY, priority)
        allowed = math.inf if deadline is None else time_allowed(None, deadline)
        core = self._core
        if core is None or core.loop is not asyncio.get_running_loop():
            return await self._answer(item, None, urgent, allowed, tenant)
        # As `_answer` does, without its frame and others: most of what is done here is done for each request alone.
        now = core.moment if deadline is None and core.moment is not None else self._clock.now()
        length = self._measure.length(item)
        entry = Entry(core.loop.create_future(), item, None, now, length, urgent, now + allowed, tenant)
        core.enter(entry)
        try:
            return await entry.future
        except asyncio.CancelledError:
            core.leave(entry)
            raise

    def submit_item(
        self, item: Any, *, priority: int | None = None, deadline: float | None = None, tenant: Hashable = None
    ) -> concurrent.futures.Future[Any]:
        """`compute` for code without an event loop."""
        return self._hand_over(self.compute(item, priority=priority, deadline=deadline, tenant=tenant))

    def _ask(
        self, request: InferenceRequest | Prompt, priority: int | None, deadline: float | None, tenant: Hashable
    ) -> Coroutine[Any, Any, InferenceResponse]:
        if not isinstance(request, InferenceRequest):
            request = InferenceRequest.of(request, _PARAMS)
        allowed = time_allowed(request.deadline, deadline)
        return self._answer(request.prompt, request, urgency(request.priority, priority), allowed, tenant)

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
    ) -> Entry:
        length = self._measure.length(prompt)
        return Entry(future, prompt, request, now, length, priority, now + allowed, tenant)

    def _waiting(self) -> int:
        core = self._core
        return len(self._backlog) + (0 if core is None else core.arrived)

    async def _release(self) -> None:
        self._runner.close()
