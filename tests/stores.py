"""Stores in SQLite that are there at once, and folders in memory for them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from batchwright.store import open_store

_MEMORY = Path("/dev/shm")


@contextmanager
def in_memory() -> Iterator[Path]:
    """Make a folder in memory where the system has one, and remove it: every transaction waits for a disk.

    For tests in which processes are killed, but no power is lost.
    """
    with tempfile.TemporaryDirectory(prefix="batchwright-", dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def lay_out(path: Path) -> None:
    """Put a new store at `path`, as it is when it has been opened for the first time, if nothing is there.

    To make its tables takes as long as many a test.
    """
    if not path.exists():
        path.write_bytes(_empty())
        path.chmod(0o600)


@cache
def _empty() -> bytes:
    # Not in this thread, where an event loop may run.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as apart:
        path = Path(folder) / "store.db"
        apart.submit(asyncio.run, open_store(path).close()).result()
        assert [*Path(folder).iterdir()] == [path], "all of it is in the one file"
        return path.read_bytes()
