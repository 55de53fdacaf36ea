"""Processors, which compute several batches at once, in one model or several copies of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar

from batchwright.batcher.base_batcher import BaseBatcher, Closable
from batchwright.batcher.batcher import Batcher
from batchwright.batcher.batcher_stats import BatcherStats
from batchwright.batcher.model import Model
from batchwright.batcher.replicas import Replicas
from batchwright.clock import Clock, MonotonicClock
from batchwright.policies import auto
from batchwright.policies.checks import check_size, check_time
from batchwright.request import InferenceRequest, InferenceResponse, Prompt

_BatcherT = TypeVar("_BatcherT", bound="BaseBatcher[Any, Any, *tuple[Any, ...]]")


@dataclass(frozen=True, slots=True)
class AsyncBatchConfig:
    """Settings of a processor. Raises ValueError, naming the setting, for an invalid value."""

    max_concurrent_batches: int = 4
    """Batches in the model at once."""
    batch_size: int = 16
    """Most requests in a batch."""
    timeout_seconds: float = 30.0
    """Seconds after which a request without an answer gets `DeadlineExceeded`."""

    def __post_init__(self) -> None:
        check_size("max_concurrent_batches", self.max_concurrent_batches)
        check_size("batch_size", self.batch_size)
        check_time("timeout_seconds", self.timeout_seconds, above_zero=True)


class Processor(Closable, Generic[_BatcherT]):
    """Base of the processors, each of which uses a batcher.

    In an event loop: `await processor.submit(request)`. Without one: `processor.submit_sync(request).result()`, from
    any thread. It may be used with `async with` or `with`, which close it.
    """

    batcher: _BatcherT
    _workers: Sequence[asyncio.Future[None]] = ()
    """Futures that `start_workers` and `start` returned, in any event loops."""

    async def submit(
        self,
        request: InferenceRequest | Prompt,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> InferenceResponse:
        """Return the answer to one request. This is a coroutine: without an event loop use `submit_sync`.

        The arguments, and the errors for a request that is not accepted, are those of the batcher's `add_request`. A
        request that fails raises its error: `DeadlineExceeded`, which is a TimeoutError, if its time is up,
        `GenerationError` if the model failed. `batcher.add_request` returns a response with `error` set instead.
        """
        response = await self.batcher.add_request(
            request, priority=priority, deadline=self._nearest(deadline), tenant=tenant
        )
        if response.error is not None:
            raise response.error
        return response

    def submit_sync(
        self,
        request: InferenceRequest | Prompt,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> concurrent.futures.Future[InferenceResponse]:
        """Do as `submit`, for code without an event loop: `processor.submit_sync(request).result()`.

        May be called from any thread. Cancelling the future cancels the request.
        """
        return self.batcher.hand_over(self.submit(request, priority=priority, deadline=deadline, tenant=tenant))

    def stats(self) -> BatcherStats:
        """Return a copy of the statistics since the processor was created."""
        stats: BatcherStats = self.batcher.stats()
        return stats

    async def close(self, drain: bool = True) -> None:
        """Close the batcher; see its `close`."""
        try:
            await self.batcher.close(drain)
        finally:
            workers, self._workers = self._workers, ()
            for worker in workers:
                _end(worker)

    async def _stand_by(self, count: int) -> list[asyncio.Future[None]]:
        """Bind to this event loop, and return futures for code that cancels or awaits workers."""
        await self.batcher.settle()
        loop = asyncio.get_running_loop()
        workers: list[asyncio.Future[None]] = [loop.create_future() for _ in range(count)]
        self._workers = [*[each for each in self._workers if not each.done()], *workers]
        return workers

    async def __aenter__(self) -> Self:
        await self.batcher.settle()
        return self

    def _nearest(self, deadline: float | None) -> float | None:
        """Return the earlier of the caller's deadline and our own."""
        return deadline


class AsyncBatchProcessor(Processor[Batcher]):
    """Processor for a model that computes several batches at once, such as a remote endpoint or a replicated model.

    Whenever fewer than `max_concurrent_batches` are in the model, waiting requests are dispatched, as with the policy
    "auto". A request has a deadline of `timeout_seconds` unless its own is earlier. `batcher` is the batcher that it
    uses; `options` are those of `Batcher`.
    """

    def __init__(self, model: Model, config: AsyncBatchConfig | None = None, **options: Any) -> None:
        if config is not None and not isinstance(config, AsyncBatchConfig):
            raise TypeError(f"config of type {type(config).__name__}: must be an AsyncBatchConfig(batch_size=16, ...)")
        if "concurrency" in options:
            raise TypeError("concurrency: set max_concurrent_batches of AsyncBatchConfig instead")
        _refuse_policy(options)
        self.config = config or AsyncBatchConfig()
        self.batcher = Batcher(
            model, auto(self.config.batch_size), concurrency=self.config.max_concurrent_batches, **options
        )

    async def start_workers(self, num_workers: int = 2) -> list[asyncio.Future[None]]:
        """Bind the processor to this event loop; calls from other loops and threads are then handed over to it.

        Calling it is optional: the first `submit` binds to its own loop, and nothing runs while nothing is submitted.
        The returned futures are done when the processor is closed; cancelling them has no effect.
        `max_concurrent_batches`, not `num_workers`, sets how many batches are computed at once.
        """
        check_size("num_workers", num_workers)
        return await self._stand_by(num_workers)

    def _nearest(self, deadline: float | None) -> float:
        limit = self.config.timeout_seconds
        return limit if deadline is None else min(deadline, limit)


class ParallelBatchProcessor(Processor[Batcher]):
    """Processor that spreads batches over several copies of a model, each of which computes one at a time.

    `models` may be engines. There is one queue: a replica gets its next batch when it has none, so a slow one gets
    fewer. A replica that fails is taken out and its batch goes to another; it is retried after a second, then less and
    less often. `replicas` shows the state of each, `batcher` is the batcher that it uses; `options` are those of
    `Batcher`.
    """

    def __init__(
        self, models: Sequence[Model], batch_size: int = 16, *, clock: Clock | None = None, **options: Any
    ) -> None:
        if "concurrency" in options:
            raise TypeError("concurrency: each model computes one batch at a time; give more models instead")
        _refuse_policy(options)
        if not isinstance(models, Sequence) or isinstance(models, str):
            raise TypeError(f"models of type {type(models).__name__}: must be a list of models, if only of one")
        clock = clock or MonotonicClock()
        runner = Replicas(models, clock)
        self.replicas = tuple(runner.replicas)
        self.batch_size: Final = batch_size
        self.batcher = Batcher(runner, auto(batch_size), clock=clock, **options)

    async def start(self) -> list[asyncio.Future[None]]:
        """Do as `AsyncBatchProcessor.start_workers`, with a future for each model."""
        return await self._stand_by(len(self.replicas))


def _end(worker: asyncio.Future[None]) -> None:
    """Complete a worker's future, in whatever event loop it is."""
    loop = worker.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(_set_done, worker)


def _set_done(worker: asyncio.Future[None]) -> None:
    if not worker.done():
        worker.set_result(None)


def _refuse_policy(options: dict[str, Any]) -> None:
    if "policy" in options:
        raise TypeError("policy: a processor has its own, which fills whatever is free; use Batcher(model, policy)")
