"""The reference: twenty lines of greedy, work-conserving batching. Whatever waits goes whenever the model is free."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from benchmarks.batching.device import Device
from benchmarks.batching.systems import Options
from benchmarks.batching.workload import Job

OPTIONS: tuple[Options, ...] = ({},)


class Greedy:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.waiting: deque[tuple[Job, asyncio.Future[int]]] = deque()
        self.running: asyncio.Task[None] | None = None

    async def call(self, job: Job) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.waiting.append((job, future))
        if self.running is None:
            self.running = asyncio.create_task(self.run())
        return await future

    async def run(self) -> None:
        await asyncio.sleep(0)
        while not self.empty:
            batch = self.take()
            outputs: list[Any]
            try:
                outputs = await self.device.compute([job for job, _ in batch])
            except Exception as error:
                outputs = [error] * len(batch)
            for (_, future), output in zip(batch, outputs, strict=True):
                if future.done():
                    continue
                if isinstance(output, Exception):
                    future.set_exception(output)
                else:
                    future.set_result(output)
        self.running = None

    def take(self) -> list[tuple[Job, asyncio.Future[int]]]:
        size = min(len(self.waiting), self.device.cost.max_batch_size)
        return [self.waiting.popleft() for _ in range(size)]

    @property
    def empty(self) -> bool:
        return not self.waiting

    async def close(self) -> None:
        pass


def open_system(device: Device, options: Options) -> Greedy:
    return Greedy(device)
