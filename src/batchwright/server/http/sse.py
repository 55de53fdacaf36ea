"""Server-sent events, and answers that are given up when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchwright.inference.calls import close
from batchwright.server.http.error_answers import as_http, log_failure

_T = TypeVar("_T")

EVENT_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}

DONE = b"data: [DONE]\n\n"
"""The end of a stream, as OpenAI clients expect it."""


def event(data: Any) -> bytes:
    """An event with `data` as JSON. Whatever the texts in it, it is ASCII and one line."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled as soon as the client hangs up.

    The body of the request must have been read. Raises `ClientDisconnect` then, else what `work` raises.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def first_of(request: Request, bodies: AsyncIterator[_T]) -> AsyncIterator[_T]:
    """`bodies`, whose first one has come: what fails before it is raised here, where a status can still tell it."""
    try:
        first = await while_connected(request.receive, _next(bodies))
    except StopAsyncIteration:
        return bodies
    except BaseException:
        await close(bodies)
        raise
    return _Chained(first, bodies)


class ByteStream(Response):
    """Sends `chunks` as they come, and closes them at once when the client hangs up."""

    def __init__(self, chunks: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        if "content-length" not in headers:
            del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._send_all(send))
        except OSError as error:
            raise ClientDisconnect from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Let go of what the chunks are made of."""
        await self._chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(ByteStream):
    """Sends `bodies` as events and then `done`; an error in mid-stream is an event in the form of every error."""

    def __init__(self, bodies: AsyncIterator[Any], *, done: bytes = DONE) -> None:
        super().__init__(_events(bodies, done), EVENT_HEADERS)
        self._bodies = bodies

    async def close(self) -> None:
        await super().close()
        # Closing a generator that was never begun closes nothing in it.
        await close(self._bodies)


async def _events(bodies: AsyncIterator[Any], done: bytes) -> AsyncGenerator[bytes]:
    try:
        async for body in bodies:
            yield event(body)
    except Exception as error:
        answer = as_http(error)
        log_failure(error, answer)
        yield event(answer.body)
    if done:
        yield done


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(bodies: AsyncIterator[_T]) -> _T:
    return await anext(bodies)


class _Chained(AsyncIterator[_T]):
    """`first`, then `rest`, which is closed with it: also when nothing was taken, as no generator would."""

    def __init__(self, first: _T, rest: AsyncIterator[_T]) -> None:
        self._first = [first]
        self._rest = rest

    async def __anext__(self) -> _T:
        return self._first.pop() if self._first else await anext(self._rest)

    async def aclose(self) -> None:
        await close(self._rest)
