"""Stores in SQLite that are there at once."""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from batchwright.store import open_store


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
