"""The body middleware alone: how slowly a body may arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.clock import ManualClock
from batchwright.server.http.error_answers import HttpError
from batchwright.server.http.middleware import BodyMiddleware
from batchwright.service.settings import Settings
from batchwright.testing import play

_SCOPE: Scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/files", "headers": []}


async def _read_all(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def _body(pieces: int, size: int) -> Iterator[Message]:
    for number in range(pieces):
        yield {"type": "http.request", "body": b"x" * size, "more_body": number + 1 < pieces}


def _frame(app: ASGIApp, clock: ManualClock) -> BodyMiddleware:
    settings = Settings.model_validate({"upload_timeout": 60.0, "min_upload_rate": 1000})
    return BodyMiddleware(
        app, settings=settings, clock=clock, stopping=lambda: False, on_large_bodies_gone=lambda: None
    )


@pytest.mark.parametrize(
    ("pieces", "size", "seconds", "status"),
    [
        (3, 1, 29.0, 408),
        (2, 1, 29.0, 200),
        (1, 1, 61.0, 408),
        (200, 59_000, 59.0, 200),
        (200, 40_000, 59.0, 408),
        (70, 1000, 1.9, 408),
        (50, 1000, 1.9, 200),
    ],
)
def test_a_body_may_neither_stall_nor_drip(pieces: int, size: int, seconds: float, status: int) -> None:
    async def main(clock: ManualClock) -> list[Message]:
        messages, sent = _body(pieces, size), []

        async def receive() -> Message:
            await asyncio.sleep(seconds)
            return next(messages)

        async def send(message: Message) -> None:
            sent.append(message)

        await _frame(_read_all, clock)(dict(_SCOPE), receive, send)
        return sent

    sent = play(main)
    assert sent[0]["status"] == status
    if status == 408:
        assert json.loads(sent[1]["body"])["error"]["code"] == "upload_too_slow"


@pytest.mark.parametrize(
    ("headers", "version", "read"),
    [
        ([], "1.1", 0),  # the server of the connection reads on
        ([(b"connection", b"close")], "1.1", 5),
        ([], "1.0", 5),
        ([(b"connection", b"close"), (b"expect", b"100-continue")], "1.1", 0),
    ],
)
def test_a_refusal_reaches_a_client_that_sends_its_whole_body_first(
    headers: list[tuple[bytes, bytes]], version: str, read: int
) -> None:
    async def main(clock: ManualClock) -> None:
        messages, before = list(_body(5, 100_000)), len(list(_body(5, 1)))

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            raise HttpError(401, "no")

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                assert (message["status"], before - len(messages)) == (401, read)

        await _frame(refuse, clock)({**_SCOPE, "headers": headers, "http_version": version}, receive, send)

    play(main)


def test_the_rest_of_a_refused_body_is_not_waited_for_without_end() -> None:
    async def main(clock: ManualClock) -> None:
        sent: list[Message] = []

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            raise HttpError(401, "no")

        async def receive() -> Message:
            await asyncio.sleep(1.0)
            return {"type": "http.request", "body": b"x" * 2000, "more_body": True}

        async def send(message: Message) -> None:
            sent.append(message)

        await _frame(refuse, clock)({**_SCOPE, "headers": [(b"connection", b"close")]}, receive, send)
        assert (sent[0]["status"], clock.now()) == (401, 60.0)

    play(main)


def test_what_the_service_takes_to_read_is_not_the_clients_slowness() -> None:
    async def main(clock: ManualClock) -> int:
        messages, sent = _body(10, 10), []

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            more = True
            while more:
                more = (await receive()).get("more_body", False)
                clock.advance(100.0)
            await _read_all(scope, _nothing, send)

        async def receive() -> Message:
            return next(messages)

        async def send(message: Message) -> None:
            sent.append(message)

        await _frame(slow, clock)(dict(_SCOPE), receive, send)
        return int(sent[0]["status"])

    assert play(main) == 200


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
