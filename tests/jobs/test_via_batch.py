"""`run` with a provider's batches: what is submitted, what becomes of each ending, and what is paid."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.inference.batch_provider import Batch, BatchHandler, BatchServer, provider
from tests.jobs.fakes import by_id, codes, text_of

from batchwright.backoff import Backoff
from batchwright.errors import InputError, ResumeRefused, RunFailed
from batchwright.inference.batches import collector, provider_batches
from batchwright.inference.batches.provider_batches import BatchJob
from batchwright.inference.batches.times import BatchTimes
from batchwright.jobs.job_run import RunInterrupted, RunProgress
from batchwright.jobs.run import run
from batchwright.submitting.looking import LookPauses
from batchwright.submitting.moving import Mover

QUICK = BatchTimes(
    patience=0.05,
    looks=LookPauses(0.01, 0.02, 0.02),
    retries=Backoff(0.01, 0.05),
    settles_in=0.5,
    full_for=0.05,
    mover=Mover(cancelling=0.5, shortest=0.5),
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have times of fractions of a second, which decide nothing but how long a test takes."""
    monkeypatch.setattr(provider_batches, "BatchTimes", lambda: QUICK)


@pytest.fixture
def server() -> Iterator[BatchServer]:
    with provider() as running:
        yield running


def source(folder: Path, *prompts: str, **body: Any) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"id": prompt, "prompt": prompt, **body}) + "\n" for prompt in prompts))
    return path


def many(number: int) -> list[str]:
    return [f"p{index}" for index in range(number)]


def check(output: Path, prompts: list[str]) -> None:
    """Each line once, with its own answer, and nothing left beside the output."""
    assert {name: text_of(line) for name, line in by_id(output).items()} == {each: each.upper() for each in prompts}
    names = {path.name for path in output.parent.iterdir()}
    assert names == {"in.jsonl", output.name, f"{output.name}.batchwright.json"}


def test_lines_go_into_one_batch(tmp_path: Path, server: BatchServer) -> None:
    prompts, output = many(300), tmp_path / "out.jsonl"
    report = run(source(tmp_path, *prompts, max_tokens=7, priority=3), output, backend=server.url, via="batch")
    check(output, prompts)
    [batch] = server.batches.values()
    [(name, purpose, _)] = server.files.values()
    assert (batch.endpoint, batch.window, purpose) == ("/v1/completions", "24h", "batch")
    assert name == f"batchwright-{batch.mark}.jsonl"
    assert batch.key == batch.mark
    line = batch.lines[5]
    assert line["custom_id"].endswith("_6")
    assert line["body"] == {"prompt": "p5", "max_tokens": 7, "model": "m"}
    assert set(server.paid.values()) == {1}
    assert report.batches is not None
    assert (report.batches["submitted"], report.batches["endings"], report.batches["answered"]) == (
        1,
        {"completed": 1},
        300,
    )


