"""Packed weights that the processes of several replicas hold once, in memory that they all map.

The process that opens replicas creates the memory, an empty `memfd`, and passes its descriptor to each of their
processes, which calls `share_weights` before it loads the model. The first process that is ready to pack weights does
so for all, under a lock that ends with the process; the others wait for it, and use what it has packed. After that no
process writes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from batchwright.engine.native.large_pages import HUGE, Arena, collapse_into_huge_pages
from batchwright.errors import UnsupportedModel

_HEADER = struct.Struct("<QQ32s32s")
"""Header of the memory, written once it is complete: its size, the bytes that are used, and digests of the model and of
the layout of its weights."""
_FIRST = mmap.PAGESIZE
"""Offset of the first weight."""
_SLACK = 2**20
"""Bytes for the alignment of tensors."""

_given: tuple[int, str] | None = None
"""A descriptor, and the fingerprint of the model whose weights the memory holds."""


def share_weights(descriptor: int, fingerprint: str) -> None:
    """Have the next model with compiled layers keep its weights in the memory with this descriptor.

    `fingerprint`: a text that changes when the model does.
    """
    global _given
    _given = descriptor, fingerprint


def arena_for(capacity: int) -> Arena:
    """Return the arena for weights of `capacity` bytes, in shared memory if this process has been given some.

    Raises the errors of `SharedArena`.
    """
    global _given
    given, _given = _given, None
    return Arena(capacity) if given is None else SharedArena(capacity, *given)


class SharedArena(Arena):
    """An arena in memory that several processes map, all of which hold the same tensors in the same order."""

    def __init__(self, capacity: int, descriptor: int, fingerprint: str) -> None:
        """Wait until no other process is writing.

        Raises `UnsupportedModel` if the memory holds another model, OSError if there is not enough memory.
        """
        self._descriptor = descriptor
        self._size = -(-(_FIRST + capacity + _SLACK) // HUGE) * HUGE
        self._model = hashlib.sha256(fingerprint.encode()).digest()
        # The lock is released when this process ends, whatever it is doing.
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        header = os.pread(descriptor, _HEADER.size, 0)
        size, *self._packed = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 0, b"", b"")
        self._is_packed = size > 0
        """Whether another process has packed the weights."""
        if not self._is_packed:
            # No process has mapped it: one that began to write has died.
            os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, self._size)
        else:
            fcntl.lockf(descriptor, fcntl.LOCK_UN)
            if (size, self._packed[1]) != (self._size, self._model):
                raise UnsupportedModel(
                    "the model's files were changed while replicas of it run, which share its weights: start all again"
                )
        self._space, self._used = _mapped(descriptor, self._size), _FIRST
        self._layout = hashlib.sha256()

    def hold(self, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        self._layout.update(f"{shape} {dtype};".encode())
        place = self._place(shape, dtype)
        return place if self._is_packed else place.copy_(make())

    def end(self) -> None:
        """Let other processes use the contents, or check that their layout is the one that this process expects.

        Raises RuntimeError if it is not.
        """
        found = [self._used, self._model, self._layout.digest()]
        if self._is_packed and self._packed != found:
            raise RuntimeError("another replica has laid out the weights in another way")
        collapse_into_huge_pages(self._space)
        if not self._is_packed:
            os.pwrite(self._descriptor, _HEADER.pack(self._size, *found), 0)
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        _protect(self._space)

    def _more(self, size: int) -> Tensor:
        raise RuntimeError(f"{size} bytes of weights are more than the memory for them holds")


def _mapped(descriptor: int, size: int) -> Tensor:
    """Map shared memory at an address suitable for large pages, for as long as this process lives."""
    reserved = _map(None, size + HUGE, 0, _PRIVATE_NOTHING, -1)
    start = -(-reserved // HUGE) * HUGE
    _map(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=torch.uint8)


_MAP_FIXED = 0x10
_PRIVATE_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FAILED = ctypes.c_void_p(-1).value


def _map(address: int | None, size: int, access: int, flags: int, descriptor: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found: int | None = call(address, size, access, flags, descriptor, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"memory for weights cannot be mapped: {os.strerror(number)}")
    return found


def _protect(space: Tensor) -> None:
    """Write-protect memory that others read."""
    call = ctypes.CDLL(None).mprotect
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    call(space.data_ptr(), space.nbytes, mmap.PROT_READ)
