"""Fixtures for the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import batchwright.engine  # noqa: F401  before any test imports torch: it settles how OpenMP's threads wait
from batchwright.models import DEFAULT_MODEL, resolve

# The same examples on every run, and no failure because a machine is slow.
settings.register_profile(
    "suite", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2_path" in getattr(item, "fixturenames", ()):
            item.add_marker("needs_model")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of the default model, in the user's own cache: fetched by the first run, found by later ones."""
    return resolve(DEFAULT_MODEL, progress=print)