def test_endpoints_and_models_have_batches_of_their_own(tmp_path: Path, server: BatchServer) -> None:
    path = tmp_path / "in.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "a"},
        {"id": "b", "messages": [{"role": "user", "content": "b"}]},
        {"id": "c", "prompt": "c", "model": "n"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(path, tmp_path / "out.jsonl", backend=server.url, via="batch")
    check(tmp_path / "out.jsonl", ["a", "b", "c"])
    assert len(server.batches) == 3


def test_failed_lines_and_retries(tmp_path: Path, server: BatchServer) -> None:
    server.busy = {"p1"}
    prompts, output = [*many(5), "fail x"], tmp_path / "out.jsonl"
    path = source(tmp_path, *prompts)
    report = run(path, output, backend=server.url, via="batch")
    assert codes(report) == {"bad_prompt": 1}
    assert (report.succeeded, server.paid["p1"]) == (5, 1)
    assert not (tmp_path / "out.jsonl.batches").exists()
    before = len(server.batches)
    report = run(path, output, backend=server.url, via="batch", retry_failed="all")
    assert (report.succeeded, report.failed, len(server.batches)) == (5, 1, before + 1)
    assert set(server.paid.values()) == {1}


def test_expired_lines_are_submitted_again(tmp_path: Path, server: BatchServer) -> None:
    server.expires_at = 40
    prompts, output = many(100), tmp_path / "out.jsonl"
    report = run(source(tmp_path, *prompts), output, backend=server.url, via="batch")
    check(output, prompts)
    assert set(server.paid.values()) == {1}
    assert report.batches is not None
    assert report.batches["endings"] == {"expired": 2, "completed": 1}


def test_a_line_that_is_never_computed_fails(tmp_path: Path, server: BatchServer) -> None:
    server.expires_at = 0
    report = run(source(tmp_path, "a"), tmp_path / "out.jsonl", backend=server.url, via="batch")
    assert codes(report) == {"request_timeout": 1}


def test_lines_that_are_to_blame_fail_and_the_others_go_on(tmp_path: Path, server: BatchServer) -> None:
    server.refuses = lambda body: "model_not_found" if body["prompt"] in ("p3", "p7") else None
    report = run(source(tmp_path, *many(10)), tmp_path / "out.jsonl", backend=server.url, via="batch")
    assert codes(report) == {"model_not_found": 2}
    assert report.succeeded == 8
    assert set(server.paid.values()) == {1}


def test_no_more_is_enqueued_than_fits(tmp_path: Path, server: BatchServer) -> None:
    server.enqueued_limit, server.pace = 1500, 20
    prompts, output = many(300), tmp_path / "out.jsonl"
    run(source(tmp_path, *prompts), output, backend=server.url, via="batch")
    check(output, prompts)
    assert set(server.paid.values()) == {1}
    assert any(batch.status == "failed" for batch in server.batches.values())


@pytest.mark.parametrize("fault", ["lost", "deaf", 500, 429, 503])
@pytest.mark.parametrize("metadata", [True, False])
def test_each_step_may_fail(tmp_path: Path, server: BatchServer, fault: Any, metadata: bool) -> None:
    """Each kind of request fails at its first two tries, with a batch that is listed late."""
    server.metadata, server.lag = metadata, 0.05
    server.faults = lambda step, number: fault if number <= 2 and step not in ("models", "live") else None
    prompts, output = many(50), tmp_path / "out.jsonl"
    run(source(tmp_path, *prompts), output, backend=server.url, via="batch")
    check(output, prompts)
    assert set(server.paid.values()) == {1}
    assert len(server.batches) == 1


@pytest.mark.parametrize("shown_at", [3, 10**9])
def test_results_that_are_listed_late_are_not_paid_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown_at: int
) -> None:
    """A batch that has ended does not say at once where its results are, or never."""
    looks = 0

    class Late(BatchHandler):
        def shown(self, batch: Batch, anthropic: bool) -> dict[str, Any]:
            nonlocal looks
            looks += batch.status == "completed"
            names = ("output_file_id", "error_file_id") if looks < shown_at else ()
            return super().shown(batch, anthropic) | dict.fromkeys(names)

    monkeypatch.setattr(collector, "_MOST_FAILURES", 4)
    prompts, output = many(10), tmp_path / "out.jsonl"
    with provider(lambda: BatchServer(Late)) as server:
        report = run(source(tmp_path, *prompts), output, backend=server.url, via="batch")
    assert (report.succeeded, report.failed) == ((10, 0) if shown_at == 3 else (0, 10))
    assert set(server.paid.values()) == {1}
    assert len(server.batches) == 1


def test_results_that_are_refused_end_the_run_and_stay_there(
    tmp_path: Path, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_MOST_FAILURES", 2)
    server.faults = lambda step, number: 400 if step == "content" else None
    prompts, output = many(10), tmp_path / "out.jsonl"
    with pytest.raises(RunFailed, match=r"results of the batch batch_1 cannot be fetched .*no content"):
        run(source(tmp_path, *prompts), output, backend=server.url, via="batch")
    assert server.asked["content"] == 3
    server.faults = lambda step, number: None
    run(tmp_path / "in.jsonl", output, backend=server.url, via="batch")
    check(output, prompts)
    assert set(server.paid.values()) == {1}


def test_results_that_are_gone_fail_their_lines(tmp_path: Path, server: BatchServer) -> None:
    server.faults = lambda step, number: 410 if step == "content" else None
    report = run(source(tmp_path, *many(3)), tmp_path / "out.jsonl", backend=server.url, via="batch")
    assert (report.failed, set(server.paid.values())) == (3, {1})


def test_what_fails_for_a_day_ends_the_run_though_other_requests_succeed(
    tmp_path: Path, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_batches, "BatchTimes", lambda: replace(QUICK, longest_silence=0.3))
    server.pace = 0
    lost = ("create", 2)
    server.faults = lambda *asked: "lost" if asked == lost else 500 if asked[0] == "list_batches" else None
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": each, "prompt": each, "model": each}) + "\n" for each in "mn"))
    with pytest.raises(RunFailed, match=r"no list_batches"):
        run(path, tmp_path / "out.jsonl", backend=server.url, via="batch")


def test_an_interrupted_run_goes_on_with_its_batch(tmp_path: Path, server: BatchServer) -> None:
    server.pace = 5
    prompts, output = many(60), tmp_path / "out.jsonl"
    path = source(tmp_path, *prompts)
    shown: list[str] = []

    def interrupt(progress: RunProgress) -> None:
        if progress.waiting is not None:
            shown.append(progress.waiting)
        if server.batches and progress.waiting and "at the provider" in progress.waiting and "0 of" not in shown[-1]:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted) as interruption:
        run(path, output, backend=server.url, via="batch", progress=interrupt)
    report = interruption.value.report
    assert report.batches is not None
    assert report.batches["at_provider"] == ["batch_1"]
    assert "1 batch at the provider: " in shown[-1]
    assert (tmp_path / "out.jsonl.batches").is_dir()
    run(path, output, backend=server.url, via="batch")
    check(output, prompts)
    assert len(server.batches) == 1
    assert set(server.paid.values()) == {1}


def test_results_of_batches_survive_the_output(tmp_path: Path, server: BatchServer) -> None:
    """Whoever loses the output, but not the journal, need not pay again."""
    server.pace = 5
    prompts, output = many(60), tmp_path / "out.jsonl"
    path = source(tmp_path, *prompts)

    def interrupt(progress: RunProgress) -> None:
        if server.batches and progress.waiting and "at the provider" in progress.waiting:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        run(path, output, backend=server.url, via="batch", progress=interrupt)
    output.unlink()
    # More lines, and lines in another order of importance, leave the job the same.
    with path.open("a") as file:
        file.write(json.dumps({"id": "more", "prompt": "more"}) + "\n")
    with pytest.raises(ResumeRefused, match=r"out\.jsonl\.batches holds results of a run that differs"):
        run(path, output, backend=server.url, via="batch", chat=True)
    run(path, output, backend=server.url, via="batch")
    check(output, [*prompts, "more"])
    assert set(server.paid.values()) == {1}


def test_what_cannot_be_is_refused(tmp_path: Path, server: BatchServer) -> None:
    path = source(tmp_path, "a")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"via": "later"}, "via='later': must be live, batch or auto"),
        ({"via": "auto"}, "via='auto' needs a deadline"),
        ({"deadline": "6h"}, "deadline='6h' with via='live'"),
        ({"via": "batch", "deadline": "soon"}, "deadline='soon': must be a duration"),
        ({"via": "batch", "batch_window": "24"}, "batch_window='24': must be a duration"),
    ]
    for more, told in wrong:
        with pytest.raises(InputError, match=re.escape(told)):
            run(path, tmp_path / "out.jsonl", backend=server.url, **more)
    with pytest.raises(InputError, match="via='batch': name the provider"):
        run(path, tmp_path / "out.jsonl", via="batch")
    with pytest.raises(InputError, match="batches need an output file"):
        run(path, "-", backend=server.url, via="batch")
    assert not server.batches


@pytest.mark.parametrize("status", [401, 402, 404])
def test_what_concerns_all_lines_ends_the_run(tmp_path: Path, server: BatchServer, status: int) -> None:
    server.faults = lambda step, number: status if step == "upload" else None
    path = source(tmp_path, *many(5))
    with pytest.raises(RunFailed, match="no batch API" if status == 404 else "run the same command again"):
        run(path, tmp_path / "out.jsonl", backend=server.url, via="batch")
    assert not (tmp_path / "out.jsonl").read_bytes()
    server.faults = lambda step, number: None
    run(path, tmp_path / "out.jsonl", backend=server.url, via="batch")
    check(tmp_path / "out.jsonl", many(5))


def test_a_provider_that_is_away_is_waited_for(tmp_path: Path, server: BatchServer) -> None:
    server.pace = 10
    shown: list[str] = []
    server.faults = lambda step, number: "deaf" if step == "retrieve" and not shown else None

    def look(progress: RunProgress) -> None:
        if progress.waiting is not None and "the provider has not answered for" in progress.waiting:
            shown.append(progress.waiting)

    run(source(tmp_path, *many(30)), tmp_path / "out.jsonl", backend=server.url, via="batch", progress=look)
    check(tmp_path / "out.jsonl", many(30))
    assert shown


def test_what_a_batch_would_finish_too_late_becomes_live_requests(
    tmp_path: Path, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_batches, "_ASSUMED_SECONDS", 0.1)
    server.pace = 1
    prompts, output = many(400), tmp_path / "out.jsonl"
    report = run(source(tmp_path, *prompts), output, backend=server.url, via="auto", deadline="3s")
    check(output, prompts)
    assert report.batches is not None
    assert report.batches["moved"] > 0
    assert report.batches["answered"] + report.batches["moved"] == 400
    assert 0.0 <= report.batches["late_seconds"] <= max(0.0, report.wall_seconds - 3.0)
    assert set(server.paid.values()) == {1}


def test_lines_that_are_not_done_by_the_deadline_fail(tmp_path: Path, server: BatchServer) -> None:
    server.pace = 1
    path, output = source(tmp_path, *many(400)), tmp_path / "out.jsonl"
    report = run(path, output, backend=server.url, via="batch", deadline="1s")
    assert report.succeeded < 400
    assert codes(report) == {"request_timeout": 400 - report.succeeded}
    server.pace = 10**9
    run(path, output, backend=server.url, via="batch", retry_failed=True)
    check(output, many(400))
    assert set(server.paid.values()) == {1}


def test_a_line_has_the_time_that_it_says(tmp_path: Path, server: BatchServer) -> None:
    server.pace = 0
    path = source(tmp_path, "a", deadline_ms=200)
    report = run(path, tmp_path / "out.jsonl", backend=server.url, via="batch")
    assert codes(report) == {"request_timeout": 1}


def test_ctrl_c_says_what_is_left_at_the_provider(tmp_path: Path, server: BatchServer) -> None:
    server.pace = 0
    path, output = source(tmp_path, *many(5)), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "batchwright", "run", str(path), "-o", str(output), "--via", "batch"]
    process = subprocess.Popen([*command, "--backend", server.url], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told: list[str] = []
    for line in process.stderr:
        told.append(line)
        if "1 batch at the provider: 0 of 5 lines done" in line:
            process.send_signal(signal.SIGINT)
            break
    told += process.stderr.readlines()
    assert process.wait() == 130
    text = "".join(told)
    assert "1 batch goes on at the provider, and the same command takes the results; until" in text
    assert f"batchwright batches cancel --backend {server.url} batch_1" in text
    assert "1 submitted; no line ended" in text
    server.pace = 10
    assert subprocess.run([*command, "--backend", server.url, "-q"]).returncode == 0
    check(output, many(5))
    assert len(server.batches) == 1


def test_a_batch_that_is_not_known_everywhere_yet_is_not_lost(
    tmp_path: Path, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_batches, "BatchTimes", lambda: replace(QUICK, settles_in=600.0))
    server.faults = lambda step, number: 404 if step == "retrieve" and number <= 3 else None
    run(source(tmp_path, *many(5)), tmp_path / "out.jsonl", backend=server.url, via="batch")
    check(tmp_path / "out.jsonl", many(5))
    assert len(server.batches) == 1


def test_a_batch_that_is_gone_is_not_paid_again(tmp_path: Path, server: BatchServer) -> None:
    server.faults = lambda step, number: 404 if step == "retrieve" else None
    report = run(source(tmp_path, *many(5)), tmp_path / "out.jsonl", backend=server.url, via="batch")
    assert report.failed == 5
    assert "has no batch batch_1 any more" in report.failures[0].message
    assert len(server.batches) == 1


def test_copies_that_wait_keep_nothing_out_of_a_batch(
    tmp_path: Path, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines after them would be in no batch until the first one has ended, which may take a day."""
    monkeypatch.setattr("batchwright.jobs.identical_lines._MOST_WAITING", 5 * 256)
    server.pace = 10
    path = tmp_path / "in.jsonl"
    lines = [{"id": f"{number}", "prompt": f"p{number // 20}", "temperature": 0} for number in range(200)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run(path, tmp_path / "out.jsonl", backend=server.url, via="batch")
    assert (report.succeeded, report.deduplicated, len(server.batches)) == (200, 190, 1)


def test_copies_that_wait_are_no_lines_left_for_batches(
    tmp_path: Path, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would count as work that cannot be done by the deadline, for which batches are given up."""
    made: list[BatchJob] = []

    def noted(**options: Any) -> BatchJob:
        made.append(BatchJob(**options))
        return made[-1]

    monkeypatch.setattr("batchwright.jobs.job_run.BatchJob", noted)
    server.pace = 2
    left: list[int] = []

    def look(progress: RunProgress) -> None:
        if progress.waiting and "at the provider" in progress.waiting:
            left.append(made[0].lines_left())

    path = tmp_path / "in.jsonl"
    lines = [{"id": f"{number}", "prompt": f"p{number // 20}", "temperature": 0} for number in range(200)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(path, tmp_path / "out.jsonl", backend=server.url, via="auto", deadline="1h", progress=look)
    assert left[-1] == 0
    assert server.paid.total() == 10


def test_a_bill_ends_a_run_but_not_what_is_under_way(tmp_path: Path, server: BatchServer) -> None:
    server.faults = lambda step, number: 402 if step == "live" and number == 20 else None
    path, output = source(tmp_path, *many(100)), tmp_path / "out.jsonl"
    with pytest.raises(RunFailed, match="Nothing more is computed for this key"):
        run(path, output, backend=server.url)
    assert len(by_id(output)) == server.paid.total() < 100
    run(path, output, backend=server.url)
    assert set(server.paid.values()) == {1}


def test_requests_do_not_pay_again_for_what_is_in_a_batch(tmp_path: Path, server: BatchServer) -> None:
    server.pace = 1
    prompts, output = many(60), tmp_path / "out.jsonl"
    path = source(tmp_path, *prompts)

    def interrupt(progress: RunProgress) -> None:
        if progress.waiting and "at the provider" in progress.waiting and ": 0 of" not in progress.waiting:
            server.pace = 0
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        run(path, output, backend=server.url, via="batch", progress=interrupt)
    with pytest.raises(ResumeRefused, match="requests would pay for them again: go on with --via batch"):
        run(path, output, backend=server.url)
    report = run(path, output, backend=server.url, via="auto", deadline="1s")
    check(output, prompts)
    assert report.batches is not None
    assert report.batches["moved"] > 0
    assert set(server.paid.values()) == {1}


def test_a_job_in_a_batch_may_start_over_with_requests(tmp_path: Path, server: BatchServer) -> None:
    server.pace = 0
    prompts, output = many(5), tmp_path / "out.jsonl"
    path = source(tmp_path, *prompts)

    def interrupt(progress: RunProgress) -> None:
        if progress.waiting and "at the provider" in progress.waiting:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        run(path, output, backend=server.url, via="batch", progress=interrupt)
    with pytest.raises(ResumeRefused, match="requests would pay for them again"):
        run(path, output, backend=server.url)
    run(path, output, backend=server.url, overwrite=True)
    check(output, prompts)


def test_a_job_that_was_never_submitted_goes_on_with_requests(tmp_path: Path, server: BatchServer) -> None:
    server.faults = lambda step, number: 404 if step == "upload" else None
    path, output = source(tmp_path, *many(5)), tmp_path / "out.jsonl"
    with pytest.raises(RunFailed, match="--via live"):
        run(path, output, backend=server.url, via="batch")
    run(path, output, backend=server.url)
    check(output, many(5))
