"""How batchers keep their promises in hard cases: short deadlines, outages, bad replicas, requests that may wait.

Everything is in virtual time, so the figures can be repeated to the last digit.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from batchwright.batcher import (
    AdaptiveBatcher,
    Batcher,
    LengthAwareBatcher,
    ParallelBatchProcessor,
    PriorityBatcher,
    SimpleBatcher,
    TimeBasedBatcher,
)
from batchwright.clock import ManualClock
from batchwright.testing import play

TRIALS = ("deadlines", "outage", "replicas", "waits")
_MS = 1e-3
COUNT = 1000
"""Requests of a trial, by default."""

_Make = Callable[[Any, ManualClock], Batcher]
BATCHERS: dict[str, _Make] = {
    "Batcher": lambda model, clock: Batcher(model, clock=clock),
    "Batcher, waits of 100 ms": lambda model, clock: Batcher(model, max_wait_ms=100, clock=clock),
    "SimpleBatcher(8, 100)": lambda model, clock: SimpleBatcher(model, 8, 100, clock=clock),
    "TimeBasedBatcher(100)": lambda model, clock: TimeBasedBatcher(model, 100, clock=clock),
    "AdaptiveBatcher": lambda model, clock: AdaptiveBatcher(model, clock=clock),
    "PriorityBatcher(16, 100)": lambda model, clock: PriorityBatcher(model, clock=clock),
    "LengthAwareBatcher": lambda model, clock: LengthAwareBatcher(model, clock=clock),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One table, and where its goal was missed."""

    section: str
    heading: str
    told: str
    columns: list[str]
    rows: list[list[str]]
    goal: str
    missed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Model:
    """Takes `base` seconds plus `each` for every prompt, with normal noise in proportion; fails by `fails`."""

    base: float = 20 * _MS
    each: float = 0.0
    noise: float = 0.0
    fails: Callable[[Sequence[str]], Exception | None] = lambda prompts: None
    calls: int = 0
    prompts: int = 0
    largest: int = 0
    """Prompts of its largest batch."""
    _rng: random.Random = field(default_factory=lambda: random.Random(1))

    async def generate_batch(self, prompts: list[str]) -> list[Any]:
        self.calls += 1
        self.prompts += len(prompts)
        self.largest = max(self.largest, len(prompts))
        usual = self.base + self.each * len(prompts)
        await asyncio.sleep(usual * max(0.2, self._rng.gauss(1.0, self.noise)))
        if (error := self.fails(prompts)) is not None:
            raise error
        return [prompt.upper() for prompt in prompts]


def trials(sections: Sequence[str], count: int = COUNT) -> Iterator[Trial]:
    """Carry out the trials of these sections with about `count` requests each."""
    made: dict[str, Callable[[int], Trial]] = {
        "deadlines": _deadlines, "outage": _outage, "replicas": _replicas, "waits": _waits,
    }  # fmt: skip
    for name in TRIALS:
        if name in sections:
            yield made[name](count)


