"""The page over made-up states, for what a real service shows only after weeks, or never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.responses import Response, StreamingResponse
from tests.dashboard.serving import Serving, as_it_is

from batchwright.server.dashboard.dashboard_state import DashboardState
from batchwright.server.dashboard.page import router


class Feed(Serving):
    """A server that sends every page a state when it is set, and again each second."""

    def __init__(self) -> None:
        app = FastAPI()
        app.include_router(router)
        app.add_api_route("/dashboard/events", self._events)
        super().__init__(lambda: as_it_is(app))
        self._state: DashboardState | None = None
        self._changed = asyncio.Event()

    def show(self, state: DashboardState) -> None:
        self.loop.call_soon_threadsafe(self._set, state)

    def _set(self, state: DashboardState) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def _events(self) -> Response:
        return StreamingResponse(self._sent(), media_type="text/event-stream")

    async def _sent(self) -> AsyncIterator[str]:
        while True:
            if self._state is not None:
                yield f"data: {self._state.model_dump_json()}\n\n"
            await asyncio.wait([asyncio.ensure_future(self._changed.wait())], timeout=1.0)
