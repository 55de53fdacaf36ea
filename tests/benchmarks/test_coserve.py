"""Co-serving: the requests are the same each time, and the page says what was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from benchmarks.coserve import report
from benchmarks.coserve.report import Findings, Slo
from benchmarks.coserve.run import Outcome, Served, Setting
from benchmarks.coserve.traffic import MEAN_OUTPUT, arrivals, lines


def _outcome(name: str, served: list[Served], *, online: int, batch: int, job: bool = True) -> Outcome:
    setting = Setting(name, "folder", 2, 30, 100, rate=3.0 if served else 0.0, job=job)
    return Outcome(setting, 100.0, online, batch, 1000, 75.0, 4, 1.04, "fused body, bfloat16", served)


@pytest.fixture
def findings() -> Findings:
    slo = Slo(1000, 80)
    alone = _outcome("alone", [Served(50, 15)] * 100, online=30_000, batch=0, job=False)
    together = _outcome("with the job", [*[Served(100, 75)] * 99, Served(140, 81)], online=30_000, batch=72_000)
    return Findings("smollm2-135m", 0.3, _outcome("job", [], online=0, batch=120_000), alone, [("with", slo, together)])


def test_arrivals_and_lines_repeat_themselves_and_differ_from_one_another() -> None:
    first, second = (list(islice(arrivals(3.0, 49_152), 200)) for _ in range(2))
    assert [each.at for each in first] == [each.at for each in second]
    assert [each.request.prompt for each in first] == [each.request.prompt for each in second]
    assert first[-1].at == pytest.approx(200 / 3.0, rel=0.2)
    job = list(islice(lines(49_152), 400))
    assert {request.traffic for request in job} == {"batch"}
    assert not {tuple(each.request.prompt) for each in first} & {tuple(request.prompt) for request in job}
    assert all(30 <= len(request.prompt) <= 150 and 32 <= request.max_tokens <= 160 for request in job)
    assert sum(request.max_tokens for request in job) / len(job) == pytest.approx(MEAN_OUTPUT, rel=0.1)


def test_the_bars_are_those_of_the_first_run_with_the_job(findings: Findings) -> None:
    (_, slo, together), *_ = findings.together
    assert together.within(slo.ttft_ms, slo.tpot_ms) == 0.99
    assert findings.goodput(together) == pytest.approx(0.8)
    assert findings.rise(together) == pytest.approx((report.p99_ttft(together) - 50) / 75)
    assert report.bars_list(findings).count("**Met.**") == 3
    worse = replace(together, batch_tokens=71_000)
    assert "**Missed.** The job makes" in report.bars_list(replace(findings, together=[("with", slo, worse)]))


def test_the_page_has_every_run_and_the_plot_is_the_same_for_the_same_figures(findings: Findings) -> None:
    plot = pytest.importorskip("benchmarks.coserve.plot")
    page = report.page(findings, "coserving.svg")
    assert "| online alone" in page
    assert "| with " in page
    assert "(coserving.svg)" in page
    assert "10.00 requests/s" in page
    drawn = plot.draw(findings)
    assert drawn.startswith(b"<?xml")
    assert drawn == plot.draw(findings)
