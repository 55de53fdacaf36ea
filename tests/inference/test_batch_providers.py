"""The forms of batches at different providers: what is sent to each, and what is read from its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.inference.running import in_real_time
from tests.inference.scripted import Reply, Request, Script, ScriptedServer

from batchwright.errors import EndpointError, InputError
from batchwright.inference.batches import opening
from batchwright.inference.batches.anthropic_batches import Translation
from batchwright.inference.batches.journal import BatchEntry
from batchwright.inference.batches.json_values import time_of
from batchwright.inference.batches.kinds import KINDS, OTHERS, ProviderKind, kind_of
from batchwright.inference.batches.opening import open_provider
from batchwright.inference.batches.provider import BatchProvider, LineResult
from batchwright.inference.batches.submitter import concerns_all
from batchwright.submitting.enqueueing import is_enqueued_limit

ENTRY = BatchEntry(
    uuid="0a1b2c3d-0000-4000-8000-000000000000",
    stage="creating",
    endpoint="/v1/chat/completions",
    model="m",
    lines=2,
    size=10,
    file="file-1",
    attempted_at=1000.0,
)
BODY: Mapping[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "é"}]}


def kind(name: str) -> ProviderKind:
    return next(each for each in KINDS if each.name == name)


class Turned(Translation):
    """Bodies that can be told from those before."""

    def request(self, endpoint: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"turned": dict(body)}

    def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"turned": dict(body)}


class Answers(ScriptedServer):
    """Answers all requests by its script, also those without a body."""

    def __init__(self, *script: Script) -> None:
        super().__init__(*script)
        self.models = self._next

    async def _next(self, request: Request) -> Reply:
        self.requests.append(request)
        reply = self.script.popleft()
        assert isinstance(reply, Reply)
        return reply


@pytest.fixture(autouse=True)
def turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to Anthropic, and what comes, is marked instead of translated."""
    monkeypatch.setattr(opening, "_Messages", Turned)


def opened(server: Answers, name: str) -> BatchProvider:
    return open_provider(server.url, "key", kind=kind(name))


def says(value: object, status: int = 200) -> Reply:
    return Reply(status, json.dumps(value).encode())


def test_kinds_are_known_by_their_hosts() -> None:
    assert kind_of("https://api.openai.com/v1").name == "OpenAI"
    assert kind_of("https://mine.openai.azure.com/openai/v1").name == "Azure"
    assert kind_of("https://api.groq.com/openai/v1").name == "Groq"
    assert kind_of("https://api.anthropic.com/v1").form == "anthropic"
    assert kind_of("https://api.fireworks.ai/inference/v1").form == "fireworks"
    assert kind_of("http://127.0.0.1:8000/v1") is OTHERS
    assert kind_of("https://notapi.openai.com.example/v1") is OTHERS


def test_windows_are_those_of_the_provider() -> None:
    open_provider("https://api.doubleword.ai/v1", None, window="1h")
    open_provider("http://127.0.0.1:1/v1", None, window="90m")
    with pytest.raises(InputError, match="batch_window='1h': OpenAI takes 24h"):
        open_provider("https://api.openai.com/v1", None, window="1h")
    for window in ("24h", "36h", "7d"):
        open_provider("https://api.groq.com/openai/v1", None, window=window)
    with pytest.raises(InputError, match="batch_window='8d': Groq takes 24h to 7d"):
        open_provider("https://api.groq.com/openai/v1", None, window="8d")
    with pytest.raises(InputError, match="batch_window='1h': Fireworks takes 24h"):
        open_provider("https://api.fireworks.ai/inference/v1", None, window="1h")
    with pytest.raises(InputError, match="must be a duration"):
        open_provider("http://127.0.0.1:1/v1", None, window="0h")
    with pytest.raises(InputError, match="http"):
        open_provider("nowhere", None)


@in_real_time
async def test_lines_and_requests_differ() -> None:
    batch = {"id": "b", "status": "validating"}
    sent = {}
    for name in ("OpenAI", "Azure", "Together", "Mistral"):
        async with Answers(says(batch)) as server:
            provider = opened(server, name)
            line = json.loads(provider.line(provider.custom_id(ENTRY.uuid, "req_k_1"), ENTRY.endpoint, BODY))
            assert line.pop("custom_id") == "req_k_1"
            assert line.pop("body") == BODY
            assert (await provider.create(ENTRY, None)).id == "b"  # type: ignore[arg-type]
            sent[name] = (line, server.requests[0].path, server.requests[0].body)
            assert server.requests[0].headers["idempotency-key"] == ENTRY.uuid
            assert server.requests[0].headers["authorization"] == "bearer key"
            await provider.close()
    usual = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    metadata = {"metadata": {"batchwright": ENTRY.uuid}}
    post = {"method": "POST", "url": "/v1/chat/completions"}
    short = {"endpoint": "/chat/completions"}
    assert sent["OpenAI"] == (post, "/v1/batches", usual | metadata)
    assert sent["Azure"] == (post | {"url": "/chat/completions"}, "/v1/batches", usual | metadata | short)
    assert sent["Together"] == (post, "/v1/batches", usual)
    assert sent["Mistral"] == (
        {},
        "/v1/batch/jobs",
        {"input_files": ["file-1"], "endpoint": "/v1/chat/completions", "model": "m", "timeout_hours": 24} | metadata,
    )


