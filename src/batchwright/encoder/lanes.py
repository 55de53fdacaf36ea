"""Several batches at once on one CPU, each computed by one thread.

Threads that share one batch wait for each other after every product; threads with a batch of their own never do, and
each finds the rows that it has just written in the cache of its own core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Lanes:
    """`count` threads in each of which torch computes alone."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="batchwright-lane", initializer=_work_alone)

    @classmethod
    def open(cls) -> Lanes | None:
        """A lane for each thread that torch uses; None where there is one only, or OpenMP cannot be told."""
        count = torch.get_num_threads()
        if count == 1 or _set_openmp_threads() is None:
            return None
        return cls(count)

    def map(self, function: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
        """`function` of each of `items`, begun in their order. Raises what it raises."""
        return list(self._executor.map(function, items))


def _work_alone() -> None:
    torch.get_num_threads()  # torch settles the number for a new thread when first asked, which would undo ours
    set_threads = _set_openmp_threads()
    if set_threads is not None:
        set_threads(1)  # of this thread only: OpenMP keeps the number by thread


def _set_openmp_threads() -> Callable[[int], object] | None:
    """`omp_set_num_threads` of the OpenMP that torch has loaded; torch's own function changes all threads to come."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):  # not found; no such library; Windows
        return None
    return found
