"""Free memory is returned to the system."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import pytest

from batchwright.service import process_memory

_SCRIPT = """
import ctypes
from batchwright.service import process_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd rest".split()] + [
        ("more", ctypes.c_size_t * 4)
    ]

libc.mallinfo2.restype = Info
if {bound}:
    process_memory.return_large_blocks()
libc.free(libc.malloc(24 << 20))  # from now on glibc would keep what is smaller
before = libc.mallinfo2().hblkhd
block = libc.malloc(8 << 20)
print(libc.mallinfo2().hblkhd - before >= 8 << 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another allocator than glibc's")
@pytest.mark.parametrize(
    ("bound", "environment", "apart"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}, False),  # the user's tuning of the allocator is kept
    ],
)
def test_a_large_block_is_apart_from_the_heap(bound: bool, environment: dict[str, str], apart: bool) -> None:
    """A block apart from the heap is returned to the system when it is freed."""
    script = _SCRIPT.replace("{bound}", str(bound))
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str(apart)


def test_loaded_objects_are_not_looked_at_again() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    try:
        process_memory.exempt_loaded_objects()
        assert not any(each is cycle for each in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(each is cycle for each in gc.get_objects())
