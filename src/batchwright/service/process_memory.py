"""Settings of glibc's allocator and Python's collector that keep long-running processes from holding unused memory.

On systems other than Linux with glibc, the allocator is left as it is.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, from `malloc.h`."""
_LARGE = 4 * 2**20
_KEPT = 16 * 2**20
_SET_FROM_OUTSIDE = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def return_large_blocks() -> None:
    """Have blocks of 4 MiB and more returned to the system when they are freed. Call it once at the start.

    By default glibc ends up keeping freed blocks below 32 MiB. The tensors of a step have such sizes, which vary, so
    the kept memory grows, and a small block at its end keeps it from ever being returned. Does nothing if the
    environment tunes the allocator.
    """
    if not any(name in os.environ for name in _SET_FROM_OUTSIDE):
        _call("mallopt", _M_MMAP_THRESHOLD, _LARGE)
        _call("mallopt", _M_TRIM_THRESHOLD, _KEPT)


def return_free_pages() -> None:
    """Return free pages between used blocks to the system, which glibc keeps until asked."""
    _call("malloc_trim", 0)


def exempt_loaded_objects() -> None:
    """Exempt existing objects from Python's garbage collector. Call it when everything is loaded.

    With a model's libraries there are 275,000 objects. A full collection stops the process while it visits them, and
    runs only after a quarter as many were made; until then cyclic garbage is kept.
    """
    gc.collect()
    gc.freeze()


def _call(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            getattr(ctypes.CDLL(None), name)(*arguments)
