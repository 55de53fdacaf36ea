"""Large pages for memory that every step reads: small ones cost an address lookup every few microseconds."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

_MADV_HUGEPAGE = 14
_HUGE = 2 * 2**20
_ALIGNED = 64


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to back the memory of a CPU tensor with large pages as it is written to. It may decline."""
    start = -(-tensor.data_ptr() // _HUGE) * _HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
    if end > start:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(start, end - start, _MADV_HUGEPAGE)


class Arena:
    """Memory in large pages for many tensors, each aligned to a cache line."""

    def __init__(self, capacity: int) -> None:
        """Take `capacity` bytes, alignment not counted; more is taken later if that is not enough."""
        self._space = self._more(capacity)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        size = math.prod(shape) * dtype.itemsize
        start = self._used + -(self._space.data_ptr() + self._used) % _ALIGNED
        if start + size > self._space.numel():
            self._space, start = self._more(size), 0
            start = -self._space.data_ptr() % _ALIGNED
        self._used = start + size
        return self._space[start : start + size].view(dtype).view(shape)

    def _more(self, size: int) -> Tensor:
        space = torch.empty(size + _HUGE, dtype=torch.uint8)
        prefer_huge_pages(space)
        return space
