"""A burst of clients that hold what they can and ask for more than they should; bounded in number and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, cast

import httpx
from tests.crash.models import CHAT, Model

HOSTILE = "hostile"
"""Their question."""
_ADDRESS = "127.0.0.2"
"""Theirs: limits for each address must not fall on the other clients."""
_IDLE = 200
_HALF_SENT = 50
_UNREAD = 20
_BIG_BODIES = 8
_MANY_STOPS = 4
_MANY_CHOICES = 2
_MIB = 2**20
_FITTING = frozenset({200, 400, 408, 413, 422, 429, 431, 503})
"""Statuses that such a client may be answered with."""


class Burst:
    """All hostile clients at once; they have a valid key."""

    def __init__(self, port: int, key: str, model: Model) -> None:
        self._port = port
        self._head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        self._headers = {"authorization": f"Bearer {key}"}
        self._model = model
        self.wrong: list[str] = []
        """Answers that do not fit."""

    async def run(self, seconds: float) -> None:
        """Hold the connections and wait for the answers for so many seconds, then abort everything."""
        body = json.dumps(self._model.body(CHAT, HOSTILE) | {"stream": True}).encode()
        stream = f"POST {CHAT} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        first_words = [
            *[b""] * _IDLE,
            *[f"POST {CHAT} HTTP/1.1\r\n{self._head}X-".encode()] * _HALF_SENT,
            *[f"{stream}Content-Length: {len(body)}\r\n\r\n".encode() + body] * _UNREAD,
            *[f"GET /dashboard/events HTTP/1.1\r\n{self._head}\r\n".encode()] * _UNREAD,
        ]
        asking = [
            *(self._ask(self._big_body()) for _ in range(_BIG_BODIES)),
            *(self._ask({"stop": [f"stop {number}" for number in range(10_000)]}) for _ in range(_MANY_STOPS)),
            *(self._ask({"n": 128, "temperature": 1.0}) for _ in range(_MANY_CHOICES)),
        ]
        holding = [self._hold(words, seconds) for words in first_words]
        await asyncio.gather(*holding, *(_for_at_most(seconds, each) for each in asking))

    def _big_body(self) -> dict[str, Any]:
        last = self._model.body(CHAT, HOSTILE)["messages"]
        return {"messages": [{"role": "system", "content": "word " * (_MIB // 5)}, *last]}

    async def _ask(self, fields: dict[str, Any]) -> None:
        body = self._model.body(CHAT, HOSTILE) | fields
        transport = httpx.AsyncHTTPTransport(local_address=_ADDRESS)
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            try:
                url = f"http://127.0.0.1:{self._port}{CHAT}"
                answer = await client.post(url, json=body, headers=self._headers)
            except httpx.HTTPError:
                return
            if answer.status_code not in _FITTING:
                self.wrong.append(f"{list(fields)}: {answer.status_code} {answer.text[:300]}")

    async def _hold(self, first_words: bytes, seconds: float) -> None:
        """A connection on which nothing is read."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1024, local_addr=(_ADDRESS, 0))
        except OSError:
            return
        try:
            # What arrives is not taken from the socket, so that its buffers fill.
            cast(asyncio.Transport, writer.transport).pause_reading()
            writer.write(first_words)
            await asyncio.sleep(seconds)
        finally:
            writer.transport.abort()


async def _for_at_most(seconds: float, work: Awaitable[None]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
