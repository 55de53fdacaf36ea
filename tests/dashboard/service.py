"""The real service with a stub model, for the browser to talk to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.dashboard.serving import Serving
from tests.server.apps import app_of
from tests.server.fakes import StubInference

from batchwright.service.composition import Services, open_services
from batchwright.service.settings import Settings


class Service(Serving):
    """A service on SQLite in `folder`. This thread uses `model` only through `call`."""

    services: Services

    def __init__(self, folder: Path) -> None:
        super().__init__(self._opened)
        self._folder = folder
        self.model: StubInference

    def call(self, act: Callable[[], Any]) -> Any:
        """Return the result of `act`, a function or coroutine function, called on the service's event loop."""

        async def called() -> Any:
            result = act()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(30)

    def hold(self) -> None:
        """Let no line of a batch be finished until `release`."""
        self.call(self.model.gate.clear)

    def release(self) -> None:
        self.call(self.model.gate.set)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        self.model = StubInference()
        settings = Settings(data=self._folder, port=0, drain_grace=0.0, log_level="error")
        async with open_services(settings, inference=self.model) as services:
            self.services = services
            yield app_of(services)
