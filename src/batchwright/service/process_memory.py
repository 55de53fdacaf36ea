"""Memory that a server or worker keeps but no longer needs: settings of glibc's allocator and of Python's
collector for processes that run for long. Elsewhere than on Linux with glibc the allocator stays as it is.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From `malloc.h`."""
_LARGE = 4 * 2**20
_KEPT = 16 * 2**20
_SET_FROM_OUTSIDE = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def return_large_blocks() -> None:
    """Have blocks of 4 MiB and more given back to the system as soon as they are freed. Call it once, at the start.

    By itself glibc comes to keep all below 32 MiB. The tensors of a step are of that size and of ever other shapes, so
    what is kept grows with every step that is larger than those before, and a small block at its end holds it for good.
    Does nothing where the environment tunes the allocator.
    """
    if not any(name in os.environ for name in _SET_FROM_OUTSIDE):
        _call("mallopt", _M_MMAP_THRESHOLD, _LARGE)
        _call("mallopt", _M_TRIM_THRESHOLD, _KEPT)


def return_free_pages() -> None:
    """Give back pages that are free between blocks in use, which glibc keeps until it is asked."""
    _call("malloc_trim", 0)


def exempt_loaded_objects() -> None:
    """Exempt the objects that exist now from Python's collector. Call it once everything is loaded.

    With a model's libraries there are 275,000 of them. A full collection stops everything while it looks at them, and
    comes only after a quarter as many new ones were made: until then cyclic garbage is kept.
    """
    gc.collect()
    gc.freeze()


def _call(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            getattr(ctypes.CDLL(None), name)(*arguments)
