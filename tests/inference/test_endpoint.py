"""Calls to an endpoint elsewhere, over real connections to one that fails in every way."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from openai.types.chat import ChatCompletion

from batchwright.errors import (
    AnswerBroken,
    DeadlineExceeded,
    EndpointDown,
    EndpointError,
    EndpointUnreachable,
    EngineClosed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.endpoint_retries import RETRIES, EndpointRetries, pause_before_retry
from batchwright.inference.inference import Call
from batchwright.request import Traffic
from batchwright.wire.error_bodies import error_body, retry_after, status_of

from .running import in_real_time
from .scripted import CHAT, Reply, Request, Script, ScriptedServer, events, refusal

KEY = "sk-secret-key-123"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def call(
    traffic: Traffic = "online", *, endpoint: str = "/v1/chat/completions", timeout: float | None = None, **body: Any
) -> Call:
    return Call(endpoint, BODY | body, "req_1", traffic, timeout)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited between tries, which takes no time here."""
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr("stamina._core._smart_sleep", wait)
    return waited


class Longest(random.Random):
    """Draws the longest pauses."""

    def random(self) -> float:
        return 1.0


def inside(endpoint: EndpointInference) -> int:
    """Calls that are under way, at the gates of all models."""
    return sum(gate.inside for gate in endpoint._gates.values())


ONE_TRY: dict[Traffic, EndpointRetries] = {
    "online": EndpointRetries(1, 0.1, 0.1),
    "batch": EndpointRetries(1, 0.1, 0.1),
}


@asynccontextmanager
async def connected(
    *script: Script, key: str | None = None, models: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[tuple[ScriptedServer, EndpointInference]]:
    """A server that follows `script`, and what hands calls on to it."""
    async with ScriptedServer(*script) as server:
        endpoint = EndpointInference(server.url, key, models, **options)
        try:
            yield server, endpoint
        finally:
            await endpoint.close()


@in_real_time
async def test_a_call_is_handed_on_without_our_own_fields() -> None:
    async with connected(key=KEY, models={"m": "theirs"}) as (server, endpoint):
        answer = await endpoint.answer(call(priority=1, deadline_ms=5000, temperature=0.5))
        assert answer == CHAT | {"model": "m"}
        assert ChatCompletion.model_construct(**answer).model == "m"
        (request,) = server.requests
        assert request.path == "/v1/chat/completions"
        assert request.headers["authorization"] == f"bearer {KEY}"
        assert request.body == BODY | {"model": "theirs", "temperature": 0.5}
        assert endpoint.models == ("m",)
        with pytest.raises(ModelNotFound, match="choose from m"):
            await endpoint.answer(call(model="other"))
        with pytest.raises(InvalidRequest, match="deadline_ms"):
            await endpoint.answer(call(deadline_ms="soon"))
        with pytest.raises(InvalidRequest, match="form as JSON"):
            await endpoint.answer(call(user="\ud800"))
        await endpoint.close()
        with pytest.raises(EngineClosed):
            await endpoint.answer(call())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 129}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 1.0}, "n"),
        ({"best_of": 10**30}, "best_of"),
        ({"prompt": ["a"] * 17, "n": 128}, "prompt"),
    ],
)
@in_real_time
async def test_what_would_be_too_many_completions_is_not_handed_on(body: dict[str, Any], param: str) -> None:
    async with connected(key=KEY, models={"m": "theirs"}) as (server, endpoint):
        with pytest.raises(InvalidRequest) as caught:
            await endpoint.answer(call(**body))
        assert caught.value.param == param
        assert not server.requests


@in_real_time
async def test_without_names_any_is_handed_on_and_the_endpoint_is_asked() -> None:
    async with connected() as (server, endpoint):
        server.models = Reply(content=b'{"object": "list", "data": [{"id": "a"}, {"id": "b"}, {}, 5]}')
        assert (await endpoint.answer(call(model="anything")))["model"] == "theirs"
        assert server.requests[0].body["model"] == "anything"
        assert "authorization" not in server.requests[0].headers
        await endpoint.discover()
        assert endpoint.models == ("a", "b")
        await endpoint.answer(call(model=None))
        assert server.requests[-1].body["model"] == "a"
    async with connected() as (server, endpoint):
        server.models = Reply(content=b'{"data": []}')
        with pytest.raises(EndpointError, match="lists no models"):
            await endpoint.discover()


