"""A receiver of webhooks on loopback, on real sockets, that answers as it is told and remembers what came."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def answer(status: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Said", "content-length: 0", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


@dataclass(frozen=True)
class Received:
    """A request."""

    line: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Receiver:
    """`script` gives the answer to the n-th request, from 0; None: none ever comes."""

    script: Callable[[int], bytes | None] = lambda number: OK
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    came: asyncio.Event = field(default_factory=asyncio.Event)
    _held: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            first = await reader.readexactly(1)
            if first == b"\x16":
                return  # TLS where none is spoken
            head = (first + await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.received.append(Received(head[0], headers, body))
            said = self.script(len(self.received) - 1)
            self.came.set()
            if said is None:
                await self._held.wait()
            else:
                writer.write(said)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it went away, or spoke something else
        finally:
            writer.close()

    def let_go(self) -> None:
        """End the connections that got no answer."""
        self._held.set()


@asynccontextmanager
async def listening(
    script: Callable[[int], bytes | None] = lambda number: OK,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Receiver]:
    """A receiver that listens at `host`."""
    receiver = Receiver(script)
    server = await asyncio.start_server(receiver.serve, host, port, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        receiver.let_go()
        server.close()