async def _outcomes(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def _at(moment: float, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    await asyncio.sleep(moment - asyncio.get_running_loop().time())
    return await call()


def _deadlines(count: int) -> Trial:
    cells = [(slack, noise) for slack in (2, 4) for noise in (0.0, 0.2)]
    rows, missed = [], []
    for name, make in BATCHERS.items():
        shares = []
        for slack, noise in cells:
            share = _share_in_time(make, slack * 20 * _MS, noise, count)
            shares.append(f"{share:.1%}")
            if share < 0.99:
                missed.append(f"{name}, {slack}x, noise {noise:.0%} ({share:.1%})")
        rows.append([name, *shares])
    return Trial(
        "deadlines",
        "Deadlines that are shorter than the wait",
        f"{count:,} requests, each of which comes to a model that is free and takes 20 ms, with a deadline of two or"
        " four times that: the share that was answered in time.",
        ["batcher", *(f"{slack}x, noise {noise:.0%}" for slack, noise in cells)],
        rows,
        "At least 99% in time wherever the model is free and the deadline is at least twice its latency",
        missed,
    )


def _share_in_time(make: _Make, deadline: float, noise: float, count: int) -> float:
    async def main(clock: ManualClock) -> float:
        batcher = make(_Model(noise=noise), clock)
        moments = [number * 2.5 * deadline for number in range(count)]
        ended = await _outcomes([_at(moment, lambda: batcher.compute("x", deadline=deadline)) for moment in moments])
        return sum(not isinstance(each, Exception) for each in ended) / count

    return play(main)


def _outage(count: int) -> Trial:
    # Finding out costs a few calls, whatever waits.
    count = max(count, COUNT)
    rows, missed = [], []
    for size in (8, 32, 64):
        for fault, fails in _FAULTS.items():
            counts = [_calls(size, fails(random.Random(seed)), count) for seed in range(10)]
            calls, needed = statistics.fmean(counts), -(-count // size)
            rows.append([f"{size}", fault, f"{needed}", f"{calls:.0f}", f"{calls / needed:.2f}"])
            if fault == "down" and calls > 1.2 * needed:
                missed.append(f"batches of {size} ({calls / needed:.2f})")
    return Trial(
        "outage",
        "A model that is down",
        f"{count:,} requests at once, to a model that raises for every batch, or for those that hold a request to"
        " blame: how often it was called, on average of ten draws, and how many batches there were.",
        ["batch size", "fails", "batches", "calls", "calls a batch"],
        rows,
        "A model that is down: at most 1.2 times the calls that the batches alone need",
        missed,
    )


def _down(rng: random.Random) -> Callable[[Sequence[str]], Exception | None]:
    return lambda prompts: ConnectionError("refused")


def _poisoned(share: float) -> Callable[[random.Random], Callable[[Sequence[str]], Exception | None]]:
    def made(rng: random.Random) -> Callable[[Sequence[str]], Exception | None]:
        bad = {f"prompt {number}" for number in range(10 * COUNT) if rng.random() < share}
        return lambda prompts: ValueError("bad") if not bad.isdisjoint(prompts) else None

    return made


_FAULTS = {"down": _down, "1% of the requests": _poisoned(0.01), "5% of the requests": _poisoned(0.05)}


def _calls(size: int, fails: Callable[[Sequence[str]], Exception | None], count: int) -> int:
    model = _Model(fails=fails)

    async def main(clock: ManualClock) -> None:
        batcher = SimpleBatcher(model, size, clock=clock)
        await _outcomes([batcher.compute(f"prompt {number}") for number in range(count)])

    play(main)
    return model.calls


@dataclass(slots=True)
class _BlackHole(_Model):
    """Answers quickly, with an exception for all but the first prompt."""

    async def generate_batch(self, prompts: list[str]) -> list[Any]:
        self.calls += 1
        self.prompts += len(prompts)
        await asyncio.sleep(_MS)
        return [prompts[0].upper(), *(ConnectionError("reset") for _ in prompts[1:])]


def _replicas(count: int) -> Trial:
    rows, missed = [], []
    kinds: dict[str, Callable[[], _Model]] = {
        "fast, exceptions for all but one item": _BlackHole,
        "raises at once": lambda: _Model(base=_MS, fails=_down(random.Random())),
        "ten times slower": lambda: _Model(base=200 * _MS),
    }
    for name, kind in kinds.items():
        for rate in (400, 1200):
            failed, share = _beside_a_bad_replica(kind, rate, 5 * count)
            rows.append([name, f"{rate}", f"{failed}", f"{share:.1%}"])
            if failed:
                missed.append(f"{name}, {rate}/s ({failed} failed)")
    return Trial(
        "replicas",
        "A bad replica beside two good ones",
        f"{5 * count:,} requests over three replicas, of which two take 20 ms a batch of 16 and the third is bad: how"
        " many requests failed, and which share of all prompts it was given.",
        ["the third replica", "requests/s", "failed requests", "its share of the prompts"],
        rows,
        "No request fails because of a bad replica",
        missed,
    )


def _beside_a_bad_replica(kind: Callable[[], _Model], rate: float, count: int) -> tuple[int, float]:
    models = [_Model(), kind(), _Model()]

    async def main(clock: ManualClock) -> int:
        async with ParallelBatchProcessor(models, 16, clock=clock) as processor:
            ended = await _outcomes(
                [_at(number / rate, lambda: processor.submit("a prompt")) for number in range(count)]
            )
        return sum(isinstance(each, Exception) for each in ended)

    failed = play(main)
    return failed, models[1].prompts / sum(model.prompts for model in models)


_WAIT_MS = 200.0
_KINDS: dict[str, _Make] = {
    "Batcher": lambda model, clock: Batcher(model, clock=clock),
    "PriorityBatcher(16, 100)": lambda model, clock: PriorityBatcher(model, clock=clock),
    "Batcher, {9: 200}": lambda model, clock: Batcher(model, max_wait_ms={9: _WAIT_MS}, clock=clock),
    "PriorityBatcher, {0: 0, 9: 200}": lambda model, clock: PriorityBatcher(
        model, 64, {0: 0.0, 9: _WAIT_MS}, clock=clock
    ),
}


def _waits(count: int) -> Trial:
    rows, missed = [], []
    found = {name: _mixed(make, 18 * count) for name, make in _KINDS.items()}
    default = found["Batcher"][0]
    for name, (urgent, background, size, beyond) in found.items():
        rows.append(
            [name, f"{urgent:.1f}", f"{urgent / default:.2f}", f"{background:.0f}", f"{size:.1f}", f"{beyond:.1f}"]
        )
        if "200" in name and (urgent > 1.1 * default or size < 8 or beyond > 0.0):
            missed.append(name)
    return Trial(
        "waits",
        "Requests that may wait beside those that may not",
        f"{18 * count:,} requests, 300 a second, a tenth of them urgent, to a model that takes 20 ms and 1 ms for each"
        " request; background requests may wait 200 ms. Latencies in ms; the last column is by how much the latest"
        " background request exceeded its wait and the longest batch.",
        ["batcher", "urgent p50", "÷ Batcher", "background p50", "requests a batch", "beyond the wait"],
        rows,
        "Urgent p50 within 10% of the default batcher's, background batches of at least 8, none later than its wait"
        " plus one batch",
        missed,
    )


def _mixed(make: _Make, count: int) -> tuple[float, float, float, float]:
    """Return the medians of urgent and background requests in ms, the mean batch, and ms beyond the wait."""
    rng = random.Random(3)
    moments = list(accumulate(rng.expovariate(300.0) for _ in range(count)))
    waited: dict[int, list[float]] = {0: [], 9: []}
    model = _Model(each=_MS)

    async def main(clock: ManualClock) -> None:
        batcher = make(model, clock)

        async def ask(priority: int) -> None:
            response = await batcher.add_request("x", priority=priority)
            waited[priority].append(response.latency_ms)
            queued.append((priority, response.queue_ms))

        queued: list[tuple[int, float]] = []
        async with asyncio.TaskGroup() as callers:
            for at in moments:
                callers.create_task(_at(at, partial(ask, 0 if rng.random() < 0.1 else 9)))
        late.append(max(queue for priority, queue in queued if priority == 9))

    late: list[float] = []
    play(main)
    longest_ms = (model.base + model.each * model.largest) * 1e3
    beyond = max(0.0, late[0] - _WAIT_MS - longest_ms)
    return statistics.median(waited[0]), statistics.median(waited[9]), model.prompts / model.calls, beyond
