"""`run --via batch` with Fireworks' jobs, which read a dataset, are known by an id of ours, and end when deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.inference.batch_provider import Fault, provider
from tests.inference.fireworks_provider import ACCOUNT, FireworksServer
from tests.inference.running import in_real_time
from tests.jobs.fakes import by_id, codes, text_of

from batchwright.backoff import Backoff
from batchwright.errors import RunFailed
from batchwright.inference.batches import opening, provider_batches
from batchwright.inference.batches.fireworks_batches import ACCOUNT_VARIABLE, control_plane
from batchwright.inference.batches.kinds import KINDS
from batchwright.inference.batches.opening import open_provider
from batchwright.inference.batches.provider import LineResult
from batchwright.inference.batches.times import BatchTimes
from batchwright.jobs.run import run
from batchwright.submitting.drafts import BatchLimits
from batchwright.submitting.looking import LookPauses
from batchwright.submitting.moving import Mover

KIND = replace(next(kind for kind in KINDS if kind.name == "Fireworks"), limits=BatchLimits(40))
QUICK = BatchTimes(
    patience=0.05,
    looks=LookPauses(0.01, 0.02, 0.02),
    retries=Backoff(0.01, 0.05),
    settles_in=0.3,
    mover=Mover(cancelling=0.5, shortest=0.5),
)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take any address for one of Fireworks, and have short times, which decide nothing but how long a test takes."""
    monkeypatch.setattr(opening, "kind_of", lambda url: KIND)
    monkeypatch.setattr(provider_batches, "BatchTimes", lambda: QUICK)
    monkeypatch.delenv(ACCOUNT_VARIABLE, raising=False)
    monkeypatch.setenv("BATCHWRIGHT_BACKEND_API_KEY", "fw-key")


@pytest.fixture
def server() -> Iterator[FireworksServer]:
    with provider(FireworksServer) as running:
        assert isinstance(running, FireworksServer)
        yield running


def source(folder: Path, *prompts: str, **body: Any) -> Path:
    path = folder / "in.jsonl"
    lines = [{"id": each, "messages": [{"role": "user", "content": each}], **body} for each in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def many(number: int) -> list[str]:
    return [f"p{index}" for index in range(number)]


def check(output: Path, prompts: list[str]) -> None:
    assert {name: text_of(line) for name, line in by_id(output).items()} == {each: each.upper() for each in prompts}


def test_lines_go_into_jobs(tmp_path: Path, server: FireworksServer) -> None:
    prompts, output = many(100), tmp_path / "out.jsonl"
    report = run(source(tmp_path, *prompts, max_tokens=7), output, backend=server.url, via="batch")
    check(output, prompts)
    assert sorted(len(batch.lines) for batch in server.batches.values()) == [20, 40, 40]
    assert set(server.paid.values()) == {1}
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["model"]) == (7, "m")
    assert report.batches is not None
    assert (report.batches["submitted"], report.batches["endings"]) == (3, {"completed": 3})
    assert {headers.get("authorization") for headers in server.headers} == {None, "Bearer fw-key"}
    # Asked for once, whatever the number of jobs.
    assert server.asked["list_accounts"] == 1


def test_what_it_does_not_compute_fails_by_name(tmp_path: Path, server: FireworksServer) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "prompt": "a"}\n')
    report = run(path, tmp_path / "out.jsonl", backend=server.url, via="batch")
    assert "Fireworks computes only /v1/chat/completions in batches" in report.failures[0].message
    assert not server.batches


def test_a_job_that_expires_gives_what_it_has(tmp_path: Path, server: FireworksServer) -> None:
    server.expires_at = 15
    prompts, output = [*many(30), "fail x"], tmp_path / "out.jsonl"
    report = run(source(tmp_path, *prompts), output, backend=server.url, via="batch")
    # What status a row in the file of errors has is not said.
    assert codes(report) == {"endpoint_error": 1}
    assert (report.succeeded, report.failures[0].message) == (30, "no fail x")
    assert set(server.paid.values()) == {1}
    assert len(server.batches) == 3


@pytest.mark.parametrize("fault", ["lost", "deaf", 500])
@pytest.mark.parametrize("step", ["dataset", "upload", "ready", "create", "retrieve", "results", "content"])
def test_a_request_whose_answer_is_lost_creates_no_second_job(
    tmp_path: Path, server: FireworksServer, step: str, fault: Fault
) -> None:
    server.faults = lambda asked, number: fault if asked == step and number == 1 else None
    run(source(tmp_path, *many(5)), tmp_path / "out.jsonl", backend=server.url, via="batch")
    check(tmp_path / "out.jsonl", many(5))
    assert len(server.batches) == 1
    assert set(server.paid.values()) == {1}


def test_results_without_an_address_yet_are_waited_for(tmp_path: Path, server: FireworksServer) -> None:
    server.unlisted = 2
    run(source(tmp_path, *many(5)), tmp_path / "out.jsonl", backend=server.url, via="batch")
    check(tmp_path / "out.jsonl", many(5))
    assert server.asked["results"] == 3
    assert set(server.paid.values()) == {1}


