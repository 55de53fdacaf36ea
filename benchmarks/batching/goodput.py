"""What a run is worth: how many answers came in time, and up to which rate nearly all do."""

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
"""Of all requests sent, so many must be answered right within the SLO."""
STEP = 1.03
"""Rates that are distinguished."""
RATES = tuple(0.02 * STEP**place for place in range(203))
"""Those that are looked at, from 2% to 780% of the capacity."""
_LONGEST_STRIDE = 8
"""Rates passed over at once while the search is far off: a window as wide as a fifth of the rate is not missed."""


@cache
def capacity(cost: Cost, lengths: str, trace: Path | None) -> float:
    """Requests a second of a device that computes full batches of requests as they come."""
    size = cost.max_batch_size
    drawn = draw_lengths(lengths, 200 * size, random.Random(0), trace)
    seconds = sum(cost.seconds(size, max(drawn[i : i + size])) for i in range(0, len(drawn), size))
    return len(drawn) / seconds


def in_time(jobs: Sequence[Job], outcomes: Outcomes) -> float:
    """The share of the jobs, but for those whose caller went away, that were answered right within their limit."""
    kept = _kept(jobs, outcomes)
    return sum(right for _, right in kept) / len(kept)


def by_decile(jobs: Sequence[Job], outcomes: Outcomes) -> list[float]:
    """`in_time` of each tenth of the jobs by length, the shortest first."""
    # Of equal lengths, in the order of arrival: sorted by their fate, the misses would gather in one tenth.
    kept = sorted(_kept(jobs, outcomes), key=lambda pair: pair[0])
    bounds = [len(kept) * i // 10 for i in range(11)]
    return [sum(right for _, right in kept[begin:end]) / (end - begin) for begin, end in pairwise(bounds)]


def _kept(jobs: Sequence[Job], outcomes: Outcomes) -> list[tuple[int, bool]]:
    """Length, and whether it was answered right within its limit, of each job that counts."""
    return [
        (job.length, latency <= job.limit)
        for job, latency, counted in zip(jobs, outcomes.latencies, outcomes.counted, strict=True)
        if counted
    ]


def highest_rate(enough: Callable[[float], bool], guess: float = 1.0) -> float:
    """The highest of `RATES` that is not too high: at which enough is answered in time; 0 where none is.

    What is enough at one rate is taken to be so at lower ones. The search goes from `guess` in growing strides until it
    has passed the place, and then halves what is left; a good guess costs two or three calls.
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
    """The lowest of `RATES` above `rate`; the highest of all has none above it and is its own."""
    return next((each for each in RATES if each > rate), RATES[-1])
