"""The end of a run whose first lines all fail for a reason of the job, such as a model that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.fakes import by_id, text_of
from tests.jobs.test_backend import Endpoint, lines, serving

from batchwright.errors import EndpointError, InvalidRequest, RunFailed
from batchwright.jobs.common_failure import CommonFailure
from batchwright.jobs.run import run

NAMES = [f"p{number}" for number in range(60)]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


@pytest.mark.parametrize("number", [1, 5, 60])
def test_a_wrong_model_ends_the_run_and_the_right_one_computes_all(
    number: int, tmp_path: Path, endpoint: Endpoint
) -> None:
    source, output = lines(tmp_path / "in.jsonl", *({"prompt": name} for name in NAMES[:number])), tmp_path / "o.jsonl"
    error = {"message": "The model `x` does not exist.", "code": "model_not_found"}
    endpoint.faults = lambda prompt: 404 if endpoint.asked[-1]["model"] == "x" else None
    endpoint.error = error
    with pytest.raises(RunFailed, match=r"does not exist\. Name a model that the endpoint has with --model") as ended:
        run(source, output, backend=endpoint.url, model="x", backend_concurrency=2)
    assert str(ended.value).startswith("the line fails" if number == 1 else f"the first {min(number, 20)} lines all")
    assert len(endpoint.asked) <= 22
    assert not output.read_bytes()
    report = run(source, output, backend=endpoint.url, model="far", backend_concurrency=2)
    assert (report.succeeded, report.failed, report.resumed) == (number, 0, 0)


def test_a_failure_is_that_of_the_line_once_another_one_ends_otherwise(tmp_path: Path, endpoint: Endpoint) -> None:
    source = lines(tmp_path / "in.jsonl", *({"prompt": name, "id": name} for name in NAMES[:4]))
    endpoint.faults = lambda prompt: 404 if prompt in NAMES[:3] else None
    endpoint.error = {"message": "The model `x` does not exist.", "code": "model_not_found"}
    report = run(source, tmp_path / "o.jsonl", backend=endpoint.url, model="x", backend_concurrency=1, dedupe=False)
    assert (report.succeeded, report.failed) == (1, 3)
    results = by_id(tmp_path / "o.jsonl")
    assert text_of(results["p3"]) == "P3"
    assert [results[name]["error"]["code"] for name in NAMES[:3]] == ["model_not_found"] * 3


def test_failures_that_fail_again_are_those_of_their_lines(tmp_path: Path, endpoint: Endpoint) -> None:
    source, output = lines(tmp_path / "in.jsonl", *({"prompt": name} for name in NAMES[:4])), tmp_path / "o.jsonl"
    endpoint.faults = lambda prompt: 404 if prompt in NAMES[:3] else None
    endpoint.error = {"message": "The model `x` does not exist.", "code": "model_not_found"}
    options: dict[str, Any] = {"backend": endpoint.url, "model": "x", "backend_concurrency": 1, "dedupe": False}
    assert run(source, output, **options).failed == 3
    report = run(source, output, retry_failed="all", **options)
    assert (report.succeeded, report.failed, report.resumed) == (1, 3, 1)
    assert len(endpoint.asked) == 4 + 3


def test_copies_of_a_line_that_is_held_back_wait_for_nothing(tmp_path: Path, endpoint: Endpoint) -> None:
    source = lines(tmp_path / "in.jsonl", *({"prompt": "p", "temperature": 0} for _ in range(5)))
    endpoint.faults = lambda prompt: 404
    endpoint.error = {"message": "The model `x` does not exist.", "code": "model_not_found"}
    with pytest.raises(RunFailed, match="the first 5 lines all fail"):
        run(source, tmp_path / "o.jsonl", backend=endpoint.url, model="x")


def test_a_limit_that_the_dialect_needs_is_asked_for_before_anything_is_sent(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    source = lines(tmp_path / "in.jsonl", *({"messages": [{"role": "user", "content": name}]} for name in NAMES))
    with pytest.raises(RunFailed, match=r"the first 20 lines all fail .*Give it for all lines with --max-tokens"):
        run(source, tmp_path / "o.jsonl", backend=endpoint.url, model="m", backend_dialect="anthropic")
    assert not endpoint.asked


def refused(status: int, **body: Any) -> EndpointError:
    return EndpointError("no", status=status, body={"message": "no", **body})


@pytest.mark.parametrize(
    ("body", "error", "remedy"),
    [
        ({}, refused(404, code="model_not_found"), "Name a model"),
        ({"model": "x"}, refused(404, code="model_not_found"), None),
        ({}, refused(400, param="max_tokens"), "Change --max-tokens, or leave it out"),
        ({"max_tokens": 5}, refused(400, param="max_tokens"), None),
        ({"max_tokens": 5}, refused(400, param="max_completion_tokens"), None),
        ({}, refused(422, param="top_p"), "Give it for all lines with --top-p"),
        ({}, refused(400, param="messages[0]"), None),
        ({}, refused(400, code="content_policy_violation"), None),
        ({}, refused(500, param="top_p"), None),
        ({}, InvalidRequest("no", param="top_p"), "Give it for all lines with --top-p"),
        ({}, InvalidRequest("no"), None),
        ({}, TimeoutError(), None),
    ],
)
def test_what_is_a_reason_of_the_job(body: dict[str, Any], error: Exception, remedy: str | None) -> None:
    common = CommonFailure({"max_tokens": 9})
    for number in range(20):
        assert not common.is_enough
        assert common.is_that_of({"prompt": f"{number}", **body}, error) == (remedy is not None)
    assert common.is_enough == (remedy is not None)
    if remedy is not None:
        assert remedy in str(common.error)


def test_failures_for_two_reasons_are_those_of_the_lines() -> None:
    common = CommonFailure({})
    assert common.is_that_of({}, refused(404, code="model_not_found"))
    assert not common.is_that_of({}, refused(400, param="top_p"))
    assert not common.is_that_of({}, refused(404, code="model_not_found"))
    common = CommonFailure({})
    common.end()
    assert not common.is_that_of({}, refused(404, code="model_not_found"))
