"""What the dashboard shows: once, or every second for as long as somebody looks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchwright.server.dashboard.dashboard_state import DashboardState
from batchwright.server.dashboard.feed import Feeds
from batchwright.server.dashboard.view import dashboard_state
from batchwright.server.http.auth import require_scope
from batchwright.server.http.context import Key, ServicesOf, Tenant, needs
from batchwright.server.http.sse import EVENT_HEADERS, ByteStream
from batchwright.service.composition import Services
from batchwright.store.records import ApiKey

router = APIRouter(prefix="/dashboard", tags=["Dashboard"], dependencies=[needs("batches")])


@router.get("/state")
async def get_dashboard_state(services: ServicesOf, tenant: Tenant, key: Key) -> DashboardState:
    """Everything that the dashboard shows."""
    return await dashboard_state(services, tenant, key)


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def dashboard_events(request: Request, services: ServicesOf, tenant: Tenant) -> Response:
    """The same as server-sent events, one a second, until the client hangs up, may not see it any more, or the service
    stops.
    """
    presented = request.headers.get("authorization", "")
    return _PageStream(services, request.app.state.feeds, tenant, presented, request.state.authenticate)


class _PageStream(Response):
    """Takes its place among the open dashboards when it begins to be sent, so that it can be refused with a status."""

    def __init__(
        self,
        services: Services,
        feeds: Feeds,
        tenant: str,
        presented: str,
        authenticate: Callable[[], Awaitable[ApiKey | None]],
    ) -> None:
        """`presented`: the key that was given, as it was."""
        super().__init__()
        self._services = services
        self._feeds = feeds
        self._tenant = tenant
        self._presented = presented
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def compute() -> DashboardState:
            key = await self._authenticate()
            require_scope(key, "batches")
            return await dashboard_state(self._services, self._tenant, key)

        with self._feeds.watched(self._tenant, self._presented, compute) as events:
            await ByteStream(events, EVENT_HEADERS)(scope, receive, send)
