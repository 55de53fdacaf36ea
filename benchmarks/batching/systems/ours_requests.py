"""batchwright through `add_request`: each answer with its token counts and measured latencies. For the overhead."""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchwright.batcher import Batcher
from benchmarks.batching.device import Device
from benchmarks.batching.systems import Options
from benchmarks.batching.workload import Job

OPTIONS: tuple[Options, ...] = ({},)


class Requests:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.jobs: dict[str, Job] = {}
        self.batcher = Batcher(self.compute)

    async def compute(self, prompts: Sequence[str]) -> list[str]:
        return [str(ident) for ident in await self.device.compute([self.jobs[prompt] for prompt in prompts])]

    async def call(self, job: Job) -> int:
        prompt = f"Request {job.ident}"
        self.jobs[prompt] = job
        try:
            response = await self.batcher.add_request(prompt, deadline=job.limit if job.limit < math.inf else None)
        finally:
            del self.jobs[prompt]
        if response.error is not None:
            raise response.error
        return int(response.output)

    async def close(self) -> None:
        await self.batcher.close(drain=False)


def open_system(device: Device, options: Options) -> Requests:
    return Requests(device)