def test_a_job_that_is_refused_says_why(tmp_path: Path, server: FireworksServer) -> None:
    """No line is blamed: the one that the provider names is not the one."""
    server.refuses = lambda body: "bad" if body["messages"][-1]["content"] == "p3" else None
    report = run(source(tmp_path, *many(5)), tmp_path / "out.jsonl", backend=server.url, via="batch")
    assert report.failed == 5
    assert "Dataset has a syntax error" in report.failures[0].message
    assert len(server.batches) == 1


def test_what_a_job_would_finish_too_late_becomes_live_requests(
    tmp_path: Path, server: FireworksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is cancelled by deleting it, so what it had computed is computed again, and counts as paid twice."""
    monkeypatch.setattr(provider_batches, "_ASSUMED_SECONDS", 0.1)
    server.pace = 0
    prompts, output = many(60), tmp_path / "out.jsonl"
    report = run(source(tmp_path, *prompts), output, backend=server.url, via="auto", deadline="2s")
    check(output, prompts)
    assert report.batches is not None
    assert report.batches["moved"] == 60
    assert not server.batches
    assert set(server.paid.values()) == {1}


def test_what_a_deleted_job_may_have_cost_is_counted(
    tmp_path: Path, server: FireworksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_batches, "_ASSUMED_SECONDS", 0.1)
    server.pace = 1
    price = "input=200,output=1000,batch=0.5"
    path = source(tmp_path, *many(300), max_tokens=10)
    monkeypatch.setattr(opening, "kind_of", lambda url: replace(KIND, limits=BatchLimits(300)))
    report = run(path, tmp_path / "out.jsonl", backend=server.url, via="auto", deadline="2s", price=price)
    check(tmp_path / "out.jsonl", many(300))
    assert report.spending is not None
    assert report.spending.unknown_at_most is not None
    assert server.ledger <= Decimal(report.spending.cost_of_all_runs + report.spending.unknown_at_most)
    assert report.spending.unknown_requests == 300


def test_an_account_is_named_where_there_are_several(
    tmp_path: Path, server: FireworksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.accounts = [ACCOUNT, "other"]
    path, output = source(tmp_path, "a"), tmp_path / "out.jsonl"
    with pytest.raises(RunFailed, match=r"several accounts of Fireworks.*FIREWORKS_ACCOUNT_ID"):
        run(path, output, backend=server.url, via="batch")
    monkeypatch.setenv(ACCOUNT_VARIABLE, ACCOUNT)
    run(path, output, backend=server.url, via="batch")
    check(output, ["a"])


@in_real_time
async def test_jobs_are_listed_newest_first_and_deleted_once(server: FireworksServer) -> None:
    provider = open_provider(server.url, "key", kind=KIND)
    server.datasets["d"] = [{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "a"}]}}]
    for number in range(3):
        await provider._client.post(  # type: ignore[attr-defined]
            f"accounts/{ACCOUNT}/batchInferenceJobs",
            body={"model": "m", "inputDatasetId": f"accounts/{ACCOUNT}/datasets/d"},
            query={"batchInferenceJobId": f"batchwright-{number}"},
        )
        server.batches[f"batchwright-{number}"].created_at = 1000.0 * (number + 1)
    server.pace = 0
    listed = await provider.newest(2)
    assert [(batch.id, batch.mark, batch.created_at) for batch in listed] == [
        ("batchwright-2", "2", 3000.123456),
        ("batchwright-1", "1", 2000.123456),
    ]
    cancelled = await provider.cancel("batchwright-1")
    assert (cancelled.ending, cancelled.files) == ("cancelled", ())
    seen = await provider.look(["batchwright-0", "batchwright-1", "batchwright-2", "batchwright-9"])
    assert seen.keys() == {"batchwright-0", "batchwright-2"}
    server.pace = 10
    await provider.look(["batchwright-0"])
    done = await provider.cancel("batchwright-0")
    assert (done.ending, done.files) == ("completed", ("out-batchwright-0",))
    assert server.asked["cancel"] == 1
    await provider.close()


@pytest.mark.parametrize(
    ("row", "result"),
    [
        ({"custom_id": "a", "response": {"choices": [], "usage": {}}}, LineResult("a", {"choices": [], "usage": {}})),
        (
            {"custom_id": "a", "response": {"status_code": 200, "body": {"choices": []}}},
            LineResult("a", {"choices": []}),
        ),
        ({"custom_id": "a", "error": "bad"}, LineResult("a", error={"message": "bad"})),
        (
            {"custom_id": "a", "response": {"error": {"message": "m", "code": 429}}},
            LineResult("a", status=429, error={"message": "m", "code": 429}),
        ),
        ({"custom_id": "a", "body": {}}, LineResult("a")),
        ({"response": {"choices": []}}, None),
    ],
)
def test_rows_of_results(row: dict[str, Any], result: LineResult | None) -> None:
    provider = open_provider("http://127.0.0.1:1/inference/v1", None, kind=KIND)
    assert provider.result(json.dumps(row).encode()) == result
    assert provider.result(b"half {") is None


def test_the_address_of_jobs_is_beside_that_of_requests() -> None:
    assert control_plane("https://api.fireworks.ai/inference/v1") == "https://api.fireworks.ai/v1"
    assert control_plane("https://api.fireworks.ai/inference/v1/") == "https://api.fireworks.ai/v1"
    assert control_plane("https://api.fireworks.ai/v1") == "https://api.fireworks.ai/v1"