@in_real_time
async def test_what_passes_is_tried_again(pauses: list[float]) -> None:
    short = Reply(headers={"content-length": "9999"}, cut=True)
    script = [None, short, *(refusal(status) for status in (408, 409, 500, 502, 503, 504)), Reply()]

    async with connected(*script, draw=Longest()) as (server, endpoint):
        assert await endpoint.answer(call("batch")) == CHAT
        assert len(server.requests) == len(script)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


@in_real_time
async def test_pauses_are_drawn_from_nothing_to_the_longest(pauses: list[float]) -> None:
    async with connected(*[refusal(503)] * 4, draw=random.Random(5)) as (_, endpoint):
        await endpoint.answer(call("batch"))
    luck = random.Random(5)
    assert pauses == [longest * luck.random() for longest in (1.0, 2.0, 4.0, 8.0)]


@in_real_time
async def test_a_call_tells_that_it_waits_to_be_tried_again(pauses: list[float]) -> None:
    told: list[Exception | None] = []
    async with connected(refusal(503), refusal(503), models={"m": "theirs"}) as (_, endpoint):
        await endpoint.answer(replace(call("batch"), pauses=told.append))
    assert [None if error is None else getattr(error, "status", 0) for error in told] == [None, 503, None, 503, None]


@in_real_time
async def test_a_call_that_always_gets_500_does_not_hold_its_line_for_long(pauses: list[float]) -> None:
    async with connected(*[refusal(500)] * 9) as (server, endpoint):
        with pytest.raises(EndpointError):
            await endpoint.answer(call("batch"))
        assert len(server.requests) == 5


@in_real_time
async def test_online_somebody_waits_so_there_are_few_tries(pauses: list[float]) -> None:
    async with connected(*[refusal(500, "on fire")] * 9) as (server, endpoint):
        with pytest.raises(EndpointError, match="on fire") as caught:
            await endpoint.answer(call())
        assert caught.value.status == 500
        assert status_of(caught.value) == 502
        assert len(server.requests) == 3
    assert sum(pauses) < 2.0


@pytest.mark.parametrize(
    ("reply", "status", "says"),
    [
        (refusal(400, "too long", code="context_length_exceeded"), 400, "too long"),
        (refusal(404, "no such model"), 404, "no such model"),
        (refusal(422, "what?"), 422, "what?"),
        (refusal(429, "pay first", code="insufficient_quota"), 429, "pay first"),
        (Reply(401, b'{"error": {"message": "Incorrect API key provided: sk-s...123"}}'), 401, "accept the API key"),
        (Reply(400, b'{"detail": "bad thing"}'), 400, "bad thing"),
        (Reply(400, b'{"object": "error", "message": "old form"}'), 400, "old form"),
        (Reply(400, b'{"error": "plain"}'), 400, "plain"),
        (refusal(200, "not that", code="content_policy_violation"), 400, "not that"),
        (refusal(200, "pay first", code="insufficient_quota"), 429, "pay first"),
        (refusal(200, "Incorrect API key provided: sk-s...123", code="invalid_api_key"), 401, "accept the API key"),
        (Reply(200, b'{"error": {"message": "no such model", "code": 404}}'), 404, "no such model"),
        (Reply(400, b"<html>no</html>"), 400, "a web page ('no')"),
        (Reply(404, b""), 404, "answered 404"),
        (Reply(302, b"", {"location": "http://127.0.0.1:1/"}), 302, "answered 302"),
    ],
)
@in_real_time
async def test_what_does_not_pass_is_an_error_that_names_the_endpoint(
    reply: Reply, status: int | None, says: str, pauses: list[float]
) -> None:
    async with connected(reply, key=KEY) as (server, endpoint):
        with pytest.raises(EndpointError) as caught:
            await endpoint.answer(call("batch"))
        assert caught.value.status == status
        assert says in str(caught.value)
        assert server.url in str(caught.value)
        assert error_body(caught.value)["error"]["message"]
        assert len(server.requests) == 1
    assert not pauses


