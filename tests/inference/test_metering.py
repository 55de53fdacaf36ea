"""What becomes of the money reserved for a try, by how the endpoint answered it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from batchwright.errors import BudgetExhausted, EndpointError, EndpointUnreachable
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.endpoint_retries import EndpointRetries
from batchwright.inference.inference import Call
from batchwright.inference.metering import FreeReservation, Meter, NoMeter, Reservation, metered_answer
from batchwright.request import SamplingParams, Traffic

from .running import in_real_time
from .scripted import CHAT, Reply, Request, Script, ScriptedServer, events, refusal

URL = "/v1/chat/completions"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def retries(attempts: int) -> dict[Traffic, EndpointRetries]:
    each = EndpointRetries(attempts, 0.001, 0.001)
    return {"online": each, "batch": each}


class Notes(Meter):
    """Notes what happens to each reservation, in the order in which they were made."""

    def __init__(self, refuses: bool = False) -> None:
        self.outcomes: list[str] = []
        self.bodies: list[Mapping[str, Any]] = []
        self.sizes: list[int] = []
        self.settled: list[Mapping[str, Any]] = []
        self.refuses = refuses

    async def reserve(
        self, call: Call, body: Mapping[str, Any], size: int, *, batch: bool = False, is_fetched: bool = False
    ) -> Reservation:
        if self.refuses:
            raise BudgetExhausted("nothing is left")
        self.bodies.append(body)
        self.sizes.append(size)
        self.outcomes.append("open")
        return _Note(self, len(self.outcomes) - 1)


class _Note(Reservation):
    def __init__(self, notes: Notes, index: int) -> None:
        self.notes, self.index = notes, index

    def _end(self, outcome: str) -> None:
        assert self.notes.outcomes[self.index] == "open"
        self.notes.outcomes[self.index] = outcome

    def settle(self, endpoint: str, answer: Mapping[str, Any]) -> None:
        assert endpoint == URL
        self.notes.settled.append(answer)
        self._end("settled")

    def release(self) -> None:
        self._end("released")

    def keep(self) -> None:
        self._end("kept")


@asynccontextmanager
async def metered(
    *script: Script, attempts: int = 1, meter: Notes | None = None, **options: Any
) -> AsyncIterator[tuple[ScriptedServer, EndpointInference, Notes]]:
    notes = meter or Notes()
    async with ScriptedServer(*script) as server:
        endpoint = EndpointInference(server.url, meter=notes, retries=retries(attempts), **options)
        try:
            yield server, endpoint, notes
        finally:
            await endpoint.close()


def call(**options: Any) -> Call:
    return Call(URL, {"model": "m", "messages": [], "priority": 1}, "req_1", "batch", **options)


@in_real_time
async def test_what_is_reserved_for_is_what_is_sent() -> None:
    async with metered(Reply()) as (server, endpoint, notes):
        answer = await endpoint.answer(call(defaults={"max_tokens": 7}))
        assert notes.bodies == [server.requests[0].body] == [{"model": "m", "messages": [], "max_tokens": 7}]
        assert notes.sizes == [int(server.requests[0].headers["content-length"])]
        assert notes.settled == [answer]
        await endpoint.answer(call(defaults=SamplingParams(max_tokens=9)))
        assert notes.bodies[-1]["max_tokens"] == 9
        assert notes.outcomes == ["settled", "settled"]


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        *(
            (refusal(status), "released")
            for status in (302, 400, 401, 403, 404, 408, 413, 422, 429, 500, 502, 503, 529)
        ),
        # A proxy had passed it on, and did not wait for the answer.
        (refusal(504), "kept"),
        (refusal(524), "kept"),
        (None, "kept"),
        (Reply(headers={"content-length": "9999"}, cut=True), "kept"),
        (Reply(content=b"<html>"), "kept"),
        (Reply(202), "kept"),
        (Reply(content=json.dumps({"usage": USAGE}).encode()), "settled"),  # no choices, but a price
    ],
)
@in_real_time
async def test_outcomes_of_a_try(script: Script, outcome: str) -> None:
    async with metered(script) as (_, endpoint, notes):
        with pytest.raises(EndpointError):
            await endpoint.answer(call())
        assert notes.outcomes == [outcome]


@in_real_time
async def test_each_try_has_a_reservation_of_its_own() -> None:
    async with metered(refusal(429), None, refusal(500), Reply(), attempts=4) as (server, endpoint, notes):
        await endpoint.answer(call())
        assert notes.outcomes == ["released", "kept", "released", "settled"]
        assert len(server.requests) == 4


@in_real_time
async def test_a_request_on_a_connection_that_was_closed_is_not_sent_again_unseen() -> None:
    async with metered(Reply(), None, Reply(), attempts=2) as (server, endpoint, notes):
        await endpoint.answer(call())
        await endpoint.answer(call())
        assert len(server.requests) == len(notes.outcomes) == 3
        assert notes.outcomes == ["settled", "kept", "settled"]


@in_real_time
async def test_what_was_never_sent_costs_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    notes = Notes()
    endpoint = EndpointInference(f"http://127.0.0.1:{port}/v1", meter=notes, retries=retries(1))
    with pytest.raises(EndpointUnreachable) as raised:
        await endpoint.answer(call())
    assert not raised.value.sent
    assert notes.outcomes == ["released"]
    await endpoint.close()


@in_real_time
async def test_a_caller_that_leaves_has_bought_the_answer() -> None:
    begun = asyncio.Event()

    async def never(request: Request) -> Reply:
        begun.set()
        await asyncio.sleep(60)
        return Reply()

    async with metered(never) as (_, endpoint, notes):
        asking = asyncio.create_task(endpoint.answer(call()))
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert notes.outcomes == ["kept"]


@in_real_time
async def test_an_answer_that_does_not_come_in_time_was_perhaps_computed() -> None:
    async def never(request: Request) -> Reply:
        await asyncio.sleep(60)
        return Reply()

    async with metered(never, timeout=0.05) as (_, endpoint, notes):
        with pytest.raises(EndpointUnreachable):
            await endpoint.answer(call())
        assert notes.outcomes == ["kept"]


@in_real_time
async def test_without_money_nothing_is_sent_or_tried_again() -> None:
    async with metered(meter=Notes(refuses=True), attempts=5) as (server, endpoint, _):
        with pytest.raises(BudgetExhausted):
            await endpoint.answer(call())
        with pytest.raises(BudgetExhausted):
            async for _ in endpoint.stream(call()):
                pass
        assert not server.requests
        assert endpoint.why_not_ready is None


@in_real_time
async def test_streams_cost_what_their_last_usage_says() -> None:
    chunks = [{"choices": [{}]}, {"choices": [], "usage": USAGE}]
    script = (events(*chunks), events(*chunks, done=False), events(*chunks, hang=True), refusal(429))
    async with metered(*script) as (_, endpoint, notes):
        assert [chunk async for chunk in endpoint.stream(call())] == chunks
        assert notes.settled == [chunks[-1]]
        with pytest.raises(EndpointUnreachable):
            async for _ in endpoint.stream(call()):
                pass
        async with aclosing(endpoint.stream(call())) as stream:  # type: ignore[type-var]
            await anext(stream)
        with pytest.raises(EndpointError):
            async for _ in endpoint.stream(call()):
                pass
        assert notes.outcomes == ["settled", "kept", "kept", "released"]


@in_real_time
async def test_where_nothing_is_counted() -> None:
    reservation = await NoMeter().reserve(call(), {}, 0)
    assert isinstance(reservation, FreeReservation)
    reservation.settle(URL, {})
    reservation.release()
    reservation.keep()

    async def send() -> dict[str, Any]:
        return CHAT

    assert await metered_answer(NoMeter(), call(), {}, 0, send) == CHAT
