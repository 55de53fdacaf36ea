"""`/dashboard`: the state that the dashboard shows, once or as a stream with one state a second."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchwright.server.dashboard.dashboard_state import DashboardState, dashboard_state
from batchwright.server.http.auth import require_scope
from batchwright.server.http.context import Key, ServicesOf, Tenant, needs
from batchwright.server.http.sse import EVENT_HEADERS, ByteStream

router = APIRouter(prefix="/dashboard", tags=["Dashboard"], dependencies=[needs("batches")])


@router.get("/state")
async def get_dashboard_state(services: ServicesOf, tenant: Tenant, key: Key) -> DashboardState:
    """Return everything that the dashboard shows."""
    return await dashboard_state(services, tenant, key)


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def dashboard_events(request: Request, services: ServicesOf, tenant: Tenant) -> Response:
    """Stream the same as server-sent events, one a second, until the client hangs up, its key becomes invalid, or the
    service stops.
    """
    authenticate = request.state.authenticate

    async def compute() -> DashboardState:
        key = await authenticate()
        require_scope(key, "batches")
        return await dashboard_state(services, tenant, key)

    presented = request.headers.get("authorization", "")
    return _PageStream(partial(request.app.state.feeds.watched, tenant, presented, compute))


class _PageStream(Response):
    """A stream that is counted as an open dashboard from when it begins to be sent, so that a refusal has a status."""

    def __init__(self, watched: Callable[[], AbstractContextManager[AsyncGenerator[bytes]]]) -> None:
        super().__init__()
        self._watched = watched

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watched() as events:
            await ByteStream(events, EVENT_HEADERS)(scope, receive, send)