@pytest.mark.parametrize("code", ["503", "429", "server_error", "rate_limit_exceeded"])
@in_real_time
async def test_an_error_in_place_of_an_answer_that_may_pass_is_tried_again(code: str, pauses: list[float]) -> None:
    is_limit = code.startswith(("429", "rate"))
    times = 1 if is_limit else 3  # a limit is really waited for
    async with connected(*[refusal(200, "busy", code=code)] * times) as (server, endpoint):
        assert (await endpoint.answer(call("batch")))["choices"]
        assert len(server.requests) == times + 1
        assert sum(each.refused for each in endpoint.pacing().values()) == is_limit


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<html>login</html>", "something else than a JSON object"),
        (b'{"choices": [' * 2, "something else than a JSON object"),
        (b"\xff\xfe", "something else than a JSON object"),
        (b"[]", "something else than a JSON object"),
        (b"{}", "without choices"),
        (b'{"choices": 5}', "without choices"),
        (b'{"error": {"message": "something else"}}', "with an error: something else"),
    ],
)
@pytest.mark.parametrize("traffic", ["online", "batch"])
@in_real_time
async def test_an_answer_that_makes_no_sense_is_asked_for_a_few_times(
    traffic: Traffic, content: bytes, says: str, pauses: list[float]
) -> None:
    """Somebody waits for an answer online, so it is asked for less often."""
    tries = 3 if traffic == "online" else 5
    async with connected(*[Reply(200, content)] * tries) as (server, endpoint):
        with pytest.raises(AnswerBroken, match=says) as caught:
            await endpoint.answer(call(traffic))
        assert server.url in str(caught.value)
        assert error_body(caught.value)["error"]["message"]
        assert len(server.requests) == tries
    assert len(pauses) == tries - 1
    async with connected(*[Reply(200, content)] * 2) as (server, endpoint):
        assert await endpoint.answer(call(traffic)) == CHAT


@in_real_time
async def test_the_body_of_a_refusal_is_kept() -> None:
    async with connected(refusal(400, "too long", code="context_length_exceeded")) as (_, endpoint):
        with pytest.raises(EndpointError) as caught:
            await endpoint.answer(call())
        told = error_body(caught.value)["error"]
        assert told == {"message": "too long", "type": "t", "param": None, "code": "context_length_exceeded"}


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ({"retry_after": "7"}, 7.0),
        ({"retry_after": "0.5"}, 0.5),
        ({"retry_after_ms": "250", "retry_after": "9"}, 0.25),
        ({"retry_after": "100000"}, 100_000.0),
        ({"retry_after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"message": "Please try again in 1.5s."}, 1.5),
        ({"message": "Please try again in 1.5s.", "retry_after": "9"}, 9.0),
        ({"retry_after": "soon"}, None),
        ({"retry_after": "9" * 400}, None),
        ({"retry_after": "-5"}, None),
        ({}, None),
    ],
)
@in_real_time
async def test_a_refusal_names_its_pause(header: dict[str, str], seconds: float | None) -> None:
    async with connected(refusal(429, **header), retries=ONE_TRY) as (_, endpoint):
        with pytest.raises(EndpointError) as caught:
            await endpoint.answer(call("batch"))
    assert caught.value.retry_after == seconds


@pytest.mark.parametrize(
    ("header", "seconds"), [({"retry_after": "7"}, 7.0), ({"retry_after": "100000"}, 600.0), ({"retry_after": "-5"}, 0)]
)
@in_real_time
async def test_batch_lines_wait_as_long_as_they_are_told(
    header: dict[str, str], seconds: float, pauses: list[float]
) -> None:
    async with connected(refusal(503, **header)) as (_, endpoint):
        await endpoint.answer(call("batch"))
    (waited,) = pauses
    assert seconds <= waited <= max(seconds, 1.0)


