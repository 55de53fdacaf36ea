"""The benchmark of endpoints elsewhere, with few lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.remote import cli
from benchmarks.remote.runs import Outcome
from typer.testing import CliRunner


def test_all_runs_and_the_page(tmp_path: Path) -> None:
    page = tmp_path / "endpoint.md"
    arguments = ["--in-flight", "4", "--lines", "40", "--latency-ms", "1", "--rounds", "1"]
    done = CliRunner().invoke(cli.app, [*arguments, "--save", str(page)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "| worker and store | " in page.read_text()
    assert page.read_text() in done.stdout


@pytest.mark.parametrize(
    ("cpu", "verdict"),
    [
        ((1.0, 1.2), "reached (1.20 ms, 1.20)"),
        ((1.0, 1.3), "missed (1.30 ms, 1.30)"),
        ((1.5, 1.6), "missed (1.60 ms, 1.07)"),
    ],
)
def test_the_verdict_is_on_the_cost_and_on_its_growth(cpu: tuple[float, float], verdict: str) -> None:
    runs = {depth: [Outcome(1000, seconds, 2.0)] for depth, seconds in zip((16, 1024), cpu, strict=True)}
    page = cli.report(
        dict.fromkeys(("plain", "inference", "worker"), runs), lines=1000, old_lines=1, latency_ms=20.0, old=""
    )
    assert f"- worker and store: at most 1.5 ms, and the largest at most 1.25 times the smallest: {verdict}." in page
    assert "| worker and store | 500 | 500 |" in page
