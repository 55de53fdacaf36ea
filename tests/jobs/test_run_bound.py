"""How close a run came to its machine's bound, in its report and on the terminal."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from batchwright.cli.report_views import report_table
from batchwright.clock import MonotonicClock
from batchwright.engine import machine_rates as rates_module
from batchwright.engine.engine import Engine
from batchwright.jobs.job import Job
from batchwright.jobs.report import RunReport
from batchwright.jobs.run import run
from batchwright.planning.bound import MachineRates, NoBound
from batchwright.request import SamplingParams

SLOW = MachineRates(products=1.0, attention=1.0, unshared_cost=3.0, least_step=1e9, bandwidth=1.0)
DEFAULTS = SamplingParams(max_tokens=4, temperature=0.0)


class LateClock(MonotonicClock):
    """The real clock, and what a test adds to it."""

    late = 0.0

    def now(self) -> float:
        return super().now() + self.late


@pytest.fixture
def engine(shallow_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that has computed nothing, on a machine with known rates."""
    monkeypatch.setattr(rates_module, "machine_rates", lambda *_: SLOW)
    monkeypatch.setattr(rates_module, "kept_rates", lambda _: SLOW)
    monkeypatch.setattr(rates_module, "keep_rates", lambda *_: None)
    with Engine(shallow_path, dtype="bfloat16", max_num_seqs=4, kv_memory="16MiB") as engine:
        if engine.core.body.costs is None:
            pytest.skip("no compiled layers here")
        yield engine


def answered(folder: Path, engine: Engine, lines: list[dict[str, Any]], **options: Any) -> RunReport:
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run(source, folder / "out.jsonl", model=engine, defaults=DEFAULTS, report=folder / "report.json", **options)


def shown(report: RunReport) -> str:
    text = StringIO()
    Console(file=text, width=200).print(report_table(report))
    return text.getvalue()


def test_a_report_tells_the_bound_and_where_the_time_went(tmp_path: Path, engine: Engine) -> None:
    report = answered(tmp_path, engine, [{"prompt": f"Number {number}:"} for number in range(6)])
    assert report.bound_seconds is not None
    assert report.share_of_bound is not None
    assert report.bound is not None
    assert 0.0 < report.share_of_bound <= 1.0
    assert report.share_of_bound == report.bound_seconds / report.loop_seconds
    assert sum(report.bound["time"].values()) == pytest.approx(1.0)
    assert sum(report.bound["lost"].values()) + report.share_of_bound == pytest.approx(1.0)
    assert report.bound["needed"]["likeliest_rows"] == 24
    assert all(isinstance(text, str) for text in report.bound["assumptions"])
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["bound"]["seconds"] == saved["bound_seconds"] == pytest.approx(report.bound_seconds)
    assert f"{report.share_of_bound:.0%} of the bound of" in shown(report)
    assert engine.core.meter is None


def test_an_engine_is_not_measured_after_a_run_that_could_not_begin(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(job: Job) -> None:
        assert engine.core.meter is not None
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Job, "begin", begin)
    with pytest.raises(OSError, match="No space left"):
        answered(tmp_path, engine, [{"prompt": "Number 1:"}])
    assert engine.core.meter is None


def test_lines_that_fail_need_nothing(tmp_path: Path, engine: Engine) -> None:
    report = answered(tmp_path, engine, [{"prompt": "Number 1:"}, {"prompt": "word " * 20_000}])
    assert report.failed == 1
    assert report.bound is not None
    assert report.bound["needed"]["likeliest_rows"] == 4


def test_nothing_is_told_of_a_part_of_a_job(tmp_path: Path, engine: Engine) -> None:
    answered(tmp_path, engine, [{"prompt": "Number 1:"}])
    with Engine(engine.model_name, dtype="bfloat16", max_num_seqs=4, kv_memory="16MiB") as other:
        report = answered(tmp_path, other, [{"prompt": "Number 1:"}, {"prompt": "Number 2:"}])
    assert (report.resumed, report.succeeded) == (1, 2)
    assert (report.bound_seconds, report.share_of_bound, report.bound) == (None, None, None)
    assert report.no_bound == "earlier runs had finished a part of the job"
    assert "its share of the bound is not known: earlier runs had finished a part of the job" in shown(report)


def test_few_lines_do_not_wait_for_rates_to_be_measured(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates_module, "machine_rates", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(rates_module, "kept_rates", lambda _: None)
    report = answered(tmp_path, engine, [{"prompt": f"Number {number}:"} for number in range(63)])
    assert (report.succeeded, report.bound) == (63, None)
    assert "first run of 64 lines or more" in report.no_bound
    assert f"its share of the bound is not known: {report.no_bound}" in shown(report)


def test_the_report_says_how_long_rates_took_and_why_there_are_none(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LateClock()

    def busy(*_: object) -> MachineRates:
        clock.late += 10.0
        raise NoBound("the machine was busy")

    monkeypatch.setattr(rates_module, "machine_rates", busy)
    report = answered(tmp_path, engine, [{"prompt": f"Number {number}:"} for number in range(64)], clock=clock)
    assert 10.0 <= report.rates_seconds < 11.0
    assert report.wall_seconds - report.rates_seconds >= report.loop_seconds + report.load_seconds
    assert (report.bound, report.no_bound) == (None, "the machine was busy")
    assert "measuring the rates of this machine 10." in shown(report)
    assert "its share of the bound is not known: the machine was busy" in shown(report)


def test_many_lines_have_the_rates_measured(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured = rates_module.machine_rates, list[object]()

    def noted(*given: Any) -> MachineRates | None:
        measured.append(given[0])
        return measure(*given)

    monkeypatch.setattr(rates_module, "machine_rates", noted)
    report = answered(tmp_path, engine, [{"prompt": f"Number {number}:"} for number in range(64)])
    assert report.bound is not None
    assert len(measured) == 1


def test_nothing_is_told_of_an_engine_that_has_computed_before(tmp_path: Path, engine: Engine) -> None:
    engine.generate("Number 1:", DEFAULTS)
    report = answered(tmp_path, engine, [{"prompt": "Number 1:"}])
    assert report.bound is None
    assert "the engine had computed something before" in report.no_bound


def test_small_losses_are_not_shown() -> None:
    lost = {"products": 0.002, "attention": 0.04, "tail": 0.06, "host": 0.03, "recomputation": 0.0, "other": 0.0}
    report = RunReport(output="o", model="m", total=1, steps=1, share_of_bound=0.868, bound_seconds=12.0)
    text = shown(replace(report, bound={"lost": lost}))
    assert "87% of the bound of 12.0 s; 6% waiting for the tail, 4% attention, 3% host" in text
    assert "matrix products" not in text
