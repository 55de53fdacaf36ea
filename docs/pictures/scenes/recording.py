"""A model that writes down what it is given, and callers for it, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from batchwright import AsyncBatchProcessor, Batcher, BatcherStats, InferenceRequest, ParallelBatchProcessor
from batchwright.clock import ManualClock
from batchwright.testing import play

Asked: TypeAlias = Batcher | AsyncBatchProcessor | ParallelBatchProcessor


@dataclass(slots=True)
class Arrival:
    """One request to come. Times are seconds, lengths tokens."""

    at: float
    length: int = 100
    priority: int = 5
    tenant: Hashable = None
    started: float | None = None
    """When a model first got it; None: never."""
    answered: float | None = None
    """When it was answered without an error; None: never."""


@dataclass(slots=True)
class Batch:
    """One call of a model."""

    start: float
    members: list[int]
    """Numbers of the arrivals."""
    lane: int
    reason: str
    """Why it was dispatched; "" for what is tried again."""
    end: float = 0.0
    error: str = ""
    limit_mb: float | None = None
    """What a batch might take of memory when this one began."""


@dataclass(slots=True)
class Run:
    """What happened."""

    arrivals: list[Arrival]
    batches: list[Batch] = field(default_factory=list)
    stats: BatcherStats = field(default_factory=BatcherStats)


class Recorder:
    """A model that takes `base + each · (items · longest)` seconds, and keeps its batches in `run`.

    `watched` is what stands in front of it, asked for the reasons of its batches. With `lane` it is a replica;
    otherwise a batch gets the lowest lane that is free. `fault(start, cells)` gives the error that a batch ends with.
    """

    def __init__(
        self,
        run: Run,
        base: float,
        each: float = 0.0,
        *,
        lane: int | None = None,
        fault: Callable[[float, int], Exception | None] | None = None,
    ) -> None:
        self.run = run
        self.base = base
        self.each = each
        self.watched: Asked | None = None
        self._lane = lane
        self._fault = fault
        self._seen: dict[str, int] = {}
        self._due: list[str] = []

    async def generate_batch(self, prompts: list[list[int]], requests: list[InferenceRequest]) -> list[str]:
        """Sleep for as long as the batch takes."""
        loop = asyncio.get_running_loop()
        numbers = [request.metadata["number"] for request in requests]
        batch = self._begun(loop.time(), numbers)
        cells = len(prompts) * max(map(len, prompts))
        await asyncio.sleep(self.base + self.each * cells)
        batch.end = loop.time()
        error = self._fault(batch.start, cells) if self._fault else None
        if error is not None:
            batch.error = type(error).__name__
            raise error
        return ["done"] * len(prompts)

    def _begun(self, now: float, numbers: list[int]) -> Batch:
        taken = {batch.lane for batch in self.run.batches if not batch.end}
        lane = next(lane for lane in range(len(taken) + 1) if lane not in taken) if self._lane is None else self._lane
        batch = Batch(now, numbers, lane, self._reason())
        if self.watched is not None:
            batch.limit_mb = self.watched.stats().memory_limit_mb
        self.run.batches.append(batch)
        for number in numbers:
            if self.run.arrivals[number].started is None:
                self.run.arrivals[number].started = now
        return batch

    def _reason(self) -> str:
        """Of several batches dispatched in one turn, those that are full went first."""
        if self.watched is None:
            return ""
        for reason, count in sorted(self.watched.stats().reasons.items()):
            self._due += [reason] * (count - self._seen.get(reason, 0))
            self._seen[reason] = count
        return self._due.pop(0) if self._due else ""


def record(
    arrivals: Sequence[Arrival],
    make: Callable[[Any, ManualClock], Asked],
    base: float,
    each: float = 0.0,
    fault: Callable[[float, int], Exception | None] | None = None,
) -> Run:
    """Have `arrivals` come to the batcher that `make` makes for a `Recorder` and a clock."""
    run = Run(list(arrivals))
    model = Recorder(run, base, each, fault=fault)

    def watched(clock: ManualClock) -> Asked:
        model.watched = make(model, clock)
        return model.watched

    return come(run, watched)


def come(run: Run, make: Callable[[ManualClock], Asked]) -> Run:
    """Have the arrivals of `run` come, each at its time, and wait for all answers."""

    async def main(clock: ManualClock) -> None:
        asked = make(clock)
        ask = asked.add_request if isinstance(asked, Batcher) else asked.submit

        async def one(number: int, arrival: Arrival) -> None:
            await asyncio.sleep(arrival.at)
            request = InferenceRequest([0] * arrival.length, metadata={"number": number}, max_tokens=1)
            response = await ask(request, priority=arrival.priority, tenant=arrival.tenant)
            if response.error is None:
                arrival.answered = clock.now()

        tasks = [asyncio.create_task(one(number, arrival)) for number, arrival in enumerate(run.arrivals)]
        await asyncio.gather(*tasks, return_exceptions=True)
        run.stats = asked.stats()
        await asked.close()

    play(main)
    return run


class Varied(Protocol):
    """Makes the next arrival, at a time and with what a random generator draws."""

    def __call__(self, at: float, draw: random.Random) -> Arrival: ...


def poisson(
    rate: float,
    until: float,
    *,
    since: float = 0.0,
    seed: int = 1,
    arrival: Varied = lambda at, draw: Arrival(at),
) -> list[Arrival]:
    """Arrivals at random, `rate` a second between two times."""
    draw = random.Random(seed)
    at, arrivals = since, []
    while (at := at + draw.expovariate(rate)) < until:
        arrivals.append(arrival(at, draw))
    return arrivals
