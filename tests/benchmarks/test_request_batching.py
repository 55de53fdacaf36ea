"""The batching benchmark in process: its search, its figures, its report, and the whole command on ours and greedy."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.batching import peers
from benchmarks.batching.bars import bars, losses
from benchmarks.batching.cli import app
from benchmarks.batching.findings import Cell, Findings, Goodput, Load, Measured, Overhead, Real, difference, estimate
from benchmarks.batching.goodput import RATES, by_decile, highest_rate, next_rate
from benchmarks.batching.lanes import Lanes, overheads
from benchmarks.batching.peers import BY_REQUEST, GREEDY, OURS, SORTING, SYSTEMS, Peer, PeerFailed, System
from benchmarks.batching.plots import plots
from benchmarks.batching.replay import Outcomes
from benchmarks.batching.report import figures, page, read_figures
from benchmarks.batching.suite import SECTIONS, Study, quick, tasks, thorough
from benchmarks.batching.trials import TRIALS
from benchmarks.batching.worker import Result
from benchmarks.batching.workload import Job, Workload
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

SMALL = ["--quick", "--count", "100", "--system", "ours", "--system", "greedy"]


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """The command handles it for the rest of its process, which here is that of all tests."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@given(st.integers(-1, len(RATES) - 1), st.floats(0, 9))
def test_the_search_finds_the_highest_rate_from_anywhere(last: int, guess: float) -> None:
    right = RATES[last] if last >= 0 else 0.0
    asked: list[float] = []

    def enough(rate: float) -> bool:
        asked.append(rate)
        return rate <= right

    assert highest_rate(enough, guess) == right
    assert len(set(asked)) == len(asked) <= 32


def test_a_good_guess_is_cheap() -> None:
    asked: list[float] = []

    def enough(rate: float) -> bool:
        asked.append(rate)
        return rate <= RATES[100]

    assert highest_rate(enough, RATES[100]) == RATES[100]
    assert asked == [RATES[100], RATES[101]]
    assert next_rate(RATES[100]) == RATES[101]
    assert next_rate(RATES[-1]) == RATES[-1]


def test_misses_among_equal_lengths_do_not_gather_in_one_tenth() -> None:
    jobs = [Job(ident, 0.0, length=64, limit=1.0) for ident in range(20)]
    latencies = [2.0 if ident % 2 else 0.5 for ident in range(20)]
    assert by_decile(jobs, Outcomes(latencies, [True] * 20, 1, 1.0, 1.0, 1.0)) == [0.5] * 10


def test_intervals() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(2.484, abs=1e-3)
    assert estimate([1.0]).half == estimate([1.0, float("inf")]).half == float("inf")
    assert difference([1.0, 5.0], [0.5, 4.5]).half == 0


def test_the_plans() -> None:
    trace = Path("trace.csv")
    assert not [cell for cell in thorough(None).goodput if "azure" in (cell.workload.lengths, cell.workload.arrivals)]
    assert {cell.workload.lengths for cell, _ in thorough(trace).loads} == {"fixed", "lognormal", "azure"}
    chosen = list(tasks(quick(None), list(SYSTEMS.values()), SECTIONS))
    assert not [task for task in chosen if task.title == "urgent" and task.system.choice is not None]
    assert [task.system.name for task in chosen if task.title == "real time"] == [
        OURS,
        GREEDY,
        "batched",
        "async_batcher",
    ]


# Made-up findings: two seeds, a device, ours, the references, and one library.

FIXED, MIXED = Cell("encoder", Workload()), Cell("encoder", Workload(lengths="lognormal"))
BULK = Cell("encoder", Workload(slo=None, urgent=0.2, bulk="dumps"))


def _result(in_time: float, p99: float | None = 0.01, deciles: Sequence[float] | None = None) -> Result:
    quantiles = {"0.5": 0.005, "0.9": 0.008, "0.99": p99, "1": p99}
    return {
        "in_time": in_time,
        "deciles": [in_time] * 10 if deciles is None else list(deciles),
        "answered": in_time,
        "latencies": quantiles,
        "urgent": quantiles,
        "bulk": quantiles,
        "batches": 10,
        "mean_size": 2.5,
        "seconds": 1.0,
        "busy": 0.5,
    }


def _goodput(system: str, cell: Cell, *rates: float, tuned: bool = False) -> Goodput:
    return Goodput(system, cell, tuned, {"wait": 5}, list(rates))


def _loads(system: str, cell: Cell, *results: Result, section: str = "loads") -> Load:
    return Load(system, section, cell, 0.9, list(results))


