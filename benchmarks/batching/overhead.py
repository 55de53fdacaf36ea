"""Cost of a batcher itself: processor time per request, in real time, with a device that answers immediately."""

from __future__ import annotations

import asyncio
import gc
import importlib
import time
from collections.abc import Sequence
from typing import TypedDict

from benchmarks.batching.device import Cost, Device
from benchmarks.batching.systems import Options, System
from benchmarks.batching.workload import FIXED, Job

CALLERS = 32
"""As many as a batch holds, each with one request at a time: a batch is full when all have asked."""
_WARM_UP = 2000


class Spent(TypedDict):
    """Result of one run: seconds of processor time of the whole process, including the callers."""

    cpu: float
    callers: float
    """Seconds of the callers alone, for as many requests without a batcher."""
    requests: int
    mean_size: float
    """Mean size of the batches."""


class _Instant(Device):
    """A device that computes nothing, but lets the event loop run one iteration, as a real one would many times."""

    async def compute(self, jobs: Sequence[Job]) -> list[int]:
        self.batches += 1
        self.jobs += len(jobs)
        await asyncio.sleep(0)
        return [job.ident for job in jobs]


class _Nothing:
    async def call(self, job: Job) -> int:
        await asyncio.sleep(0)
        return job.ident

    async def close(self) -> None:
        pass


async def _ask(system: System, count: int) -> float:
    """Processor seconds of `count` requests, from `CALLERS` callers who each wait for their answer."""
    jobs = [Job(ident, 0.0, FIXED) for ident in range(count)]

    async def caller(begin: int) -> None:
        for job in jobs[begin::CALLERS]:
            if await system.call(job) != job.ident:
                raise ValueError(f"request {job.ident} got the answer to another")

    gc.collect()
    began = time.process_time()
    await asyncio.gather(*(caller(begin) for begin in range(CALLERS)))
    return time.process_time() - began


def spend(system: str, options: Options, requests: int) -> Spent:
    """Make the system answer `requests` requests. Raises ValueError if it mixes up answers."""
    module = importlib.import_module(f"benchmarks.batching.systems.{system}")

    async def main() -> Spent:
        device = _Instant(Cost(0.0, 0.0, CALLERS))
        batcher: System = module.open_system(device, options)
        await _ask(batcher, _WARM_UP)
        device.batches = device.jobs = 0
        cpu = await _ask(batcher, requests)
        mean = device.jobs / device.batches
        await batcher.close()
        return {"cpu": cpu, "callers": await _ask(_Nothing(), requests), "requests": requests, "mean_size": mean}

    return asyncio.run(main())
