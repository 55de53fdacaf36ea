"""The requests and their times, the same for every system that is measured.

Arrivals are open-loop: a request arrives at its time, however the system performs. Everything is drawn from one seed.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    ident: int
    at: float
    """Seconds from the start at which it is sent."""
    length: int
    """Tokens."""
    limit: float = math.inf
    """The SLO: seconds from `at` within which an answer counts."""
    poison: bool = False
    """Whether a batch that contains it raises."""
    leaves_after: float | None = None
    """Seconds after `at` when its caller leaves."""
    urgent: bool = False
    """Whether it is interactive, if there is bulk too."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What the requests of a run are drawn from."""

    arrivals: str = "poisson"
    """`poisson`; `bursts`: a quarter of the time, at four times the rate; `azure`: the times of the trace."""
    lengths: str = "fixed"
    """`fixed`; `lognormal`: median 48, sigma 1, 1 to 512; `azure`: prompts of the trace over 8."""
    slo: float | None = 5.0
    """Multiple of the latency of a batch of one within which an answer counts; None: no limit is given or kept."""
    limit_of: str = "own"
    """Whose latency alone that is: `own`, of a request of this length, or `mean`, of one of mean length."""
    faults: bool = False
    """Whether 5% of the callers leave while they wait, and 1% of the requests are poison."""
    urgent: float = 0.0
    """Share of interactive requests; the rest is bulk."""
    bulk: str = "steady"
    """How bulk arrives: `steady`, with the others; `dumps`: 200 at once."""


FIXED = 64
_MEDIAN, _SIGMA, _LONGEST = 48, 1.0, 512
_DUMP = 200
_PERIOD = 2.0
"""Seconds from burst to burst."""

LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "fixed": lambda _: FIXED,
    "lognormal": lambda rng: min(_LONGEST, max(1, round(_MEDIAN * math.exp(rng.gauss(0.0, _SIGMA))))),
}


@lru_cache
def azure(path: Path) -> tuple[tuple[float, int], ...]:
    """`(seconds from the first, prompt tokens)` of each request of an Azure LLM inference trace."""
    rows: list[tuple[float, int]] = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            rows.append((moment, int(row["ContextTokens"])))
    rows.sort()
    return tuple((moment - rows[0][0], tokens) for moment, tokens in rows)


def draw_lengths(kind: str, count: int, rng: random.Random, trace: Path | None) -> list[int]:
    """`count` lengths, in tokens."""
    if kind == "azure":
        rows = azure(_needed(trace))
        start = rng.randrange(len(rows))
        return [max(1, rows[(start + i) % len(rows)][1] // 8) for i in range(count)]
    return [LENGTHS[kind](rng) for _ in range(count)]


def draw_arrivals(kind: str, count: int, rate: float, rng: random.Random, trace: Path | None) -> list[float]:
    """`count` ascending times at `rate` per second on average."""
    if kind == "azure":
        rows = azure(_needed(trace))
        start = rng.randrange(len(rows) - count)
        part = [moment for moment, _ in rows[start : start + count]]
        scale = (count / rate) / max(part[-1] - part[0], 1e-9)
        return [(moment - part[0]) * scale for moment in part]
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    if kind == "bursts":
        # Time stands still for the arrivals outside the first quarter of each period.
        on = _PERIOD / 4
        times = [(moment // _PERIOD) * _PERIOD + (moment % _PERIOD) / 4 for moment in times]
        assert all(moment % _PERIOD <= on for moment in times)
    return times


def draw(
    workload: Workload, count: int, rate: float, seed: int, alone: Callable[[int], float], trace: Path | None = None
) -> list[Job]:
    """`count` jobs in the order of their arrival; `alone(length)` is the latency of a batch of one."""
    rng = random.Random(seed)
    lengths = draw_lengths(workload.lengths, count, rng, trace)
    times = draw_arrivals(workload.arrivals, count, rate, rng, trace)
    jobs = []
    mean = alone(round(sum(lengths) / len(lengths)))
    for ident, (moment, length) in enumerate(zip(times, lengths, strict=True)):
        limit = (workload.slo or math.inf) * (mean if workload.limit_of == "mean" else alone(length))
        job = Job(ident, moment, length, limit, urgent=rng.random() < workload.urgent)
        if workload.faults:
            leaves = rng.random() < 0.05
            job = replace(
                job,
                poison=not leaves and rng.random() < 0.01,
                leaves_after=rng.random() * 2 * alone(length) if leaves else None,
            )
        jobs.append(job)
    return _dumped(jobs, rng) if workload.bulk == "dumps" else jobs


def _dumped(jobs: Sequence[Job], rng: random.Random) -> list[Job]:
    """The bulk among `jobs` comes in dumps, each at the time of one of its members."""
    bulk = [job for job in jobs if not job.urgent]
    moved = [job for job in jobs if job.urgent]
    for begin in range(0, len(bulk), _DUMP):
        dump = bulk[begin : begin + _DUMP]
        moment = rng.choice(dump).at
        moved += [replace(job, at=moment) for job in dump]
    return sorted(moved, key=lambda job: job.at)


def _needed(trace: Path | None) -> Path:
    if trace is None:
        raise ValueError("this workload needs --trace: a CSV of the Azure LLM inference traces")
    return trace