@pytest.fixture
def findings() -> Findings:
    host = {"date": "2026-01-01", "processor": "a processor", "cores": 2, "python": "3.11"}
    found = Findings(host, [1, 2], 100, complete=True, notes=["Ray is skipped."])
    found.systems = {OURS: Measured("", [{"policy": "auto"}]), "bentoml": Measured("1.4", [{}, {"wait": 5}])}
    for tuned in (False, True):
        found.goodput += [
            _goodput(OURS, FIXED, 0.8, 0.8, tuned=tuned),
            _goodput(GREEDY, FIXED, 0.8, 0.8, tuned=tuned),
            _goodput(SORTING, FIXED, 0.8, 0.8, tuned=tuned),
            _goodput("bentoml", FIXED, *((0.9, 0.9) if tuned else (0.0, 0.0)), tuned=tuned),
            _goodput(OURS, MIXED, 1.2, 1.4, tuned=tuned),
            _goodput(GREEDY, MIXED, 0.6, 0.7, tuned=tuned),
            _goodput(SORTING, MIXED, 0.6, 0.7, tuned=tuned),
        ]
    shorter = [0.5, *[1.0] * 9]
    found.loads = [
        _loads(OURS, FIXED, _result(0.9, None), _result(0.9, None)),
        _loads(GREEDY, FIXED, _result(0.91), _result(0.93)),
        _loads(OURS, MIXED, _result(0.95, deciles=shorter), _result(0.95, deciles=shorter)),
        _loads(GREEDY, MIXED, _result(0.9), _result(0.9)),
        _loads(OURS, BULK, _result(1.0, 0.04), _result(1.0, 0.04), section="urgent"),
        _loads(GREEDY, BULK, _result(1.0, 0.1), _result(1.0, 0.1), section="urgent"),
    ]
    found.real = [Real(OURS, FIXED, 0.9, [0.9, 0.9], [0.89, 0.91])]
    found.overhead = [
        Overhead(OURS, [8.0, 9.0, 8.5], [1.0] * 3, 32.0),
        Overhead("bentoml", [2.0, 2.5, 3.0], [1.0] * 3, 32.0),
    ]
    return found


def test_the_tables(findings: Findings) -> None:
    text = page(findings, {"loads-encoder": "loads.svg"})
    rows = {tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in text.splitlines()}
    assert "- Ray is skipped." in text
    assert "- BentoML (1.4): `as it comes` · `wait=5`" in text
    assert "![2. Share in time at each load](loads.svg)" in text
    equal = "**0.80 ±0.00**"
    assert ("fixed, 5x", equal, equal, equal, "0.00 ±0.00", "1.00 ±0.00") in rows
    assert ("fixed, 5x", "0.80 ±0.00", "0.80 ±0.00", "0.80 ±0.00", "**0.90 ±0.00**", "0.89 ±0.00") in rows
    assert ("log-normal, 5x", "**1.30 ±1.27**", "0.65 ±0.64", "0.65 ±0.64", "-", "2.00 ±0.00") in rows
    assert ("batchwright", "90.0% ±0.0; ∞; 2.5") in rows
    assert ("greedy (20 lines)", "92.0% ±12.7; 10 ms; 2.5") in rows
    assert ("1", "(!) 50.0% / 90.0%") in rows
    assert ("2", "100.0% / 90.0%") in rows
    assert ("batchwright", "5 / 40 (0.40); 5 / 40") in rows
    assert ("BentoML", "2.5 (2.0..3.0)", "32.0") in rows
    assert ("encoder, fixed, 5x, 90%", "batchwright", "90.0%", "90.0%") in rows


def test_goals_are_judged_by_the_figures(findings: Findings) -> None:
    fixed, mixed, deciles, urgent, dear, lower = bars(findings)
    assert (fixed.places, fixed.missed, mixed.places, mixed.missed) == (1, [], 1, [])
    assert (deciles.places, deciles.missed) == (10, ["encoder, log-normal, 90%, tenth 1"])
    assert "not met** (missed in 1 of 10)" in str(deciles)
    assert (urgent.missed, dear.missed) == ([], [])
    assert lower.missed == ["BentoML (2.5 against 8.5)"]


def test_losses_are_told(findings: Findings) -> None:
    assert losses(findings) == [
        "Goodput, others tuned: 1 clear: encoder, fixed, 5x (BentoML 0.90 against 0.80).",
        "Share in time: 0 clear; 1 not clear.",
        "Overhead: 1 clear: BentoML (2.5 µs against 8.5 µs).",
    ]


def test_what_was_not_measured_is_left_out(findings: Findings) -> None:
    bare = Findings(findings.machine, [1, 2], 100)
    text = page(bare, {})
    assert "Interrupted" in text
    assert "## 1." not in text
    assert not bars(bare)
    assert not losses(bare)


def test_figures_are_read_again(findings: Findings) -> None:
    content = figures(findings)
    assert read_figures(content) == findings
    assert json.loads(content)["goodput"][0]["cell"]["device"] == "encoder"


def test_plots_have_the_same_bytes_each_time(findings: Findings) -> None:
    drawn = dict(plots(findings))
    assert set(drawn) == {"goodput-encoder", "loads-encoder"}
    assert dict(plots(findings)) == drawn
    assert all(content.startswith(b"<?xml") and b"<dc:date>" not in content for content in drawn.values())


# With processes.


