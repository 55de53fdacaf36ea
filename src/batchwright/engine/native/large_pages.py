"""Large pages for memory that every step reads: small pages cost an address lookup every few microseconds."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
HUGE = 2 * 2**20
"""Bytes of a large page."""
_ALIGNED = 64


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to back the memory of a CPU tensor with large pages as it is written to. It may decline."""
    _advise(tensor, _MADV_HUGEPAGE)


def collapse_into_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to move the memory of a CPU tensor, which has been written, into large pages now. It may decline.

    Shared memory gets large pages in no other way, unless the machine is configured for them. Before Linux 6.1 it gets
    none.
    """
    _advise(tensor, _MADV_COLLAPSE)


def populate_beside(tensors: Sequence[Tensor], size: int) -> None:
    """Allocate the pages of the first `size` bytes of CPU tensors, in total, on a thread beside the caller.

    In a virtual machine whose host has not allocated its memory yet, the first write to a large page takes 5 ms, in the
    middle of a step. Before Linux 5.14 this does nothing.
    """
    each = size // max(1, len(tensors))

    def populate() -> None:
        for tensor in tensors:
            start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (tensor.data_ptr() + min(each, tensor.nbytes)) // mmap.PAGESIZE * mmap.PAGESIZE
            _madvise(start, end, _MADV_POPULATE_WRITE)

    threading.Thread(target=populate, name="batchwright-memory", daemon=True).start()


def _advise(tensor: Tensor, advice: int) -> None:
    start = -(-tensor.data_ptr() // HUGE) * HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE * HUGE
    _madvise(start, end, advice)


def _madvise(start: int, end: int, advice: int) -> None:
    if end > start:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(start, end - start, advice)


class Arena:
    """Memory in large pages for many tensors, each aligned to a cache line."""

    def __init__(self, capacity: int) -> None:
        """Allocate `capacity` bytes, not counting alignment; more are allocated later if that is not enough."""
        self._space = self._more(capacity)
        self._used = 0

    def hold(self, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor with the content that `make` returns, which has this shape and dtype."""
        return self._place(shape, dtype).copy_(make())

    def end(self) -> None:
        """Declare that nothing more will be held."""

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        start = self._used + -(self._space.data_ptr() + self._used) % _ALIGNED
        if start + size > self._space.numel():
            self._space, start = self._more(size), 0
            start = -self._space.data_ptr() % _ALIGNED
        self._used = start + size
        return self._space[start : start + size].view(dtype).view(shape)

    def _more(self, size: int) -> Tensor:
        space = torch.empty(size + HUGE, dtype=torch.uint8)
        prefer_huge_pages(space)
        return space
