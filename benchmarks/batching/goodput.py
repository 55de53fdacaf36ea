"""What a run is worth: how many answers came in time, and up to which rate nearly all do."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.batching.device import Cost
from benchmarks.batching.replay import Outcomes
from benchmarks.batching.workload import Job, draw_lengths

GOAL = 0.99
"""Of all requests sent, so many must be answered right within the SLO."""
STEP = 1.03
"""Rates that are told apart."""


def capacity(cost: Cost, lengths: str, trace: Path | None) -> float:
    """Requests a second of a device that computes full batches of requests as they come."""
    size = cost.max_batch_size
    drawn = draw_lengths(lengths, 200 * size, random.Random(0), trace)
    seconds = sum(cost.seconds(size, max(drawn[i : i + size])) for i in range(0, len(drawn), size))
    return len(drawn) / seconds


def in_time(jobs: Sequence[Job], outcomes: Outcomes) -> float:
    """The share of the jobs, but for those whose caller went away, that were answered right within their limit."""
    kept = [
        latency <= job.limit
        for job, latency, counted in zip(jobs, outcomes.latencies, outcomes.counted, strict=True)
        if counted
    ]
    return sum(kept) / len(kept)


def by_decile(jobs: Sequence[Job], outcomes: Outcomes) -> list[float]:
    """`in_time` of each tenth of the jobs by length, the shortest first."""
    kept = sorted(
        (job.length, latency <= job.limit)
        for job, latency, counted in zip(jobs, outcomes.latencies, outcomes.counted, strict=True)
        if counted
    )
    bounds = [len(kept) * i // 10 for i in range(11)]
    return [
        sum(right for _, right in kept[begin:end]) / (end - begin)
        for begin, end in pairwise(bounds)
    ]


def highest_rate(share: Callable[[float], float], capacity: float) -> float:
    """The highest rate at which `share(rate)` is still `GOAL`, by bisection; 0 where the lowest is too high.

    `share` is taken to fall with the rate. Rates lie `STEP` apart, from 2% to 800% of `capacity`.
    """
    rates, rate = [], capacity * 0.02
    while rate < capacity * 8:
        rates.append(rate)
        rate *= STEP
    first = bisect_left(rates, True, key=lambda rate: share(rate) < GOAL)
    return rates[first - 1] if first else 0.0
