"""`run --via batch` with prices and a budget: what is reserved, counted and reported is what the provider charges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.inference.batch_provider import PRICE, BatchServer, provider
from tests.jobs.fakes import by_id, codes
from tests.jobs.test_via_batch import QUICK, many, source

from batchwright.errors import BudgetExhausted, InputError
from batchwright.inference.batches import provider_batches
from batchwright.jobs.job_run import RunInterrupted, RunProgress
from batchwright.jobs.report import RunReport
from batchwright.jobs.run import run
from batchwright.jobs.spending import Spending

MOST = 9
"""Tokens that an answer may have."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_batches, "BatchTimes", lambda: QUICK)


@pytest.fixture
def server() -> Iterator[BatchServer]:
    with provider() as running:
        yield running


def paid(path: Path, server: BatchServer, **more: Any) -> RunReport:
    return run(path, path.parent / "out.jsonl", backend=server.url, via="batch", price=PRICE, **more)


def spending(report: RunReport) -> Spending:
    assert report.spending is not None
    return report.spending


def in_all(report: RunReport) -> Decimal:
    return Decimal(repr(spending(report).cost_of_all_runs)).quantize(Decimal("1e-9"))


def at_provider(progress: RunProgress) -> None:
    """Interrupt when lines have been computed at the provider."""
    if progress.waiting is not None and "at the provider" in progress.waiting and ": 0 of" not in progress.waiting:
        raise KeyboardInterrupt


def test_the_report_says_what_the_ledger_says(tmp_path: Path, server: BatchServer) -> None:
    server.expires_at, server.busy = 40, {"p3"}
    report = paid(source(tmp_path, *many(100), "fail x", max_tokens=MOST), server, budget=7, cost=True)
    assert (report.succeeded, report.failed) == (100, 1)
    assert in_all(report) == server.ledger == Decimal("0.11")
    assert spending(report).saved_by_batching == 0.11
    assert {
        line["response"]["body"]["usage"]["cost"] for line in by_id(tmp_path / "out.jsonl").values() if line["response"]
    } == {0.0011}


def test_an_interrupted_run_says_what_is_still_to_be_paid(tmp_path: Path, server: BatchServer) -> None:
    server.pace = 5
    path = source(tmp_path, *many(60), max_tokens=MOST)
    with pytest.raises(RunInterrupted) as interruption:
        paid(path, server, budget=5, progress=at_provider)
    left = spending(interruption.value.report)
    assert (left.cost, left.in_batches, left.unknown_requests) == (0.0, 60, 0)
    assert left.in_batches_at_most is not None
    assert Decimal(left.in_batches_at_most) >= server.ledger > 0
    report = paid(path, server, budget=5)
    assert in_all(report) == server.ledger
    assert (spending(report).in_batches, spending(report).in_batches_at_most) == (0, 0.0)


def test_a_result_whose_line_was_lost_is_counted_once(tmp_path: Path, server: BatchServer) -> None:
    """A kill may fall between the note of what an answer cost and its result line."""
    path, output = source(tmp_path, *many(60), max_tokens=MOST), tmp_path / "out.jsonl"

    def interrupt(progress: RunProgress) -> None:
        if progress.succeeded:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        paid(path, server, budget=5, progress=interrupt)
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:10]))
    assert (tmp_path / "out.jsonl.batches").is_dir()
    report = paid(path, server, budget=5, cost=True)
    assert report.succeeded == 60
    assert in_all(report) == server.ledger
    assert by_id(output)["p59"]["response"]["body"]["usage"]["cost"] == 0.0011


def test_a_line_that_is_given_up_in_its_batch_is_counted(tmp_path: Path, server: BatchServer) -> None:
    """The provider computes it nevertheless."""
    server.pace = 0
    path = source(tmp_path, "a", max_tokens=MOST, deadline_ms=200)
    with path.open("a") as file:
        file.write(json.dumps({"id": "b", "prompt": "b", "max_tokens": MOST}) + "\n")

    def go_on(progress: RunProgress) -> None:
        if progress.failed:
            server.pace = 10

    report = paid(path, server, budget=5, progress=go_on)
    assert codes(report) == {"request_timeout": 1}
    assert in_all(report) == server.ledger == Decimal("0.0022")


def test_what_nobody_will_fetch_counts_as_spent_at_most(tmp_path: Path, server: BatchServer) -> None:
    server.pace = 0
    path = source(tmp_path, "a", max_tokens=MOST, deadline_ms=200)
    report = paid(path, server, budget=5)
    assert (spending(report).unknown_requests, spending(report).in_batches) == (1, 0)
    # The same is said by a run that has nothing left to do.
    assert spending(paid(path, server, budget=5)).unknown_requests == 1


def test_a_batch_that_is_gone_may_have_cost_the_most(tmp_path: Path, server: BatchServer) -> None:
    server.faults = lambda step, number: 404 if step == "retrieve" else None
    report = paid(source(tmp_path, *many(5), max_tokens=MOST), server, budget=5)
    assert report.failed == 5
    assert spending(report).unknown_requests == 5