@in_real_time
async def test_online_callers_are_told_of_a_long_wait_instead(pauses: list[float]) -> None:
    async with connected(refusal(429, "slow down", retry_after="30")) as (_, endpoint):
        with pytest.raises(EndpointError) as caught:
            await endpoint.answer(call())
        assert (status_of(caught.value), retry_after(caught.value)) == (429, 30)
    assert not pauses


def test_what_is_tried_again() -> None:
    online, batch, draw = RETRIES["online"], RETRIES["batch"], Longest()
    assert pause_before_retry(ValueError(), "batch", batch, [], draw) is None
    assert pause_before_retry(EndpointError("x"), "batch", batch, [], draw) is None
    assert pause_before_retry(EndpointError("x", status=400), "batch", batch, [], draw) is None
    assert pause_before_retry(EndpointError("x", status=503, retry_after=1), "online", online, [], draw) == 1
    assert pause_before_retry(EndpointError("x", status=503, retry_after=3), "online", online, [], draw) is None
    refused = EndpointError("x", status=429, retry_after=1)
    assert pause_before_retry(refused, "batch", batch, [], draw) is None, "the gate has let it wait already"


def test_pauses_do_not_grow_while_the_endpoint_answers_other_calls() -> None:
    failed, batch, draw = EndpointError("not now", status=503), RETRIES["batch"], Longest()
    for failures in range(5):
        assert pause_before_retry(failed, "batch", batch, [failed] * failures, draw, failing=0.1) == 1.0
    assert pause_before_retry(failed, "batch", batch, [failed] * 4, draw) == 16.0


@pytest.mark.parametrize(("failing", "tries"), [(1.0, 5), (0.6, 5), (0.25, 9), (0.4, 10), (0.01, 5), (0.0, 5)])
@pytest.mark.parametrize("error", [AnswerBroken("no JSON"), EndpointError("it failed", status=500)])
def test_a_call_is_not_blamed_for_failures_that_may_be_chance(error: EndpointError, failing: float, tries: int) -> None:
    batch, draw = RETRIES["batch"], Longest()
    assert pause_before_retry(error, "batch", batch, [error] * (tries - 2), draw, failing=failing) is not None
    assert pause_before_retry(error, "batch", batch, [error] * (tries - 1), draw, failing=failing) is None


