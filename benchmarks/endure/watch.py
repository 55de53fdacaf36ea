"""What a process holds over time: memory, descriptors and threads, and how fast each of them grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

import psutil

MIB = 2**20
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the process."""

    at: float
    """By `time.monotonic`."""
    life: float
    """When the process was started (Unix time), which distinguishes it from those before it."""
    rss: float
    """MiB."""
    descriptors: int
    threads: int


def look(pid: int) -> Sample | None:
    """A sample of a process; None if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return Sample(
                time.monotonic(),
                process.create_time(),
                process.memory_info().rss / MIB,
                process.num_fds(),
                process.num_threads(),
            )
    except psutil.Error:
        return None


def lives(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each process, in the order of time."""
    return [list(each) for _, each in groupby(samples, key=lambda sample: sample.life)]


def warm(samples: Sequence[Sample], warm_up: float) -> list[Sample]:
    """Samples taken more than `warm_up` seconds after the first one of their process."""
    return [each for life in lives(samples) for each in life if each.at - life[0].at >= warm_up]


def slope_per_hour(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float | None:
    """Growth of a value per hour: least squares with one slope for all processes, and a level for each.

    None if no process has two samples.
    """
    products = squares = 0.0
    for life in lives(samples):
        middle, level = fmean(each.at for each in life), fmean(value(each) for each in life)
        products += sum((each.at - middle) * (value(each) - level) for each in life)
        squares += sum((each.at - middle) ** 2 for each in life)
    return products / squares * _HOUR if squares else None


def seconds_watched(samples: Sequence[Sample]) -> float:
    """Total time between the first and the last sample of each process."""
    return sum(life[-1].at - life[0].at for life in lives(samples))
