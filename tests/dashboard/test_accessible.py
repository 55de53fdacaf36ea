"""The pages for everybody: axe-core finds no violations, and what Lighthouse would look at is in order."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard import states
from tests.dashboard.browser import Browser, Page
from tests.dashboard.feed import Feed
from tests.dashboard.service import Service
from tests.dashboard.test_work import button, page, service, status, written

from batchwright.server.dashboard.dashboard_state import DashboardState

__all__ = ["page", "service"]
LIVE = "document.documentElement.dataset.link === 'live'"

LOOKS = [
    pytest.param(390, False, id="390-light"),
    pytest.param(1280, True, id="1280-dark"),
    pytest.param(390, True, id="390-dark", marks=pytest.mark.long),
    pytest.param(1280, False, id="1280-light", marks=pytest.mark.long),
]
"""Each width and each theme; with `--long` each with each."""


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm on this machine")
    folder = tmp_path_factory.mktemp("axe")
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent", "axe-core@4"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm could not install axe-core: {done.stderr.strip()[-200:]}")
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


def violations(page: Page, axe: str) -> list[str]:
    """Violations of all of axe's rules but the experimental ones, each with the elements."""
    page.value(f"{axe}\n;0")
    # Colours are in transition after a change.
    page.value("""Promise.all(document.getAnimations()
        .filter((each) => each.effect.getTiming().iterations !== Infinity)
        .map((each) => each.finished.catch(() => 0))).then(() => 0)""")
    found: list[dict[str, Any]] = page.value("axe.run().then((found) => found.violations)")
    return [f"{each['id']}: {[node['html'][:200] for node in each['nodes']]}" for each in found]


def failed() -> DashboardState:
    return states.state(
        states.job(1, status="failed", problem="Line 3: must be a JSON object", progress=1.0),
        states.job(2, status="completed", completed=900, failed=100, progress=1.0, error_file_id="file-1"),
        states.job(3, status="expired", completed=9, failed=91, progress=1.0),
    )


@pytest.mark.parametrize(("width", "dark"), LOOKS)
@pytest.mark.parametrize("made", [states.state, lambda: states.state(states.job()), failed, states.extreme])
def test_the_dashboard_has_no_violations(
    browser: Browser, feed: Feed, axe: str, made: Callable[[], DashboardState], width: int, dark: bool
) -> None:
    feed.show(made())
    with browser.page(width=width, dark=dark) as page:
        page.go(feed.url)
        page.until(LIVE)
        assert violations(page, axe) == []


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_api_reference_has_no_violations(
    browser: Browser, service: Service, axe: str, width: int, dark: bool
) -> None:
    with browser.page(width=width, dark=dark) as page:
        page.go(f"{service.url}/docs")
        page.until("document.querySelectorAll('article').length > 60")
        assert violations(page, axe) == []
        assert not page.value("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert page.complaints == []


def test_what_opens_on_the_page_has_no_violations(page: Page, axe: str, tmp_path: Path) -> None:
    table = tmp_path / "reviews.csv"
    table.write_text("id,review\n1,good\n")
    page.choose("#file-input", table)
    page.until("document.querySelector('.template-form') !== null")
    assert violations(page, axe) == []
    page.choose("#file-input", written(tmp_path / "mixed.jsonl", ["good", "fail here"]))
    page.until(status("Completed with errors"))
    page.click(button("details"))
    page.until("document.querySelectorAll('#details .preview .line').length === 2")
    page.until("document.querySelectorAll('#details .groups li').length === 1")
    assert violations(page, axe) == []


def test_the_page_is_light(browser: Browser, service: Service) -> None:
    """What Lighthouse counts, in what does not depend on the machine: weight, requests, layout, texts, targets."""
    with browser.page(width=390) as page:
        page.go(service.url)
        page.until(LIVE)
        sizes: list[int] = page.value("performance.getEntriesByType('resource').map((each) => each.decodedBodySize)")
        assert len(sizes) <= 40
        assert sum(sizes) <= 150_000
        shift = page.value("""new Promise((resolve) => {
            let sum = 0;
            new PerformanceObserver((list) => list.getEntries().forEach((each) => { sum += each.value; }))
                .observe({ type: "layout-shift", buffered: true });
            setTimeout(() => resolve(sum), 100);
        })""")
        assert shift <= 0.1
        small = """[...document.querySelectorAll("button, a, label.button")].filter((node) => {
            const box = node.getBoundingClientRect();
            return node.checkVisibility() && !node.matches(".skip") && (box.width < 24 || box.height < 24);
        }).map((node) => node.outerHTML)"""
        assert page.value(small) == []
        tiny = """[...document.querySelectorAll("body *")].filter((node) => node.checkVisibility() && node.innerText
            && parseFloat(getComputedStyle(node).fontSize) < 10.5).map((node) => node.outerHTML.slice(0, 90))"""
        assert page.value(tiny) == []
        assert page.value("document.querySelector('meta[name=description]').content") != ""
        assert page.value("document.documentElement.lang") == "en"
        assert page.complaints == []
        text = json.dumps(page.value("document.documentElement.outerHTML"))
        assert len(gzip.compress(text.encode())) < 20_000
