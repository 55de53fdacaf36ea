"""The page of reports in a browser: all is drawn without a network, at any width, in both themes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.browser import Browser

from batchwright.cli.simulation_plots import draw
from batchwright.engine_config import EngineConfig
from batchwright.jobs.report_page.charts import Run, charts_of
from batchwright.jobs.report_page.page import page_of
from batchwright.jobs.report_page.reading import report_of
from batchwright.scheduling.sizes import EngineSizes
from batchwright.scheduling.step_costs import StepCosts
from batchwright.simulation.fleet import Fleet, simulate
from batchwright.simulation.outcome import outcome_of
from batchwright.simulation.requests import SimulatedRequest

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


@pytest.fixture(scope="module")
def simulation_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulation") / "page.html"
    costs = StepCosts((10e-3, 0.3e-3, 4e-7, 0.2e-3, 2e-6, 0.1e-3, 0.1e-3, 0.1e-3))
    config = EngineConfig(ttft_ms=500.0, kv_memory="1MiB")
    sizes = EngineSizes.of(config, device="cpu", block_bytes=1024, free_bytes=2**26, max_model_len=4096)
    requests = [SimulatedRequest(prompt_tokens=100, output_tokens=9, arrived_at=0.1 * place) for place in range(9)]
    outcomes = []
    for number in (1, 2):
        fleet = Fleet(number, sizes, config, costs)
        outcomes.append(outcome_of(fleet, simulate(fleet, requests, requests), ttft_ms=500.0, price_per_hour=1.0))
    draw(outcomes, path, has_slo=True)
    return path


@pytest.mark.parametrize("file", ["page_file", "simulation_file"])
def test_it_fits_a_phone_and_follows_the_theme(browser: Browser, file: str, request: pytest.FixtureRequest) -> None:
    page_file: Path = request.getfixturevalue(file)
    with browser.page(width=360, dark=True) as page:
        page.go(page_file.as_uri())
        page.until("document.documentElement.dataset.drawn === 'dark'")
        assert page.value("document.documentElement.scrollWidth") == 360
        assert page.value("document.querySelectorAll('.vega-actions, details').length") == 0
        line = "getComputedStyle(document.querySelector('.mark-line path')).stroke"
        dark = page.value(line)
        page.emulate("prefers-color-scheme", "light")
        page.until("document.documentElement.dataset.drawn === 'light'")
        assert page.value(line) != dark
        assert page.complaints == []
