"""Fixtures for the whole suite."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import tests.cores  # noqa: F401  before any test imports torch
from hypothesis import HealthCheck, settings
from stamina.instrumentation import set_on_retry_hooks

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


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A handler that a test left behind would write to that test's closed standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    if structlog.is_configured():
        structlog.reset_defaults()
        set_on_retry_hooks(None)