@pytest.mark.parametrize("is_first", [True, False])
def test_a_spent_budget_ends_a_run_when_its_batches_have_ended(
    tmp_path: Path, server: BatchServer, is_first: bool
) -> None:
    server.pace = 1
    path = source(tmp_path, *many(10), max_tokens=MOST)
    dear = json.dumps({"id": "dear", "prompt": "dear", "max_tokens": 10**5}) + "\n"
    path.write_text(dear + path.read_text() if is_first else path.read_text() + dear)
    for budget in ("0.7", "0.8"):
        with pytest.raises(BudgetExhausted, match="for 10 of 11 lines"):
            paid(path, server, budget=budget)
    report = paid(path, server, budget=80)
    assert (report.succeeded, in_all(report)) == (11, server.ledger)
    assert set(server.paid.values()) == {1}


def test_batches_that_the_budget_keeps_small_are_told_once(
    tmp_path: Path, server: BatchServer, caplog: pytest.LogCaptureFixture
) -> None:
    path = source(tmp_path, *many(30), max_tokens=MOST)
    report = paid(path, server, budget="0.4")
    assert report.succeeded == 30
    assert len(server.batches) > 1
    (told,) = [record.getMessage() for record in caplog.records if "batches" in record.getMessage()]
    most = max(len(batch.lines) for batch in server.batches.values())
    assert told.startswith(f"$0.40 left of the budget lets {most} lines into batches at a time: what a line may cost")
    assert "A larger --budget, or a lower --max-tokens" in told


def test_lines_in_batches_are_taken_up_though_there_is_no_money_for_those_before(
    tmp_path: Path, server: BatchServer
) -> None:
    server.pace = 1
    path = source(tmp_path, *many(10), max_tokens=MOST)
    prompts = path.read_text()
    with pytest.raises(RunInterrupted):
        paid(path, server, budget="0.62", progress=at_provider)
    journal = tmp_path / "out.jsonl.spend"
    # The first line lost its reservation, as one does that is refused and waits to be tried again, and a line that was
    # not in a batch got what it had.
    journal.write_text(journal.read_text().replace('_1","batch":true', '_11","batch":true'))
    path.write_text(prompts + json.dumps({"id": "more", "prompt": "more", "max_tokens": MOST}) + "\n")
    with pytest.raises(BudgetExhausted, match="for 10 of 11 lines"):
        paid(path, server, budget="0.62")
    assert paid(path, server, budget="0.62").succeeded == 11
    assert set(server.paid.values()) == {1}


def test_reservations_without_a_bound_survive_a_run(
    tmp_path: Path, server: BatchServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a budget nothing bounds what a line costs, in a later run either."""
    server.pace = 1
    path = source(tmp_path, *many(5))
    with pytest.raises(RunInterrupted) as interruption:
        paid(path, server, progress=at_provider)
    assert spending(interruption.value.report).in_batches_at_most is None
    report = paid(path, server)
    assert in_all(report) == server.ledger
    assert not caplog.records


def test_moved_lines_cost_what_requests_cost(
    tmp_path: Path, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_batches, "_ASSUMED_SECONDS", 0.1)
    server.pace = 1
    report = run(
        source(tmp_path, *many(300), max_tokens=MOST),
        tmp_path / "out.jsonl",
        backend=server.url,
        via="auto",
        deadline="3s",
        price=PRICE,
        budget=50,
    )
    assert report.batches is not None
    assert report.batches["moved"] > 0
    assert in_all(report) == server.ledger


def test_identical_lines_and_answers_of_responses(tmp_path: Path, server: BatchServer) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "m", "max_output_tokens": 4, "temperature": 0}
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/responses",
            "body": {**body, "input": f"x{number % 4}"},
        }
        for number in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = paid(path, server, budget=5, cost=True)
    assert (report.succeeded, report.deduplicated) == (12, 8)
    assert in_all(report) == server.ledger == Decimal("0.0044")
    assert sum(line["response"]["body"]["usage"]["cost"] for line in by_id(output).values()) == pytest.approx(0.0044)


def test_the_dialect_of_anthropic(tmp_path: Path, server: BatchServer) -> None:
    path = tmp_path / "in.jsonl"

    def chat(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    lines: list[dict[str, Any]] = [
        {"id": "good", "messages": chat("hi"), "max_tokens": 5},
        {"id": "unlimited", "messages": chat("hi")},
        {"id": "plain", "prompt": "hi", "max_tokens": 5},
        {"id": "seeded", "messages": chat("hi"), "max_tokens": 5, "seed": 3},
        {"id": "refused", "messages": chat("fail 1"), "max_tokens": 5},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = paid(path, server, budget=5, backend_dialect="anthropic", backend_api_key="a key", cost=True)
    assert codes(report) == {
        "missing_required_parameter": 1,
        "unsupported_url": 1,
        "unsupported_parameter": 1,
        "invalid_request_error": 1,
    }
    good = by_id(tmp_path / "out.jsonl")["good"]["response"]["body"]
    assert good["choices"][0]["message"]["content"] == "HI"
    assert good["usage"]["prompt_tokens_details"] == {"cached_tokens": 5, "cache_write_tokens": 7}
    assert in_all(report) == server.ledger == Decimal("0.002475")
    assert {(each.get("x-api-key"), each.get("authorization")) for each in server.headers} == {("a key", None)}


def test_several_endpoints_are_refused(tmp_path: Path, server: BatchServer) -> None:
    with pytest.raises(InputError, match=r"also='http.*' with via='batch': .* leave it out"):
        paid(source(tmp_path, "a", max_tokens=MOST), server, also=[(server.url, "other")])
    assert not server.asked