@pytest.mark.parametrize("told", [0.0, 1.0, 90.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_line_outlasts_ten_minutes_of_failures_whatever_pause_is_named(told: float, seed: int) -> None:
    failed, batch, draw = EndpointError("not now", status=503, retry_after=told), RETRIES["batch"], random.Random(seed)
    waits = [pause_before_retry(failed, "batch", batch, [failed] * failures, draw) for failures in range(29)]
    pauses = [wait for wait in waits if wait is not None]
    assert len(pauses) == 29
    assert told <= min(pauses)
    assert max(pauses) <= max(60.0, told)
    assert sum(pauses) >= 8 * 60


@in_real_time
async def test_nobody_listens() -> None:
    async with ScriptedServer() as server:
        url = server.url
    endpoint = EndpointInference(url, retries=ONE_TRY)
    with pytest.raises(EndpointUnreachable, match="gave no answer") as caught:
        await endpoint.answer(call())
    assert caught.value.status is None
    assert url in str(caught.value), "for the log"
    told = error_body(caught.value)["error"]
    assert (status_of(caught.value), told["message"]) == (502, "the endpoint does not answer")
    await endpoint.close()


@in_real_time
async def test_a_403_tells_its_reason_to_the_owner_of_the_key_alone() -> None:
    async with connected(refusal(403, "your input was flagged"), key=KEY) as (_, endpoint):
        with pytest.raises(EndpointError, match="accept the API key; it says: your input was flagged") as caught:
            await endpoint.answer(call())
    assert caught.value.status == 403
    told = error_body(caught.value)["error"]
    assert told["message"] == "the endpoint does not accept the key of this service"
    assert "flagged" not in str(told)


@pytest.mark.parametrize("key", ["k", "EMPTY", "not-needed"])
@in_real_time
async def test_a_key_that_is_none_is_no_reason_to_change_an_answer(key: str, pauses: list[float]) -> None:
    answer = {**CHAT, "choices": [{"index": 0, "message": {"role": "assistant", "content": f"tokens: {key}"}}]}
    script = [Reply(content=json.dumps(answer).encode()), events(answer), refusal(400, f"not {key}!")]
    async with connected(*script, key=key) as (_, endpoint):
        assert await endpoint.answer(call()) == answer
        assert [chunk async for chunk in endpoint.stream(call())] == [answer]
        with pytest.raises(EndpointError) as caught:
            await endpoint.answer(call())
        assert error_body(caught.value)["error"]["message"] == "not [API key]!"


@in_real_time
async def test_the_key_is_never_told(caplog: pytest.LogCaptureFixture, pauses: list[float]) -> None:
    leaks = [
        refusal(400, f"you sent {KEY}"),
        Reply(400, f"<p>{KEY}</p>".encode()),
        *[Reply(200, f"no JSON: {KEY}".encode())] * 3,
        *[refusal(500, f"you sent {KEY}")] * 3,
        events({"error": {"message": KEY}}),
    ]

    caplog.set_level(logging.DEBUG)
    async with connected(*leaks, key=KEY) as (_, endpoint):
        for _ in range(4):
            with pytest.raises(EndpointError) as caught:
                await endpoint.answer(call())
            assert KEY not in str(caught.value) + repr(caught.value) + str(error_body(caught.value))
        with pytest.raises(EndpointError) as caught:
            _ = [chunk async for chunk in endpoint.stream(call())]
        assert KEY not in str(caught.value) + str(error_body(caught.value))
        assert KEY not in repr(endpoint)
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "url", ["host/v1", "ftp://host/v1", "http://", "https://me:pass@host/v1", "https://host/v1?key=pass", "http://[::1"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="base_url") as caught:
        EndpointInference(url)
    assert "pass" not in str(caught.value).replace("password", "")


def chunk(text: str) -> dict[str, Any]:
    return {"id": "x", "model": "theirs", "choices": [{"index": 0, "delta": {"content": text}}]}


@in_real_time
async def test_streams_pass_through(pauses: list[float]) -> None:
    script = [None, refusal(503), events(chunk("a\u2028b"), chunk("c"))]
    async with connected(*script, models={"m": "theirs"}) as (server, endpoint):
        chunks = [chunk async for chunk in endpoint.stream(call(stream_options={"include_usage": True}))]
        assert chunks == [chunk("a\u2028b") | {"model": "m"}, chunk("c") | {"model": "m"}]
        assert server.requests[-1].body["stream"] is True
        assert server.requests[-1].body["stream_options"] == {"include_usage": True}
        assert endpoint._held.total() == inside(endpoint) == 0
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("reply", "chunks", "says"),
    [
        (refusal(400, "no"), 0, "no"),
        (events(chunk("a"), done=False), 1, "before it was done"),
        (events(chunk("a"), done=False, cut=True), 1, "broke off in the middle"),
        (events(chunk("a"), {"error": {"message": "broke"}}), 1, "broke its stream off: broke"),
        (events(chunk("a"), 5), 1, "something else"),
        (events(), 0, "without a chunk"),
        (Reply(headers={"content-type": "application/json"}), 0, "answered at once, though a stream was asked for"),
        (
            Reply(200, b'{"error": {"message": "no", "code": 404}}', {"content-type": "application/json"}),
            0,
            "an error: no",
        ),
    ],
)
@in_real_time
async def test_streams_that_break(reply: Reply, chunks: int, says: str) -> None:
    async with connected(reply) as (_, endpoint):
        stream = endpoint.stream(call())
        for _ in range(chunks):
            assert await anext(stream) == chunk("a")
        with pytest.raises(EndpointError, match=says):
            await anext(stream)
        assert inside(endpoint) == 0


@in_real_time
async def test_leaving_a_stream_ends_it_at_the_endpoint_too() -> None:
    async with connected(events(chunk("a"), done=False, hang=True)) as (server, endpoint):
        async with aclosing(cast("Any", endpoint.stream(call()))) as chunks:
            assert await anext(chunks) == chunk("a")
            assert inside(endpoint) == 1
        assert inside(endpoint) == 0
        await server.gone.wait()


@in_real_time
async def test_a_deadline_ends_a_call_and_its_connection() -> None:
    async def hang(_: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    async with connected(hang) as (_, endpoint):
        with pytest.raises(DeadlineExceeded, match="before the endpoint answered"):
            await endpoint.answer(call("batch", timeout=0.05))
        with pytest.raises(DeadlineExceeded, match="before it was begun"):
            await endpoint.answer(call("batch", timeout=0.0))
        assert endpoint._held.total() == inside(endpoint) == 0
    async with connected(events(chunk("a"), done=False, hang=True)) as (_, endpoint):
        with pytest.raises(DeadlineExceeded):
            _ = [each async for each in endpoint.stream(call(deadline_ms=50))]
        assert endpoint._held.total() == inside(endpoint) == 0


@in_real_time
async def test_so_many_at_once_and_online_ones_first() -> None:
    opened = asyncio.Event()
    reached = asyncio.Event()
    order: list[Any] = []

    async def wait(request: Request) -> Reply:
        order.append(request.body["user"])
        reached.set()
        await opened.wait()
        return Reply()

    async with connected(*[wait] * 9, max_concurrency=1, max_waiting=5) as (server, endpoint):
        assert endpoint.wants == 1
        tasks = [asyncio.ensure_future(endpoint.answer(call("batch", user=f"b{index}"))) for index in range(3)]
        await reached.wait()
        tasks += [asyncio.ensure_future(endpoint.answer(call(user=f"o{index}"))) for index in range(5)]
        await asyncio.sleep(0)
        assert (endpoint.wants, endpoint.room) == (0, -3), "online calls are no debt of other models"
        with pytest.raises(Overloaded):
            await endpoint.answer(call(user="o5"))
        tasks[2].cancel()
        opened.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["b0", "o0", "o1", "o2", "o3", "o4", "b1"]
        assert server.peak == 1
        assert endpoint.wants > 0


@in_real_time
async def test_an_overloaded_endpoint_gets_fewer_at_once(pauses: list[float]) -> None:
    async with connected(*[refusal(503)] * 8, max_concurrency=8) as (server, endpoint):
        tasks = [asyncio.ensure_future(endpoint.answer(call())) for _ in range(8)]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert server.peak <= 8
        assert endpoint.pacing()["m"].concurrency < 8


@in_real_time
async def test_a_request_on_a_connection_that_was_closed_meanwhile_goes_out_again(pauses: list[float]) -> None:
    """A server that closes a connection after its first request is no failure, whatever the request was."""

    # The second request meets a connection that the server gives up without an answer.
    async with connected(Reply(), None, Reply(), max_concurrency=1) as (server, endpoint):
        for _ in range(2):
            assert await endpoint.answer(call()) == CHAT
        assert (len(server.requests), server.connections) == (3, 2)
        assert server.probes == 0
    # On a new connection it is one.
    async with connected(None) as (server, endpoint):
        await endpoint.answer(call())
        assert len(server.requests) == 2
    assert len(pauses) == 1


@in_real_time
async def test_an_endpoint_that_goes_away_is_noticed_and_so_is_its_return(pauses: list[float]) -> None:
    async with connected(retries=ONE_TRY) as (server, endpoint):
        await endpoint.discover()
        assert (endpoint.models, endpoint.why_not_ready) == (("theirs",), None)
        port = server.hang_up()
        with pytest.raises(EndpointUnreachable):
            await endpoint.answer(call(model="theirs"))
        with pytest.raises(EndpointUnreachable):
            await endpoint._watch.look()
        assert (endpoint.why_not_ready, endpoint.wants) == ("the endpoint does not answer", 0)
        for traffic in ("online", "batch"):
            with pytest.raises(EndpointDown) as caught:
                await endpoint.answer(call(traffic, model="theirs"))
            assert status_of(caught.value) == 503
            assert retry_after(caught.value) is not None
        await server.listen(port)
        await endpoint._watch.look()
        assert (endpoint.why_not_ready, endpoint.wants) == (None, 32)
        assert (await endpoint.answer(call(model="theirs")))["model"] == "theirs"
