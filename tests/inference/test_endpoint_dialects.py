"""Calls to an endpoint elsewhere that speaks Anthropic's dialect, and calls of `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from batchwright.errors import EndpointError, InvalidRequest
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.endpoint_keys import EndpointKey
from batchwright.inference.endpoint_retries import EndpointRetries
from batchwright.inference.inference import Call
from batchwright.inference.routing import RoutedInference
from batchwright.request import Traffic
from batchwright.wire.dialects import ANTHROPIC
from batchwright.wire.error_bodies import error_body

from .running import in_real_time
from .scripted import Reply, Script, ScriptedServer, events

KEY = "sk-ant-secret"
CALL = Call(
    "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}, "r"
)
START = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": []}
USAGE = {"input_tokens": 2, "output_tokens": 4}
ONE_QUICK_RETRY: dict[Traffic, EndpointRetries] = {
    "online": EndpointRetries(2, 0.001, 0.001),
    "batch": EndpointRetries(2, 0.001, 0.001),
}


def said(text: str) -> Reply:
    message = START | {"content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "usage": USAGE}
    return Reply(content=json.dumps(message).encode())


def failed(status: int, kind: str, message: str) -> Reply:
    return Reply(status, json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode())


def spoken(*events_between: dict[str, Any], end: bool = True) -> Reply:
    last = [
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]
    start = {"type": "message_start", "message": START | {"usage": {"input_tokens": 2, "output_tokens": 1}}}
    return events(start, {"type": "ping"}, *events_between, *(last if end else []), done=False)


def part(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


@asynccontextmanager
async def connected(*script: Script, **options: Any) -> AsyncIterator[tuple[ScriptedServer, EndpointInference]]:
    async with ScriptedServer(*script) as server:
        key = EndpointKey(KEY, "MINE")
        endpoint = EndpointInference(
            server.url, key, {"m": "claude"}, dialect=ANTHROPIC, retries=ONE_QUICK_RETRY, **options
        )
        try:
            yield server, endpoint
        finally:
            await endpoint.close()


@in_real_time
async def test_an_answer_comes_back_in_openais_form() -> None:
    async with connected(said("Hello")) as (server, endpoint):
        answer = await endpoint.answer(CALL)
        assert answer["model"] == "m"
        assert answer["choices"][0]["message"]["content"] == "Hello"
        assert answer["usage"]["total_tokens"] == 6
        (request,) = server.requests
        assert (request.path, request.body["model"]) == ("/v1/messages", "claude")
        assert (request.headers["x-api-key"], request.headers["anthropic-version"]) == (KEY, "2023-06-01")
        assert "authorization" not in request.headers


@in_real_time
async def test_a_stream_comes_back_in_chunks() -> None:
    async with connected(spoken(part("Hel"), part("lo"))) as (server, endpoint):
        chunks = [chunk async for chunk in endpoint.stream(CALL)]
        assert server.requests[0].body["stream"] is True
    texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == "Hello"
    assert {chunk["model"] for chunk in chunks} == {"m"}
    assert chunks[-1]["usage"]["total_tokens"] == 6


@in_real_time
async def test_an_error_in_a_stream_has_the_status_of_its_type() -> None:
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    async with connected(spoken(part("Hel"), overloaded, end=False)) as (_, endpoint):
        with pytest.raises(EndpointError, match="broke its stream off: Overloaded") as caught:
            [chunk async for chunk in endpoint.stream(CALL)]
        assert (caught.value.status, caught.value.may_pass) == (529, True)
    async with connected(events(overloaded, done=False), spoken(part("Hello"))) as (server, endpoint):
        assert [chunk async for chunk in endpoint.stream(CALL)]
        assert len(server.requests) == 2


@in_real_time
async def test_a_stream_without_its_end_is_told() -> None:
    async with connected(spoken(part("Hel"), end=False)) as (_, endpoint):
        with pytest.raises(EndpointError, match="ended its stream before it was done"):
            [chunk async for chunk in endpoint.stream(CALL)]


@in_real_time
async def test_errors_are_told_in_openais_form() -> None:
    async with connected(failed(400, "invalid_request_error", "max_tokens: too large")) as (_, endpoint):
        with pytest.raises(EndpointError) as caught:
            await endpoint.answer(CALL)
        assert error_body(caught.value)["error"] == {
            "message": "max_tokens: too large",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_request_error",
        }
    async with connected(failed(529, "overloaded_error", "x"), said("Hello")) as (server, endpoint):
        assert await endpoint.answer(CALL)
        assert len(server.requests) == 2
    async with connected(failed(401, "authentication_error", f"bad {KEY}")) as (_, endpoint):
        with pytest.raises(EndpointError, match="it does not accept the API key from MINE") as caught:
            await endpoint.answer(CALL)
        assert KEY not in str(caught.value)


@in_real_time
async def test_what_cannot_be_said_is_not_sent() -> None:
    async with connected() as (server, endpoint):
        for call, told in (
            (replace(CALL, endpoint="/v1/embeddings"), "no counterpart in the dialect anthropic"),
            (replace(CALL, body={**CALL.body, "seed": 1}), "seed has no counterpart"),
            (replace(CALL, body={**CALL.body, "max_tokens": None}), "max_tokens is missing"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                await endpoint.answer(call)
        assert not server.requests


@in_real_time
async def test_the_models_are_those_of_its_list() -> None:
    listed = {"data": [{"type": "model", "id": "claude-a"}, {"type": "model", "id": "claude-b"}], "has_more": False}
    async with ScriptedServer() as server:
        server.models = Reply(content=json.dumps(listed).encode())
        endpoint = EndpointInference(server.url, KEY, dialect=ANTHROPIC)
        await endpoint.discover()
        assert endpoint.models == ("claude-a", "claude-b")
        await endpoint.close()


@in_real_time
async def test_responses_go_to_a_route_that_has_them() -> None:
    body = {"model": "m", "input": "Hi"}
    answer = {"id": "resp_1", "object": "response", "model": "theirs", "output": [], "usage": {"input_tokens": 1}}
    call = Call("/v1/responses", body, "r", defaults={"max_tokens": 5, "temperature": 0.0})
    async with ScriptedServer(Reply(content=json.dumps(answer).encode())) as server:
        routed = RoutedInference([EndpointInference(server.url, None, {"m": "theirs"})])
        assert await routed.answer(call) == answer | {"model": "m"}
        (request,) = server.requests
        assert request.path == "/v1/responses"
        assert request.body == {"model": "theirs", "input": "Hi", "max_output_tokens": 5, "temperature": 0.0}
        await routed.close()
    async with connected() as (_, endpoint):
        with pytest.raises(InvalidRequest, match="no model here serves"):
            await RoutedInference([endpoint]).answer(call)
