"""The reference with one more idea, as infinity-emb's queue has it: requests are sorted by length before they are cut.

Whenever the model is free and nothing is prepared, what waits is taken from the queue, up to so many batches' worth,
sorted by length if it is more than one batch, and computed batch after batch, the shortest first.
"""

from __future__ import annotations

import asyncio
from collections import deque

from benchmarks.batching.device import Device
from benchmarks.batching.systems import Options
from benchmarks.batching.systems.greedy import Greedy
from benchmarks.batching.workload import Job

OPTIONS: tuple[Options, ...] = ({"batches": 8}, {"batches": 4}, {"batches": 32})


class Sorting(Greedy):
    def __init__(self, device: Device, batches: int) -> None:
        super().__init__(device)
        self.window = batches * device.cost.max_batch_size
        self.prepared: deque[tuple[Job, asyncio.Future[int]]] = deque()

    def take(self) -> list[tuple[Job, asyncio.Future[int]]]:
        size = self.device.cost.max_batch_size
        if not self.prepared:
            taken = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.window))]
            if len(taken) > size:
                taken.sort(key=lambda waiting: waiting[0].length)
            self.prepared.extend(taken)
        return [self.prepared.popleft() for _ in range(min(len(self.prepared), size))]

    @property
    def empty(self) -> bool:
        return not self.waiting and not self.prepared


def open_system(device: Device, options: Options) -> Sorting:
    return Sorting(device, options["batches"])