@in_real_time
async def test_batches_are_read_in_each_form() -> None:
    mistral = {
        "id": "b",
        "status": "TIMEOUT_EXCEEDED",
        "input_files": ["i"],
        "output_file": "o",
        "error_file": None,
        "total_requests": 9,
        "succeeded_requests": 5,
        "failed_requests": 1,
        "metadata": {"batchwright": "u"},
        "created_at": 7,
    }
    together = {
        "job": {"id": "b", "status": "COMPLETED", "created_at": "2024-01-15T14:30:00Z", "output_file_id": "o"},
        "warning": "w",
    }
    failed = {"id": "b", "status": "failed", "errors": {"data": [{"code": "c", "message": "m", "line": 3}]}}
    for name, value in (("Mistral", mistral), ("Together", together), ("OpenAI", failed)):
        async with Answers(says(value)) as server:
            provider = opened(server, name)
            batch = await provider.show("b")
            if name == "Mistral":
                assert (batch.ending, batch.total, batch.done, batch.files) == ("expired", 9, 6, ("o",))
                assert (batch.mark, batch.input_file, server.requests[0].path) == ("u", "i", "/v1/batch/jobs/b")
            elif name == "Together":
                assert (batch.ending, batch.created_at, batch.files) == ("completed", 1705329000.0, ("o",))
            else:
                assert batch.ending == "failed"
                assert [(each.code, each.message, each.line) for each in batch.problems] == [("c", "m", 3)]
            await provider.close()


@in_real_time
async def test_a_batch_is_found_on_any_page_until_they_are_too_old() -> None:
    def page(*batches: dict[str, Any]) -> Reply:
        return says({"data": [{"status": "in_progress", "created_at": 2000} | batch for batch in batches]})

    others: list[dict[str, Any]] = [{"id": f"o{number}"} for number in range(100)]
    found = {"id": "mine", "metadata": {"batchwright": ENTRY.uuid}}
    async with Answers(page(*others), page(found)) as server:
        provider = opened(server, "OpenAI")
        batch = await provider.find(ENTRY, ())
        assert batch not in (None, "unclear")
        assert batch.id == "mine"  # type: ignore[union-attr]
        assert server.requests[1].path == "/v1/batches?limit=100&after=o99"
        await provider.close()
    old = [*others[:-1], {"id": "o", "created_at": -5000}]
    async with Answers(page(*old)) as server:
        provider = opened(server, "OpenAI")
        assert await provider.find(ENTRY, ()) is None
        assert len(server.requests) == 1
        await provider.close()
    async with Answers(page({"id": "mine", "input_file_id": "file-1"})) as server:
        provider = opened(server, "Together")
        batch = await provider.find(ENTRY, ())
        assert batch.id == "mine"  # type: ignore[union-attr]
        await provider.close()


@in_real_time
async def test_anthropic_has_its_key_in_a_header_of_its_own() -> None:
    batch = {"id": "b", "processing_status": "ended", "request_counts": {"succeeded": 3, "errored": 1, "expired": 2}}
    async with Answers(says(batch)) as server:
        provider = opened(server, "Anthropic")
        custom_id = provider.custom_id(ENTRY.uuid, "req_k_1")
        assert custom_id == "0a1b2c3d0000-req_k_1"
        assert provider.line_name(custom_id) == "req_k_1"
        assert json.loads(provider.line(custom_id, ENTRY.endpoint, BODY))["params"] == {"turned": BODY}
        seen = await provider.show("b")
        assert (seen.ending, seen.total, seen.succeeded, seen.failed) == ("expired", 6, 3, 1)
        headers = server.requests[0].headers
        assert (headers["x-api-key"], headers["anthropic-version"]) == ("key", "2023-06-01")
        assert "authorization" not in headers
        assert server.requests[0].path == "/v1/messages/batches/b"
        await provider.close()


@in_real_time
async def test_a_batch_of_anthropic_may_be_ours_until_its_results_are_there() -> None:
    def listed(**fields: object) -> Reply:
        batch = {"id": "b", "processing_status": "ended", "request_counts": {"succeeded": 1, "errored": 1}}
        return says({"data": [{**batch, "created_at": "1970-01-01T00:16:50Z", **fields}]})

    results = Reply(200, b'{"custom_id": "0a1b2c3d0000-req_k_1", "result": {"type": "canceled"}}\n')
    there = listed(results_url="https://api.anthropic.com/v1/messages/batches/b/results")
    async with Answers(listed(results_url=None), there, results) as server:
        provider = opened(server, "Anthropic")
        assert await provider.find(ENTRY, ()) == "unclear"
        found = await provider.find(ENTRY, ())
        assert found.id == "b"  # type: ignore[union-attr]
        await provider.close()
    # Nothing of it would be paid twice, or nothing is left of it.
    for other in (
        listed(results_url=None, request_counts={"canceled": 2}),
        listed(results_url=None, archived_at="1970-02-01T00:00:00Z"),
        listed(results_url="https://api.anthropic.com/results", archived_at="1970-02-01T00:00:00Z"),
    ):
        async with Answers(other) as server:
            provider = opened(server, "Anthropic")
            assert await provider.find(ENTRY, ()) is None
            assert len(server.requests) == 1
            await provider.close()


