"""The benchmark of the store, on a batch that is not large at all."""

from __future__ import annotations

from pathlib import Path

from benchmarks.store import cli
from benchmarks.store.runs import Outcome
from typer.testing import CliRunner


def test_both_runs_and_the_page(tmp_path: Path) -> None:
    page = tmp_path / "batch-store.md"
    arguments = ["--lines", "300", "--latency-ms", "1", "--concurrency", "64", "--folder", str(tmp_path)]
    done = CliRunner().invoke(cli.app, [*arguments, "--save", str(page)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "| over the bare loop | " in page.read_text()
    assert page.read_text() in done.stdout


def test_ratios_are_of_the_runs_of_one_round() -> None:
    bare = [Outcome(compute=10.0, peak_memory=10**6), Outcome(compute=20.0, peak_memory=10**6)]
    store = [Outcome(compute=11.0, validate=1.0, finish=1.0), Outcome(compute=21.0, validate=2.0, finish=1.0)]
    page = cli.report(bare, store, lines=100, concurrency=8, latency_ms=5.0)
    assert "| over the bare loop | +7.5% (+5.0%..+10.0%) |" in page
    assert "| over the bare loop, these two included | +25.0% (+20.0%..+30.0%) |" in page
