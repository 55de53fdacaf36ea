"""The outermost layer alone: how slowly a body may come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.clock import ManualClock
from batchwright.server.body_limits import BodyLimits, ByteBudget
from batchwright.server.middleware import Bounds
from batchwright.testing import play

_SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": []}


async def _read_all(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def _body(pieces: int, size: int) -> Iterator[Message]:
    for number in range(pieces):
        yield {"type": "http.request", "body": b"x" * size, "more_body": number + 1 < pieces}


def _frame(app: ASGIApp, clock: ManualClock) -> Bounds:
    return Bounds(
        app,
        clock=clock,
        limits=BodyLimits({}),
        budget=ByteBudget(1),
        on_large_bodies_gone=lambda: None,
        upload_timeout=60.0,
        min_upload_rate=1000,
        stopping=lambda: False,
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
