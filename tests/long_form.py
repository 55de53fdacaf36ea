"""The long form of the suite, `pytest --long`: more random examples, seeds, kills and sizes than the short one tries.

A test whose whole point is length is marked `long`; one that draws examples says how many it draws in each form.
"""

from __future__ import annotations

import pytest

_chosen = False


def choose(config: pytest.Config) -> None:
    """Take the form from the command line, before any test module is imported."""
    global _chosen
    _chosen = config.getoption("--long")


def examples(short: int, *, long: int) -> int:
    """Return how many examples are to be drawn: `long` with `--long`, else `short`."""
    return long if _chosen else short


def is_chosen(item: pytest.Item) -> bool:
    """Return whether the test belongs to the form that runs."""
    return _chosen or item.get_closest_marker("long") is None
