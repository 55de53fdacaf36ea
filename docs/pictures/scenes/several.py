"""Several batches at once: in one model, and on copies of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from batchwright import AsyncBatchConfig, AsyncBatchProcessor, InferenceRequest, ParallelBatchProcessor
from batchwright.clock import ManualClock
from pictures.scenes.recording import Asked, Recorder, Run, come, poisson, record

ENDPOINT = AsyncBatchConfig(max_concurrent_batches=3, batch_size=8)
FAULT = (1.2, 3.5)
"""Seconds between which the second replica fails."""
REPLICAS = 3


def concurrent() -> Run:
    """Three batches at once in a remote endpoint."""
    return record(
        poisson(50, 0.45, seed=4),
        lambda model, clock: AsyncBatchProcessor(model, ENDPOINT, clock=clock),
        0.12,
        5e-5,
    )


def concurrent_working() -> Run:
    """An endpoint that answers each batch in the same time, however many there are."""
    return record(poisson(300, 5), lambda model, clock: AsyncBatchProcessor(model, clock=clock), 0.1, 2e-5)


def concurrent_misused() -> Run:
    """A model on one device, where batches at once only slow each other down."""
    return _taking_turns(lambda model, clock: AsyncBatchProcessor(model, clock=clock))


def parallel() -> Run:
    """Three replicas, the last half as fast, the second one failing for a while."""

    def fault(start: float, cells: int) -> Exception | None:
        return RuntimeError("lost") if FAULT[0] <= start < FAULT[1] else None

    run = Run(poisson(80, 6.5, seed=2))
    replicas = [
        Recorder(run, 0.15, lane=0),
        Recorder(run, 0.15, lane=1, fault=fault),
        Recorder(run, 0.30, lane=2),
    ]
    return come(run, lambda clock: ParallelBatchProcessor(replicas, clock=clock))


def parallel_misused() -> Run:
    """Three times the same model, which computes one batch at a time."""
    return _taking_turns(lambda model, clock: ParallelBatchProcessor([model] * 3, clock=clock))


class _TakingTurns(Recorder):
    """One device: batches that are there together are computed one after the other."""

    _free: asyncio.Lock | None = None

    async def generate_batch(self, prompts: list[list[int]], requests: list[InferenceRequest]) -> list[str]:
        self._free = self._free or asyncio.Lock()
        async with self._free:
            return await super().generate_batch(prompts, requests)


def _taking_turns(make: Callable[[Any, ManualClock], Asked]) -> Run:
    run = Run(poisson(300, 5))
    model = _TakingTurns(run, 0.02, 2e-5)
    return come(run, lambda clock: make(model, clock))
