"""A real HTTP server on loopback that answers as it is told to."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeAlias

MODELS = {"object": "list", "data": [{"id": "theirs"}]}
CHAT = {
    "id": "x",
    "object": "chat.completion",
    "model": "theirs",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"total_tokens": 1},
}


@dataclass
class Request:
    """What the server got."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Reply:
    """What it answers, byte for byte; then the connection is closed with `cut`."""

    status: int = 200
    content: bytes = json.dumps(CHAT).encode()
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False

    def head(self) -> bytes:
        length = {} if "content-length" in self.headers else {"content-length": str(len(self.content))}
        lines = [f"HTTP/1.1 {self.status} X", *(f"{k}: {v}" for k, v in {**length, **self.headers}.items())]
        return "\r\n".join([*lines, "", ""]).encode()


Script: TypeAlias = Reply | Callable[[Request], Awaitable[Reply]] | None
"""None: the connection is closed without an answer."""


class ScriptedServer:
    """Answers the requests by `script`, one after the other, and after its end as if all were well.

    Who asks for its models is answered with `models`, and does not count as a request; nor does who asks for its
    metrics, and gets `metrics`.
    """

    def __init__(self, *script: Script, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.script = deque(script)
        self.models: Script = Reply(content=json.dumps(MODELS).encode())
        self.metrics = Reply(404, b"")
        self.asked_for_metrics = 0
        self.requests: list[Request] = []
        self.probes = 0
        self.connections = 0
        """Connections on which a request came."""
        self.inside = 0
        self.peak = 0
        """Most requests at once."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._used: set[asyncio.StreamWriter] = set()
        self._has_hung_up = False
        self.gone = asyncio.Event()
        """Set when a client has left before its answer was complete."""

    async def __aenter__(self) -> Self:
        await self.listen(0)
        self.url = (
            f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        )
        return self

    async def listen(self, port: int) -> None:
        """Take connections, at any port for 0."""
        self._has_hung_up = False
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self._tls)

    def hang_up(self) -> int:
        """Take no more connections, and end those that there are. Gives the port."""
        port: int = self._server.sockets[0].getsockname()[1]
        self._server.close()
        self._has_hung_up = True
        for writer in [*self._writers]:
            writer.close()
        return port

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            # A connection that was taken just before, and was not among the writers yet, ends here.
            while not self._has_hung_up and await self._answer(reader, writer):
                pass
        self._writers.discard(writer)
        self._used.discard(writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(head[0].split()[1], headers, json.loads(content or b"{}"))
        if request.path == "/metrics":
            self.asked_for_metrics += 1
            writer.write(self.metrics.head() + self.metrics.content)
            return True
        if request.path == "/props":
            writer.write(Reply(404, b"").head())
            return True
        script: Script
        if head[0].startswith("GET"):
            self.probes += 1
            script = self.models
        else:
            self.requests.append(request)
            self.connections += writer not in self._used
            self._used.add(writer)
            script = self.script.popleft() if self.script else Reply()
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        try:
            if script is None:
                return False
            reply = script if isinstance(script, Reply) else await self._unless_left(script(request), reader)
            writer.write(reply.head() + reply.content)
            await writer.drain()
            if reply.headers.get("x-then") == "hang":
                await self._left(reader)
            return not reply.cut
        finally:
            self.inside -= 1

    async def _unless_left(self, reply: Awaitable[Reply], reader: asyncio.StreamReader) -> Reply:
        """The reply, unless the client closes its connection first."""
        answering, leaving = asyncio.ensure_future(reply), asyncio.ensure_future(self._left(reader))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        await asyncio.wait({leaving})  # or the next request could not be read
        if answering.done():
            return answering.result()
        answering.cancel()
        raise ConnectionError

    async def _left(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            await reader.read(1)
        self.gone.set()


def events(*chunks: object, done: bool = True, cut: bool = False, hang: bool = False) -> Reply:
    """A stream of these chunks."""
    text = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in chunks)
    content = (": keep-alive\n\n" + text + ("data: [DONE]\n\n" if done else "")).encode()
    headers = {"content-type": "text/event-stream", "content-length": "9999" if cut or hang else str(len(content))}
    return Reply(content=content, headers=headers | ({"x-then": "hang"} if hang else {}), cut=cut)


def refusal(status: int, message: str = "no", *, code: str | None = None, **headers: str) -> Reply:
    """An error in OpenAI's form."""
    body = {"error": {"message": message, "type": "t", "param": None, "code": code}}
    return Reply(status, json.dumps(body).encode(), {name.replace("_", "-"): value for name, value in headers.items()})
