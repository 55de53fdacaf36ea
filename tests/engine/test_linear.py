"""What is set before the first product."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_NAMES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


@pytest.mark.parametrize(("given", "kept"), [({}, "32"), (dict.fromkeys(_NAMES, "7"), "7")])
def test_products_of_few_shapes_are_kept_unless_somebody_says_how_many(given: dict[str, str], kept: str) -> None:
    """With a thousand, as is usual, each of ever new shapes, a process grows by more than a gigabyte."""
    program = f"import os, batchwright.encoder.bert; print(*(os.environ[name] for name in {_NAMES!r}))"
    others = {name: value for name, value in os.environ.items() if name not in _NAMES}
    done = subprocess.run(
        [sys.executable, "-c", program], env=others | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [kept, kept]
