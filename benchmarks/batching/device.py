"""The model of every system: it sleeps as long as a real one would compute, and computes one batch at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.batching.workload import Job


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a batch: `alpha + beta * items * longest`."""

    alpha: float
    beta: float
    max_batch_size: int = 32
    """Most items that fit."""

    def seconds(self, count: int, longest: int) -> float:
        return self.alpha + self.beta * count * longest

    def alone(self, length: int) -> float:
        return self.seconds(1, length)


class PoisonError(Exception):
    """Error that the device raises for a batch with a poisoned job."""


class Device:
    """A simulated device. Must be created in the event loop in which it is used."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.batches = 0
        self.jobs = 0
        self.busy = 0.0
        """Seconds computed."""
        self._turn = asyncio.Lock()

    async def compute(self, jobs: Sequence[Job]) -> list[int]:
        """Return the `ident` of each job. Raises `PoisonError` if one is poisoned, ValueError if there are too many."""
        if len(jobs) > self.cost.max_batch_size:
            raise ValueError(f"a batch of {len(jobs)}: the device holds {self.cost.max_batch_size}")
        async with self._turn:
            seconds = self.cost.seconds(len(jobs), max(job.length for job in jobs))
            self.batches += 1
            self.jobs += len(jobs)
            self.busy += seconds
            await asyncio.sleep(seconds)
        if any(job.poison for job in jobs):
            raise PoisonError("a poisoned job")
        return [job.ident for job in jobs]