def test_a_run_that_is_hopeless_ends_early() -> None:
    plan = quick(None, 400)
    with Peer(SYSTEMS[GREEDY]) as peer:
        (load,) = Study(peer, replace(plan, seeds=(1,))).load("loads", FIXED, 4.0)
        (goodput, tuned) = Study(peer, replace(plan, seeds=(1,))).goodput(FIXED)
    assert load.mean < 0.5
    assert 0 < goodput.mean < 4
    assert tuned == replace(goodput, tuned=True)


def test_a_system_that_fails_is_reported_and_the_others_go_on() -> None:
    plan = quick(None, 100)
    broken = System("broken", "broken", "no_such_module")
    chosen = list(tasks(plan, [broken, SYSTEMS[GREEDY]], ["faults"]))
    failed, done = Lanes(chosen, lambda peer: Study(peer, plan)).run()
    assert "ended with status 1" in failed.trouble
    assert failed.records == []
    assert [record.system for record in done.records] == [GREEDY]


def test_what_came_of_the_tasks_comes_in_their_order() -> None:
    plan = quick(None, 100)
    chosen = list(tasks(plan, [SYSTEMS[OURS], SYSTEMS[GREEDY]], ["loads", "urgent"]))
    done = list(Lanes(chosen, lambda peer: Study(peer, plan)).run())
    assert [(each.system, each.title) for each in done] == [(task.system, task.title) for task in chosen]


def test_the_overhead_of_a_system_that_fails_and_of_one_that_does_not() -> None:
    broken = System("broken", "broken", "no_such_module")
    bad, good = overheads([broken, BY_REQUEST], repeats=2, requests=320)
    assert "status 1" in bad.trouble
    (overhead,) = good.records
    assert isinstance(overhead, Overhead)
    assert len(overhead.micros) == 2
    assert 16 <= overhead.mean_size <= 32  # a busy machine may let a batch go early
    assert overhead.median > max(overhead.callers) > 0


def test_a_bad_run_is_an_error_with_its_reason() -> None:
    with Peer(SYSTEMS[GREEDY]) as peer, pytest.raises(PeerFailed, match="KeyError"):
        peer.run({"system": ""})  # type: ignore[typeddict-item]


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_the_whole_command(tmp_path: Path) -> None:
    path = tmp_path / "batching.md"
    result = _run(*SMALL, "--save", str(path))
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert "Interrupted" not in text
    assert all(f"## {number}." in text for number in range(1, 8))
    assert "batchwright, add_request" in text
    assert {file.name for file in tmp_path.iterdir()} == {"batching.md", "batching.json"} | {
        f"batching-{name}-accelerator.svg" for name in ("goodput", "loads", "faults")
    }
    again = _run("--from", str(tmp_path / "batching.json"))
    assert again.exit_code == 0
    assert [line for line in again.output.splitlines() if line] == [
        line for line in text.splitlines() if line and not line.startswith("![")
    ]


def test_the_promises_are_kept(tmp_path: Path) -> None:
    sections = [word for name in TRIALS for word in ("--section", name)]
    result = CliRunner().invoke(app, ["--quick", "--count", "300", *sections, "--save", str(tmp_path / "report.md")])
    assert result.exit_code == 0, result.output
    report = (tmp_path / "report.md").read_text()
    assert report.count("**met**") == len(TRIALS)
    assert "not met" not in report
    again = read_figures((tmp_path / "report.json").read_bytes())
    assert [trial.section for trial in again.trials] == list(TRIALS)


def test_sections_that_were_measured_apart_make_one_report(tmp_path: Path) -> None:
    apart = [tmp_path / f"{section}.json" for section in ("faults", "urgent")]
    for path in apart:
        assert _run(*SMALL, "--section", path.stem, "--save", str(path.with_suffix(".md"))).exit_code == 0
    together = tmp_path / "both.md"
    options = [option for path in apart for option in ("--from", str(path))]
    assert _run(*options, "--save", str(together)).exit_code == 0
    assert {each.section for each in read_figures(together.with_suffix(".json").read_bytes()).loads} == {
        "faults",
        "urgent",
    }
    again = _run(*options, "--from", str(apart[0]))
    assert again.exit_code == 2
    assert "faults is in a file before too" in " ".join(again.output.replace("│", " ").split())


def test_an_interrupted_command_reports_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("benchmarks.batching.cli.overheads", interrupted)
    path = tmp_path / "batching.md"
    result = _run(*SMALL, "--section", "faults", "--section", "overhead", "--save", str(path))
    assert result.exit_code == 130
    assert "Interrupted" in path.read_text()
    assert len(read_figures(path.with_suffix(".json").read_bytes()).loads) == 2


def test_what_is_not_installed_is_skipped_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    result = _run("--system", "batched", "--section", "goodput")
    assert result.exit_code == 0
    assert "batched is skipped: it is not installed" in result.output
    assert "Workloads of the Azure trace are skipped" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--system", "vllm"], "--system vllm: must be one of ours"),
        (["--section", "speed"], "--section speed: must be one of goodput"),
        (["--from", __file__], "not a file that --save wrote"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
