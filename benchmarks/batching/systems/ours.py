"""batchwright. "auto" is `Batcher(model)` as it comes, given how long each answer may take.

The rest of the grid: without being given that, and other policies of the package.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from batchwright.batcher import Batcher
from batchwright.policies import BatchPolicy, BySize, Policy, auto, length_aware
from benchmarks.batching.device import Device
from benchmarks.batching.systems import Options
from benchmarks.batching.workload import Job

OPTIONS: tuple[Options, ...] = (
    {"policy": "auto"},
    {"policy": "auto", "deadlines": False},
    {"policy": "length_aware"},
    {"policy": "fifo"},
)

_POLICIES: dict[str, Callable[[int], BatchPolicy]] = {
    "auto": auto,
    "length_aware": lambda size: length_aware(None, size),
    "fifo": lambda size: Policy(BySize(size)),
}
URGENT, BULK = 2, 8


class _LoopClock:
    """The time of the event loop, virtual or real."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time


class Ours:
    def __init__(self, device: Device, options: Options) -> None:
        policy = _POLICIES[options["policy"]](device.cost.max_batch_size)
        self.batcher = Batcher(device.compute, policy, length=lambda job: job.length, clock=_LoopClock())
        self.deadlines = options.get("deadlines", True)

    async def call(self, job: Job) -> int:
        deadline = job.limit if self.deadlines and job.limit < math.inf else None
        ident: int = await self.batcher.compute(job, priority=URGENT if job.urgent else BULK, deadline=deadline)
        return ident

    async def close(self) -> None:
        await self.batcher.close(drain=False)


def open_system(device: Device, options: Options) -> Ours:
    return Ours(device, options)
