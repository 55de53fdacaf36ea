"""Time on a device that computes asynchronously."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(work: Callable[[], object], device: torch.device, rounds: int, *, warm_up: int = 3) -> float:
    """Median of `rounds` consecutive calls, after `warm_up` that do not count; on CUDA the device's own time."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    return statistics.median(_cuda_rounds(work, rounds) if device.type == "cuda" else _host_rounds(work, rounds))


def _cuda_rounds(work: Callable[[], object], rounds: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def _host_rounds(work: Callable[[], object], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds
