"""How a run with an endpoint ends before its time, and that nothing is asked twice when it goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.jobs.test_backend import Endpoint, lines, serving

from batchwright.errors import EndpointError, RunFailed
from batchwright.jobs.job_run import RunEnded, RunInterrupted, RunProgress
from batchwright.jobs.run import run

NAMES = [f"p{number}" for number in range(40)]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines under way are given a minute to end, which no test waits for."""
    monkeypatch.setattr("batchwright.jobs.loop._GRACE", 60.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return lines(tmp_path / "in.jsonl", *({"prompt": name} for name in NAMES))


def asked(endpoint: Endpoint) -> Counter[str]:
    return Counter(body["prompt"] for body in endpoint.asked)


def interrupting(*when: Callable[[], bool]) -> Callable[[RunProgress], None]:
    """A Ctrl-C as soon as each of these is so, one after the other."""
    left = [*when]

    def progress(_: RunProgress) -> None:
        if left and left[0]():
            left.pop(0)
            signal.raise_signal(signal.SIGINT)

    return progress


def test_without_money_the_run_ends_and_goes_on_when_there_is_some(
    source: Path, tmp_path: Path, endpoint: Endpoint
) -> None:
    output = tmp_path / "out.jsonl"
    endpoint.faults = lambda prompt: 402 if len(endpoint.asked) > 10 else None
    price, saved = "input=1,output=2", tmp_path / "report.json"
    with pytest.raises(RunFailed, match="Nothing more is computed for this key: finished lines are kept") as ended:
        run(source, output, backend=endpoint.url, model="far", backend_concurrency=4, report=saved, price=price)
    kept = output.read_bytes().splitlines()
    assert isinstance(ended.value, RunEnded)
    assert (ended.value.report.done, ended.value.report.total) == (len(kept), 40)
    spending = json.loads(saved.read_bytes())["spending"]
    assert spending["cost"] == pytest.approx(len(kept) * 5e-6), "what was paid is in the report"
    assert 1 <= len(kept) <= 10
    refused = len(endpoint.asked) - len(kept)
    assert len(endpoint.asked) <= 10 + 2 * 4, "what was not under way is not tried"
    endpoint.faults = lambda prompt: None
    report = run(source, output, backend=endpoint.url, model="far", backend_concurrency=4)
    assert (report.succeeded, report.failed, report.resumed) == (40, 0, len(kept))
    assert sorted(asked(endpoint).values()) == [1] * (40 - refused) + [2] * refused


def test_lines_that_wait_for_a_limit_come_back_at_an_interrupt(
    source: Path, tmp_path: Path, endpoint: Endpoint
) -> None:
    output = tmp_path / "out.jsonl"
    began = time.monotonic()
    with pytest.raises(RunInterrupted) as stopped:
        run(
            source,
            output,
            backend=endpoint.url,
            model="far",
            rpm=60,
            progress=interrupting(lambda: bool(endpoint.asked)),
        )
    assert time.monotonic() - began < 30.0, "it does not wait for lines that were not sent"
    assert stopped.value.report.pacing["far"].sent == len(endpoint.asked)
    assert len(endpoint.asked) <= 8
    report = run(source, output, backend=endpoint.url, model="far")
    assert (report.succeeded, report.failed) == (40, 0)
    assert asked(endpoint) == Counter(NAMES)


def test_a_second_interrupt_does_not_wait_for_lines_under_way(source: Path, tmp_path: Path, endpoint: Endpoint) -> None:
    output = tmp_path / "out.jsonl"
    held = threading.Event()

    def hold(prompt: str) -> None:
        held.wait(60)

    endpoint.faults = hold
    first: list[float] = []

    def again() -> bool:
        first.append(time.monotonic())
        return True

    began = time.monotonic()
    try:
        with pytest.raises(RunInterrupted):
            run(
                source, output, backend=endpoint.url, model="far", backend_concurrency=3,
                progress=interrupting(lambda: len(endpoint.asked) == 3, again),
            )  # fmt: skip
        assert first
        assert time.monotonic() - began < 30.0, "less than the time that lines are given to end"
    finally:
        held.set()
    endpoint.faults = lambda prompt: None
    report = run(source, output, backend=endpoint.url, model="far", backend_concurrency=3)
    assert (report.succeeded, report.failed, report.resumed) == (40, 0, 0)


def test_requests_that_a_second_interrupt_cuts_off_are_those_that_may_be_paid(
    source: Path, tmp_path: Path, endpoint: Endpoint
) -> None:
    held = threading.Event()

    def hold(prompt: str) -> None:
        held.wait(60)

    endpoint.faults = hold
    options = ["--backend", endpoint.url, "--model", "far", "--backend-concurrency", "8"]
    options += ["--price", "input=1,output=2", "--max-tokens", "9", "-o", str(tmp_path / "out.jsonl")]
    command = [sys.executable, "-m", "batchwright", "run", str(source), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            while len(endpoint.asked) < 8:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            for line in process.stderr:
                if "Ctrl-C ends at once" in line:
                    break
            process.send_signal(signal.SIGINT)
            told = process.stderr.read()
        finally:
            held.set()
    assert "\n8 requests were under way: what they answer is lost, and may be paid." in told
    assert " more for 8 requests whose cost is not known." in told


def test_two_endpoints_share_a_run_and_one_that_goes_away_is_not_missed(
    source: Path, tmp_path: Path, endpoint: Endpoint
) -> None:
    with serving() as other:
        other.faults = lambda prompt: 401 if len(other.asked) > 3 else None
        report = run(
            source, tmp_path / "out.jsonl", backend=endpoint.url, also=[(other.url, "key")], backend_concurrency=4
        )
        assert (report.succeeded, report.failed) == (40, 0)
        assert 4 <= len(other.asked) <= 3 + 4
        assert len(endpoint.asked) == 37
        assert [*report.pacing] == [f"1 {endpoint.url} far", f"2 {other.url} far"]


@pytest.mark.parametrize("model", [None, "far"])
@pytest.mark.parametrize("is_first", [False, True])
def test_an_endpoint_that_is_down_from_the_start_is_not_missed(
    is_first: bool, model: str | None, source: Path, tmp_path: Path, endpoint: Endpoint
) -> None:
    down = "http://127.0.0.1:1/v1"
    first, second = (down, endpoint.url) if is_first else (endpoint.url, down)
    report = run(source, tmp_path / "out.jsonl", backend=first, also=[(second, "key")], model=model)
    assert (report.succeeded, report.failed) == (40, 0)
    assert asked(endpoint) == Counter(NAMES)
    assert sum(figures.sent for figures in report.pacing.values()) == 40, "none counts as sent where nothing listens"


def test_endpoints_that_are_all_down_end_the_run(source: Path, tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"^http://127.0.0.1:1/v1 gave no answer.*nothing listens there"):
        run(source, tmp_path / "out.jsonl", backend="http://127.0.0.1:1/v1", also=[("http://127.0.0.1:2/v1", "key")])
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_limit_for_which_requests_wait_long_is_told_once(
    source: Path, tmp_path: Path, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.headers = {
        "x-ratelimit-limit-requests-day": "100",
        "x-ratelimit-remaining-requests-day": "0",
        "x-ratelimit-reset-requests-day": "24h",
    }
    seen: list[RunProgress] = []

    def progress(now: RunProgress) -> None:
        seen.append(now)
        if sum(figures.waiting and figures.next_in > 600 for each in seen for figures in each.pacing.values()) == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunInterrupted):
        run(source, tmp_path / "out.jsonl", backend=endpoint.url, backend_concurrency=1, progress=progress)
    (told,) = [record.getMessage() for record in caplog.records if "takes no request" in record.getMessage()]
    assert "in 14 min: the stated 100 requests/day are used up. The run waits" in told


def test_a_pause_of_hours_is_told_as_long_as_it_is_and_why(
    source: Path, tmp_path: Path, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.headers = {"retry-after": "25920"}
    endpoint.pause = None
    endpoint.faults = lambda prompt: 429

    def progress(now: RunProgress) -> None:
        if any(figures.waiting and figures.next_in > 600 for figures in now.pacing.values()):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunInterrupted):
        run(source, tmp_path / "out.jsonl", backend=endpoint.url, backend_concurrency=1, progress=progress)
    (told,) = [record.getMessage() for record in caplog.records if "takes no request" in record.getMessage()]
    assert "in 7.2 h: it has refused requests until then ('no p" in told
    assert "'); tried again every 10 min. The run waits" in told
