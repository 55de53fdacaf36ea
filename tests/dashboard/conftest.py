"""A browser for the session, and pages that show made-up states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.dashboard.browser import CHROMIUM, Browser
from tests.dashboard.feed import Feed


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture
def feed() -> Iterator[Feed]:
    """Serve the dashboard with states that the test makes up."""
    feed = Feed()
    feed.start()
    yield feed
    feed.stop()
