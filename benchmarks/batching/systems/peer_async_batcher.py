"""`async-batcher`: `AsyncBatcher`.

It gathers for up to `max_queue_time` from the first request on, while fewer than `concurrency` batches run.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from benchmarks.batching.device import Device
from benchmarks.batching.systems import Options
from benchmarks.batching.workload import Job

_AsyncBatcher: Any = importlib.import_module("async_batcher.batcher").AsyncBatcher  # not where types are checked

VERSION = version("async-batcher")

# The first is the default, but for the batch size: by default it has no limit, and the device has one.
OPTIONS: tuple[Options, ...] = (
    {"max_queue_time": 0.01},
    {"max_queue_time": 0.0},
    {"max_queue_time": 0.001},
    {"max_queue_time": 0.02},
    {"max_queue_time": 0.0, "concurrency": 2},
)


class _Batcher(_AsyncBatcher):  # type: ignore[misc]
    """Its users write a subclass."""

    def __init__(self, device: Device, options: Options) -> None:
        super().__init__(max_batch_size=device.cost.max_batch_size, **options)
        self.device = device

    async def process_batch(self, batch: list[Job]) -> list[int]:
        return await self.device.compute(batch)


class Batcher:
    def __init__(self, device: Device, options: Options) -> None:
        self.batcher = _Batcher(device, options)

    async def call(self, job: Job) -> int:
        ident: int = await self.batcher.process(job)
        return ident

    async def close(self) -> None:
        await self.batcher.stop(force=True)


def open_system(device: Device, options: Options) -> Batcher:
    return Batcher(device, options)
