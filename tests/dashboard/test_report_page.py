"""The page of reports in a browser: all is drawn without a network, at any width, in both themes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.browser import Browser

from batchwright.jobs.report_page.charts import Run, charts_of
from batchwright.jobs.report_page.page import page_of
from batchwright.jobs.report_page.reading import report_of

NAME = "<img src=x onerror=document.title='evil'>"
MARKS = ".mark-line path, .mark-rect path, .mark-symbol path"
COUNTS = ("lines", "prompt_tokens", "computed_prompt_tokens", "generated_tokens", "sequences", "sent", "cost")


def run_of(name: str, scale: int, **more: Any) -> Run:
    """A run that has everything."""
    points = range(60)
    series: dict[str, list[Any]] = {column: [scale * point for point in points] for column in COUNTS}
    series |= {"seconds": [*map(float, points)], "steps": [*points], "cached_tokens": [point // 2 for point in points]}
    series |= {"kv_blocks": [3] * 60, "seconds_left": [60.0 - point for point in points], "refused": [0] * 60}
    lengths = {"width": 2, "ended": [3, 1], "cut": [0, 2], "mean": 1.5, "pairs": [[1.5, 2], [1.0, 1]]}
    values = {"total": 60, "output": "o", "model": NAME, "succeeded": 59, "failed": 1, "steps": 60, "loop_seconds": 9.0}
    values |= {"max_num_seqs": 8, "kv_blocks": 10, "generated_tokens": 9, "series": series, "lengths": lengths, **more}
    return Run(name, report_of(values, name))


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "page.html"
    runs = [run_of(NAME, 1), run_of("other", 3, bound_seconds=8.0, bound={"time": {"products": 1.0}})]
    assert all(chart.spec for chart in charts_of(runs))
    path.write_text(page_of(runs), encoding="utf-8")
    return path


def test_everything_is_drawn_without_a_network(browser: Browser, page_file: Path) -> None:
    with browser.page() as page:
        page.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        page.go(page_file.as_uri())
        page.until("document.documentElement.dataset.drawn === 'light'")
        empty = f"[...document.querySelectorAll('.chart')].filter((each) => !each.querySelector({MARKS!r})).length"
        assert page.value(empty) == 0
        assert page.complaints == []
        assert page.requests == [page_file.as_uri()]
        assert page.value("document.title") == "2 runs"
        assert page.value("document.querySelectorAll('img').length") == 0


def test_it_fits_a_phone_and_follows_the_theme(browser: Browser, page_file: Path) -> None:
    with browser.page(width=360, dark=True) as page:
        page.go(page_file.as_uri())
        page.until("document.documentElement.dataset.drawn === 'dark'")
        assert page.value("document.documentElement.scrollWidth") == 360
        line = "getComputedStyle(document.querySelector('.mark-line path')).stroke"
        dark = page.value(line)
        page.emulate("prefers-color-scheme", "light")
        page.until("document.documentElement.dataset.drawn === 'light'")
        assert page.value(line) != dark
        assert page.complaints == []
