"""An application on a port of this machine, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import uvicorn


class Serving:
    """A server of the ASGI application that the async context manager `application()` returns."""

    def __init__(self, application: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._application = application
        self._port = 0
        self.url = ""
        self.loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Start the server; a second start takes the same port as the first."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._up = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._up.wait(30)
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """Stop the server at once, which breaks off streams."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as problem:
            self._problem = problem
        finally:
            self._listener.close()
            self._up.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with self._application() as app:
            config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=0)
            self._server = _Server(config, self._up)
            await self._server.serve(sockets=[self._listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, up: threading.Event) -> None:
        super().__init__(config)
        self._up = up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up.set()


@asynccontextmanager
async def as_it_is(app: Any) -> AsyncIterator[Any]:
    yield app
