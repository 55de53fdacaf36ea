"""Where the tests of crashes keep their state."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: what is killed here is a process, and no power is lost."""
    if not _MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="batchwright-", dir=_MEMORY) as folder:
        yield Path(folder)
