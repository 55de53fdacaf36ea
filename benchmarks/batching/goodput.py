"""Value of a run: how many answers were on time, and up to which rate nearly all are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from benchmarks.batching.device import Cost
from benchmarks.batching.replay import Outcomes
from benchmarks.batching.workload import Job, draw_lengths

GOAL = 0.99
"""Share of all requests sent that must be answered correctly within the SLO."""
STEP = 1.03
"""Ratio of neighbouring rates."""
RATES = tuple(0.02 * STEP**place for place in range(203))
"""Rates that are considered, from 2% to 780% of the capacity."""
_LONGEST_STRIDE = 8
"""Most rates skipped at once while the search is far off: a window as wide as a fifth of the rate is not missed."""


@cache
def capacity(cost: Cost, lengths: str, trace: Path | None) -> float:
    """Requests per second of a device that computes full batches of requests in order of arrival."""
    size = cost.max_batch_size
    drawn = draw_lengths(lengths, 200 * size, random.Random(0), trace)
    seconds = sum(cost.seconds(size, max(drawn[i : i + size])) for i in range(0, len(drawn), size))
    return len(drawn) / seconds


def in_time(jobs: Sequence[Job], outcomes: Outcomes) -> float:
    """Share of the jobs, except those whose caller left, that were answered correctly within their limit."""
    kept = _kept(jobs, outcomes)
    return sum(right for _, right in kept) / len(kept)


def by_decile(jobs: Sequence[Job], outcomes: Outcomes) -> list[float]:
    """`in_time` of each tenth of the jobs by length, the shortest first."""
    # Equal lengths stay in order of arrival: sorted by outcome, the misses would gather in one tenth.
    kept = sorted(_kept(jobs, outcomes), key=lambda pair: pair[0])
    bounds = [len(kept) * i // 10 for i in range(11)]
    return [sum(right for _, right in kept[begin:end]) / (end - begin) for begin, end in pairwise(bounds)]


def _kept(jobs: Sequence[Job], outcomes: Outcomes) -> list[tuple[int, bool]]:
    """Length of each job that counts, and whether it was answered correctly within its limit."""
    return [
        (job.length, latency <= job.limit)
        for job, latency, counted in zip(jobs, outcomes.latencies, outcomes.counted, strict=True)
        if counted
    ]


def highest_rate(enough: Callable[[float], bool], guess: float = 1.0) -> float:
    """The highest of `RATES` at which enough is answered on time; 0 if there is none.

    What is enough at one rate is assumed to be so at lower ones. The search goes from `guess` in growing strides until
    it has passed the place, and then bisects the rest; with a good guess, it takes two or three calls.
    """

    enough_at = cache(lambda place: enough(RATES[place]))
    low = min(range(len(RATES)), key=lambda place: abs(RATES[place] - guess))
    high, stride = low, 1
    if enough_at(low):
        while (high := low + stride) < len(RATES) and enough_at(high):
            low, stride = high, min(2 * stride, _LONGEST_STRIDE)
    else:
        while (low := high - stride) >= 0 and not enough_at(low):
            high, stride = low, min(2 * stride, _LONGEST_STRIDE)
    low, high = max(low, -1), min(high, len(RATES))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough_at(middle) else (low, middle)
    return RATES[low] if low >= 0 else 0.0


def next_rate(rate: float) -> float:
    """The lowest of `RATES` above `rate`, or `rate` itself if it is the highest."""
    return next((each for each in RATES if each > rate), RATES[-1])
