"""Sends the jobs of a workload to a system, each at its time, and records the outcomes."""

from __future__ import annotations

import asyncio
import gc
import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchwright.clock import ManualClock
from batchwright.testing import VirtualLoop
from benchmarks.batching.device import Cost, Device, PoisonError
from benchmarks.batching.systems import Options, System
from benchmarks.batching.workload import Job

_PATIENCE = 60.0
"""Seconds after the last arrival for which answers are waited for."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Outcomes of the jobs, in their order."""

    latencies: list[float]
    """Seconds from the scheduled arrival to the answer; infinite if there was none, or a wrong one."""
    counted: list[bool]
    """False for a job whose caller left."""
    batches: int
    mean_size: float
    seconds: float
    """Seconds from the first arrival to the last answer."""
    busy: float
    """Seconds that the device computed."""


async def replay(jobs: Sequence[Job], system: System, device: Device) -> Outcomes:
    """Open loop: no job waits for another's answer."""
    loop = asyncio.get_running_loop()
    latencies = [math.inf] * len(jobs)
    start = loop.time()

    async def ask(place: int, job: Job) -> None:
        try:
            answer = await system.call(job)
            right = answer == job.ident and not job.poison
        except asyncio.CancelledError:
            raise
        except Exception as error:
            right = job.poison and is_poison(error)
        if right:
            latencies[place] = loop.time() - start - job.at

    def send(place: int, job: Job) -> None:
        task = loop.create_task(ask(place, job))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if job.leaves_after is not None:
            loop.call_at(start + job.at + job.leaves_after, task.cancel)

    tasks: set[asyncio.Task[None]] = set()
    for place, job in enumerate(jobs):
        delay = start + job.at - loop.time()
        if delay > 0:
            await asyncio.sleep(delay)
        send(place, job)
    if tasks:
        await asyncio.wait(tasks, timeout=_PATIENCE)
    for task in tasks:
        # Some libraries leave callers without an answer; that is a miss, not a reason to wait forever.
        task.cancel()
    counted = [job.leaves_after is None for job in jobs]
    mean = device.jobs / device.batches if device.batches else 0.0
    return Outcomes(latencies, counted, device.batches, mean, loop.time() - start, device.busy)


def is_poison(error: BaseException | None) -> bool:
    """Whether the device's own error reached the caller, wrapped or not."""
    while error is not None:
        if isinstance(error, PoisonError) or "poisoned job" in str(error):
            return True
        error = error.__cause__
    return False


def _watch(clock: ManualClock) -> Callable[[], float]:
    """Make reading the clock take a nanosecond: a library that busy-waits for too short a time would do so forever."""

    def look() -> float:
        clock.advance(1e-9)
        return clock.now()

    return look


def measure(name: str, options: Options, cost: Cost, jobs: Sequence[Job], *, virtual: bool) -> Outcomes:
    """One run of the system `name`, in virtual or in real time."""
    loop = VirtualLoop() if virtual else asyncio.new_event_loop()
    clocks = time.time, time.monotonic, time.perf_counter
    if isinstance(loop, VirtualLoop):
        # Libraries that read the clock themselves must see the time of the loop.
        time.time = time.monotonic = time.perf_counter = _watch(loop.clock)
    try:
        module = importlib.import_module(f"benchmarks.batching.systems.{name}")

        async def main() -> Outcomes:
            device = Device(cost)
            system: System = module.open_system(device, options)
            outcomes = await replay(jobs, system, device)
            await system.close()
            return outcomes

        return loop.run_until_complete(main())
    finally:
        time.time, time.monotonic, time.perf_counter = clocks
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
        gc.collect()
