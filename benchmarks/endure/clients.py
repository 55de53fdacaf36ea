"""Online clients in closed loops: each thinks, asks, reads the whole answer, and thinks again."""

from __future__ import annotations

import asyncio
import json
import math
import random
import ssl
import time
from dataclasses import dataclass
from typing import Literal

import httpx

from batchwright.models import DEFAULT_MODEL

CHAT = "/v1/chat/completions"
OUTPUT = (8, 24)
"""Tokens of an answer, at most."""
_WORDS = (8, 40)
"""Words of a prompt."""
_PATIENCE = 300.0
"""Seconds without any data after which a request has failed."""
_KEPT = 2.0
"""Seconds for which an idle connection is kept: less than any server does, so that both never close it at once."""

Kind = Literal["stream", "plain"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One request. Times are from `time.monotonic`."""

    kind: Kind
    began: float
    first: float
    """When the first text arrived; for a plain answer, its end."""
    ended: float
    error: str | None = None


class Crowd:
    """A number of clients, every other one of which reads streams."""

    def __init__(self, url: str, clients: int, seed: str) -> None:
        self.replies: list[Reply] = []
        self._url = url
        self._clients = clients
        self._seed = seed
        self._replied = asyncio.Event()

    async def run(self, thinking: float) -> None:
        """Until cancelled. `thinking`: mean seconds between an answer and the next request, drawn from an exponential
        distribution; the first pause too, so that they do not come all at once."""
        # One for all: making it takes a hundredth of a second.
        context = ssl.create_default_context()
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number, thinking, context))

    async def answered(self, count: int) -> None:
        """Wait for `count` replies."""
        while len(self.replies) < count:
            self._replied.clear()
            await self._replied.wait()

    async def _client(self, number: int, thinking: float, context: ssl.SSLContext) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        kind: Kind = "stream" if number % 2 else "plain"
        limits = httpx.Limits(max_connections=1, keepalive_expiry=_KEPT)
        async with httpx.AsyncClient(base_url=self._url, timeout=_PATIENCE, limits=limits, verify=context) as http:
            while True:
                if thinking:
                    await asyncio.sleep(draw.expovariate(1 / thinking))
                self.replies.append(await _ask(http, kind, draw))
                self._replied.set()


async def _ask(http: httpx.AsyncClient, kind: Kind, draw: random.Random) -> Reply:
    body = chat_body(draw)
    began, first, error = time.monotonic(), math.nan, None
    try:
        if kind == "plain":
            answer = await http.post(CHAT, json=body)
            error = _problem(answer.status_code, answer.text, complete=True)
        else:
            first, error = await _stream(http, body | {"stream": True})
    except httpx.HTTPError as problem:
        error = repr(problem)
    ended = time.monotonic()
    return Reply(kind, began, ended if math.isnan(first) else first, ended, error)


async def _stream(http: httpx.AsyncClient, body: dict[str, object]) -> tuple[float, str | None]:
    """Return when the first text arrived, and what was wrong."""
    first, done = math.nan, False
    async with http.stream("POST", CHAT, json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            return first, _problem(answer.status_code, (await answer.aread()).decode(errors="replace"), complete=True)
        async for line in answer.aiter_lines():
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return first, line[:300]
                if math.isnan(first) and any(choice["delta"].get("content") for choice in event["choices"]):
                    first = time.monotonic()
    return first, _problem(httpx.codes.OK, "", complete=done)


def _problem(status: int, text: str, *, complete: bool) -> str | None:
    if status != httpx.codes.OK:
        return f"{status} {text[:300]}"
    return None if complete else "the stream ended before it was done"


def chat_body(draw: random.Random) -> dict[str, object]:
    """A request for a few tokens, with its own prompt."""
    words = " ".join(f"{draw.getrandbits(20):05x}"[: draw.randint(2, 5)] for _ in range(draw.randint(*_WORDS)))
    return {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": draw.randint(*OUTPUT),
    }
