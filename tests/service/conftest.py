"""Where the tests of the service keep their state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores import in_memory


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder
