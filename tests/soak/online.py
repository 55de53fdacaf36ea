"""Online clients of all kinds, and watchers of the dashboard."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import httpx
from tests.crash.models import CHAT, COMPLETIONS, EMBEDDINGS, Model
from tests.soak.timeline import ANSWERED, BROKEN, ERROR_EVENT, REFUSED, TIMEOUT

ONLINE = "online "
"""Questions of online clients begin so."""
_TIMEOUT = 60.0
"""Seconds in which nothing comes."""
_THINKING = (0.1, 1.0)
_SILENCE = 20.0
"""Seconds in which a watcher hears nothing."""
_AGAIN = 0.5
"""Seconds after which a watcher connects again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One online request, or the end of a watcher's connection: `began` is then when it was last well."""

    kind: str
    began: float
    ended: float
    outcome: str
    """See `timeline`."""
    detail: str = ""
    """What the answer said, of one that is an error."""


class _Failed(Exception):
    """An answer that is an error."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class Online:
    """A client in a closed loop: it thinks, asks, looks at the answer, and begins anew. Asks as `key`."""

    def __init__(self, url: str, key: str, model: Model, seed: str, tell: Callable[[Asked], None]) -> None:
        self._http = _http(url, key)
        self._model = model
        self._random = random.Random(seed)
        self._tell = tell
        self._kinds: dict[str, Callable[[str], Awaitable[None]]] = {
            "stream": self._stream,
            "stream, hangs up": self._hang_up,
            "chat": lambda question: self._plain(CHAT, question),
            "completion": lambda question: self._plain(COMPLETIONS, question),
            "embedding": lambda question: self._plain(EMBEDDINGS, question),
        }

    async def run(self) -> None:
        """Until cancelled. Raises `AssertionError` for an answer that is wrong."""
        async with self._http:
            while True:
                await asyncio.sleep(self._random.uniform(*_THINKING))
                kind = self._random.choice(list(self._kinds))
                question = f"{ONLINE}{self._random.getrandbits(64):016x}"
                self._tell(await _asked(kind, self._kinds[kind](question)))

    async def _plain(self, endpoint: str, question: str) -> None:
        answer = await self._http.post(endpoint, json=self._model.body(endpoint, question))
        if answer.status_code != httpx.codes.OK:
            raise _Failed(str(answer.status_code), answer.text[:300])
        self._model.check(endpoint, question, answer.json())

    async def _stream(self, question: str) -> None:
        text, reason, usage = "", None, None
        async for event in self._events(question):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
        choice = {"message": {"content": text}, "finish_reason": reason}
        self._model.check(CHAT, question, {"choices": [choice], "usage": usage})

    async def _hang_up(self, question: str) -> None:
        async with aclosing(self._events(question)) as events:
            async for event in events:
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    return

    async def _events(self, question: str) -> AsyncGenerator[dict[str, Any]]:
        body = self._model.body(CHAT, question) | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", CHAT, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise _Failed(str(answer.status_code), (await answer.aread()).decode()[:300])
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line:
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise _Failed(ERROR_EVENT, line[:300])
                    yield event
        raise _Failed(BROKEN, "the stream ended without [DONE]")


class Watcher:
    """Has the dashboard open, and connects again when it is thrown out."""

    def __init__(self, url: str, key: str, tell: Callable[[Asked], None]) -> None:
        self._http = _http(url, key)
        self._tell = tell
        self._heard = 0.0
        """When the last event came, or it was connected to."""

    async def run(self) -> None:
        """Until cancelled. Raises `AssertionError` for events that go back in time."""
        async with self._http:
            while True:
                self._heard = time.monotonic()
                asked = await _asked("watcher", self._watch())
                # What ends a stream that was well for an hour happened after its last event.
                self._tell(replace(asked, began=self._heard))
                await asyncio.sleep(_AGAIN)

    async def _watch(self) -> None:
        """Until the stream ends, as it does when the service stops."""
        last = 0.0
        timeout = httpx.Timeout(_TIMEOUT, read=_SILENCE)
        async with self._http.stream("GET", "/dashboard/events", timeout=timeout) as answer:
            if answer.status_code != httpx.codes.OK:
                raise _Failed(str(answer.status_code), (await answer.aread()).decode()[:300])
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    state = json.loads(line.removeprefix("data: "))
                    if "error" in state:
                        raise _Failed(ERROR_EVENT, line[:300])
                    assert state["at"] >= last, f"an event of {state['at']} after one of {last}"
                    last, self._heard = state["at"], time.monotonic()
        raise _Failed(BROKEN, "the service ended the stream")


def _http(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, headers={"authorization": f"Bearer {key}"})


async def _asked(kind: str, work: Awaitable[None]) -> Asked:
    began = time.monotonic()
    outcome, detail = ANSWERED, ""
    try:
        await work
    except _Failed as failed:
        outcome, detail = failed.outcome, str(failed)
    except httpx.ConnectError as error:
        outcome, detail = REFUSED, repr(error)
    except httpx.TimeoutException as error:
        outcome, detail = TIMEOUT, repr(error)
    except httpx.HTTPError as error:
        outcome, detail = BROKEN, repr(error)
    return Asked(kind, began, time.monotonic(), outcome, detail)
