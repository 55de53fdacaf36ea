"""The service on a real port, in this process: raw sockets, and a clock that moves only when told to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from tests.server.apps import share_routes
from tests.server.fakes import StubInference

from batchwright.clock import ManualClock
from batchwright.server.connections.protocol import Connection
from batchwright.server.process import Server, server_of
from batchwright.service.composition import Services, open_services
from batchwright.service.observability.figures import END_REASONS
from batchwright.service.settings import Settings, limits_of
from batchwright.service.worker.worker import WorkerOptions


@dataclass
class Client:
    """A connection, byte for byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, content: bytes) -> None:
        self.writer.write(content)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def error(self) -> tuple[int, str]:
        """Return status and code of the next answer, which must be an error that ends the connection."""
        status, headers, body = await self.answer()
        assert headers["x-request-id"]
        assert headers["connection"] == "close"
        assert await self.reader.read() == b""
        return status, json.loads(body)["error"]["code"]

    async def ended(self) -> bytes:
        """Return what still arrives until the service ends the connection."""
        received = b""
        try:
            while piece := await self.reader.read(65_536):
                received += piece
        except ConnectionResetError:
            pass
        return received


@dataclass
class Listening:
    """A service, its server, and clients of it."""

    services: Services
    server: Server
    stub: StubInference
    clock: ManualClock
    port: int
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        """Return a client whose connection the service has accepted."""
        before = self.services.connections.accepted
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        await self.until(lambda: self.services.connections.accepted > before)
        return client

    async def later(self, seconds: float) -> None:
        """Advance the clock, and have the service check its connections."""
        self.clock.advance(seconds)
        self.server.acceptor.sweep()
        await asyncio.sleep(0)

    def held(self) -> int:
        """Return the number of bytes in incomplete heads."""
        return sum(len(each.conn.trailing_data[0]) for each in self.connections)

    def blocked(self) -> bool:
        """Return whether some answer cannot be written further before its client reads."""
        return any(each.flow.write_paused for each in self.connections)

    def unsent(self) -> bool:
        """Return whether some answer is complete, but not read yet."""
        return any(
            each.transport is not None
            and each.transport.get_write_buffer_size() > 0
            and each.cycle is not None
            and each.cycle.response_complete
            for each in self.connections
        )

    def closing(self) -> bool:
        """Return whether some connection is closing, with an answer that was not read."""
        return any(each.transport is not None and each.transport.is_closing() for each in self.connections)

    @property
    def connections(self) -> list[Connection]:
        return [each for each in self.server.server_state.connections if isinstance(each, Connection)]

    async def much_later(self, reached: Callable[[], bool]) -> None:
        """Advance the clock until `reached`. How soon depends on the kernel, which may still move bytes."""
        while not reached():
            await self.later(60.0)
            await asyncio.sleep(0.001)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait without a limit of its own: the test as a whole has a timeout."""
        while not reached():  # noqa: ASYNC110 - what is waited for happens in the kernel
            await asyncio.sleep(0.001)


@asynccontextmanager
async def listening(folder: Path, **settings: Any) -> AsyncIterator[Listening]:
    """A service with a stub model, on a free port."""
    clock, stub = ManualClock(), StubInference()
    chosen = Settings(**{"data": folder, "drain_grace": 0.0, **settings})
    options = WorkerOptions(poll=0.01, limits=limits_of(chosen))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with open_services(chosen, inference=stub, options=options, clock=clock) as services:
            server = server_of(services, listener)
            assert isinstance(server.config.app, FastAPI)
            share_routes(server.config.app)
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup()
            service = Listening(services, server, stub, clock, listener.getsockname()[1])
            try:
                yield service
            finally:
                for client in service.clients:
                    client.writer.transport.abort()
                await server.shutdown([listener])
                assert set(services.connections.ended) <= set(END_REASONS)


def play(folder: Path, main: Callable[[Listening], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run `main` with a service of its own."""

    async def whole() -> None:
        async with asyncio.timeout(30), listening(folder, **settings) as service:
            await main(service)

    asyncio.run(whole())