@in_real_time
async def test_a_request_is_never_sent_twice() -> None:
    async with Answers(None, None) as server:
        provider = opened(server, "OpenAI")
        with pytest.raises(EndpointError, match="gave no answer"):
            await provider.create(ENTRY, None)  # type: ignore[arg-type]
        assert len(server.requests) == 1
        await provider.close()


OPENAI_LINES: list[tuple[object, LineResult | None]] = [
    ({"custom_id": "a", "response": {"status_code": 200, "body": {"x": 1}}, "error": None}, LineResult("a", {"x": 1})),
    (
        {"custom_id": "a", "response": {"status_code": 429, "body": {"error": {"code": "busy"}}}, "error": None},
        LineResult("a", status=429, error={"code": "busy"}),
    ),
    ({"custom_id": "a", "response": None, "error": {"code": "batch_expired", "message": "m"}}, LineResult("a")),
    (
        {"custom_id": "a", "response": None, "error": {"code": "bad", "message": "m"}},
        LineResult("a", error={"code": "bad", "message": "m"}),
    ),
    ({"custom_id": "a", "response": {"body": {"x": 1}}}, LineResult("a", {"x": 1})),
    ({"custom_id": "a"}, LineResult("a")),
    (["a"], None),
    ({"custom_id": 5}, None),
]


@pytest.mark.parametrize(("line", "result"), OPENAI_LINES)
def test_results_in_the_form_of_openai(line: object, result: LineResult | None) -> None:
    provider = open_provider("http://127.0.0.1:1/v1", None)
    assert provider.result(json.dumps(line).encode()) == result
    assert provider.result(b"{half") is None


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"type": "succeeded", "message": {"x": 1}}, LineResult("a", {"turned": {"x": 1}})),
        (
            {"type": "errored", "error": {"type": "error", "error": {"type": "overloaded_error", "message": "m"}}},
            LineResult("a", status=529, error={"code": "overloaded_error", "message": "m"}),
        ),
        ({"type": "canceled"}, LineResult("a")),
        ({"type": "expired"}, LineResult("a")),
    ],
)
def test_results_in_the_form_of_anthropic(result: dict[str, Any], expected: LineResult) -> None:
    provider = open_provider("http://127.0.0.1:1/v1", None, kind=kind("Anthropic"))
    assert provider.result(json.dumps({"custom_id": "a", "result": result}).encode()) == expected


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1_700_000_000, 1.7e9),
        ("2023-11-14T22:13:20Z", 1.7e9),
        ("2023-11-14T22:13:20.5", 1.7e9 + 0.5),
        ("2023-11-15T07:13:20+09:00", 1.7e9),
        ("soon", None),
        (None, None),
    ],
)
def test_times_are_those_of_utc(value: object, seconds: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert time_of(value) == seconds
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("error", "does"),
    [
        (EndpointError("x", status=401), True),
        (EndpointError("x", status=402), True),
        (EndpointError("x", status=429, body={"code": "insufficient_quota"}), True),
        (EndpointError("x", status=400, body={"message": "Your credit balance is too low."}), True),
        (EndpointError("x", status=429), False),
        (EndpointError("x", status=400), False),
        (EndpointError("x"), False),
    ],
)
def test_an_error_that_concerns_all(error: EndpointError, does: bool) -> None:
    assert concerns_all(error) == does


NAMES = ("response", "error", "status_code", "body", "result", "message", "type", "code", "choices", "usage", "content")
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-5, 600), st.sampled_from(["succeeded", "errored", "message"]))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)),
    max_leaves=12,
)
PROVIDERS = [open_provider(f"https://{host}/v1", None) for host in ("host", "api.anthropic.com", "api.fireworks.ai")]


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_whatever_a_line_of_results_says_it_is_read_and_an_error_is_judged(line: dict[str, Any]) -> None:
    for each in PROVIDERS:
        found = each.result(json.dumps({**line, "custom_id": "a-1"}).encode())
        assert found is not None
        assert (found.custom_id, found.answer and found.error) == ("a-1", None)
    error = EndpointError("x", status=400, body={**line})
    assert not concerns_all(error)
    assert not is_enqueued_limit(line.get("code"), line.get("message"))


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b'{"custom_id": 5}', b"\xff", b'{"custom_id": "a"', pytest.param(b"[" * 100_000, id="deep")],
)
def test_what_is_no_line_of_results_is_passed_over(line: bytes) -> None:
    assert open_provider("https://host/v1", None).result(line) is None
