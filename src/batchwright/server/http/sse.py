"""Server-sent events, and answers that are cancelled when their client hangs up."""

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
"""Last event of a stream, as OpenAI clients expect it."""


def event(data: Any, name: str | None = None) -> bytes:
    """Return an event with `data` as JSON, which is ASCII and one line whatever texts it has."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`, or cancel it and raise `ClientDisconnect` as soon as the client hangs up.

    The body of the request must have been read before.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
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
    """Return `bodies` once the first has come, so that an earlier error is raised while a status can still state it."""

    async def first_body() -> _T:
        return await anext(bodies)

    try:
        first = await while_connected(request.receive, first_body())
    except StopAsyncIteration:
        return bodies
    except BaseException:
        await close(bodies)
        raise
    return _Chained(first, bodies)


class ByteStream(Response):
    """An answer that sends `chunks` as they come, and closes them at once when the client hangs up."""

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
        """Release what the chunks are made from."""
        await self._chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(ByteStream):
    """An answer that sends `bodies` as events and then `done`; an error in mid-stream becomes an event.

    `named`: whether events have names, which are the `type` of each body.
    """

    def __init__(self, bodies: AsyncIterator[Any], *, done: bytes = DONE, named: bool = False) -> None:
        super().__init__(_events(bodies, done, named=named), EVENT_HEADERS)
        self._bodies = bodies

    async def close(self) -> None:
        await super().close()
        # Closing a generator that has not started does not close what it iterates over.
        await close(self._bodies)


async def _events(bodies: AsyncIterator[Any], done: bytes, *, named: bool) -> AsyncGenerator[bytes]:
    try:
        async for body in bodies:
            yield event(body, body["type"] if named else None)
    except Exception as error:
        answer = as_http(error)
        log_failure(error, answer)
        yield event(answer.body)
    if done:
        yield done


class _Chained(AsyncIterator[_T]):
    """`first` followed by `rest`. Unlike a generator, it closes `rest` even if nothing was taken from it."""

    def __init__(self, first: _T, rest: AsyncIterator[_T]) -> None:
        self._first = [first]
        self._rest = rest

    async def __anext__(self) -> _T:
        return self._first.pop() if self._first else await anext(self._rest)

    async def aclose(self) -> None:
        await close(self._rest)
