"""The service in this process: real store, worker and files, a stub model, HTTP without a network."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from structlog.testing import capture_logs
from structlog.typing import EventDict
from tests.server.apps import app_of
from tests.server.fakes import StubInference
from tests.server.served import Endpoint
from tests.stores import in_memory, lay_out

from batchwright.inference.inference import Inference
from batchwright.service.composition import Services, open_services
from batchwright.service.settings import Settings, limits_of
from batchwright.service.worker.worker import WorkerOptions
from batchwright.store import open_store

URL = "http://127.0.0.1:8000"
_POLL = 0.01


class Wall:
    """The time of day, which a test may move forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self._ahead

    def forward(self, seconds: float) -> None:
        self._ahead += seconds


@dataclass
class Service:
    """A running service, and ways to talk to it."""

    app: FastAPI
    services: Services
    stub: StubInference
    http: httpx2.AsyncClient
    client: openai.AsyncOpenAI
    wall: Wall

    def as_tenant(self, key: str | None) -> httpx2.AsyncClient:
        """Return a client with another key, or none."""
        return _http(self.app, {} if key is None else {"authorization": f"Bearer {key}"})

    async def key(self, tenant: str, name: str = "test", **more: Any) -> str:
        """Create a key; `more`: further arguments of `ApiKeys.create`."""
        return (await self.services.keys.create(name, tenant, **more))[1]

    async def until(self, reached: Callable[[], Awaitable[bool]]) -> None:
        """Wait without a limit of its own: the test as a whole has a timeout."""
        while not await reached():  # noqa: ASYNC110 - what is waited for happens in the store
            await asyncio.sleep(_POLL)

    async def ended(self, batch_id: str) -> openai.types.Batch:
        """Return the batch once it has a final status."""
        batch = await self.client.batches.retrieve(batch_id)
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(_POLL)
            batch = await self.client.batches.retrieve(batch_id)
        return batch


def _http(app: FastAPI, headers: dict[str, str] | None = None) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL, headers=headers or {}, timeout=30)


@asynccontextmanager
async def running(folder: Path, inference: Inference | None = None, **settings: Any) -> AsyncIterator[Service]:
    """Run a service on `folder`, with a worker that polls often. `inference` computes in place of the stub."""
    stub, wall = StubInference(), Wall()
    chosen = Settings(**{"data": folder, "drain_grace": 0.0, **settings})
    options = WorkerOptions(poll=_POLL, limits=limits_of(chosen))
    lay_out(folder / "batchwright.db")
    store = open_store(folder / "batchwright.db", now=wall)
    async with open_services(
        chosen, store=store, inference=inference or stub, options=options, unix_time=wall
    ) as services:
        app = app_of(services)
        async with _http(app) as http:
            client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", http_client=http, max_retries=0)
            yield Service(app, services, stub, http, client, wall)


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[EventDict]]:
    """Collect what the service logs instead of printing it."""
    with capture_logs() as events:
        yield events


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """A function that runs a coroutine function with a service of its own; its keyword arguments are settings."""

    def run(main: Callable[[Service], Coroutine[Any, Any, None]], **settings: Any) -> None:
        folder = tmp_path / "data"
        folder.mkdir()

        async def whole() -> None:
            async with asyncio.timeout(30), running(folder, **settings) as service:
                await main(service)

        asyncio.run(whole())

    return run


def with_service(**settings: Any) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Return a decorator that runs an async test with a service of its own as the argument `service`."""

    def decorated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(play: Play, **given: Any) -> None:
            play(lambda service: test(service=service, **given), **settings)

        del run.__wrapped__
        signature = inspect.signature(test)
        own = [each.replace(name="play") if each.name == "service" else each for each in signature.parameters.values()]
        run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return run

    return decorated


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.answer.set()
    server.shutdown()
    server.server_close()


def routes(service: Service) -> list[tuple[str, str]]:
    """Return every method and path that the application answers."""
    return [
        (method, str(route.path))
        for route in iter_route_contexts(service.app.routes)
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]
