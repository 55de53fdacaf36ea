"""What the dashboard shows: once, or every second for as long as somebody looks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchwright.server.context import ServicesOf, Tenant
from batchwright.server.dashboard.state import DashboardState
from batchwright.server.dashboard.view import dashboard_state
from batchwright.server.services import Services
from batchwright.server.sse import EVENT_HEADERS, ByteStream

router = APIRouter(prefix="/dashboard", tags=["Dashboard"])


@router.get("/state")
async def get_dashboard_state(services: ServicesOf, tenant: Tenant) -> DashboardState:
    """Everything that the dashboard shows."""
    return await dashboard_state(services, tenant)


@router.get(
    "/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def dashboard_events(services: ServicesOf, tenant: Tenant) -> Response:
    """The same as server-sent events, one a second, until the client hangs up or the service stops."""
    return _PageStream(services, tenant)


class _PageStream(Response):
    """Takes its place among the open dashboards when it begins to be sent, so that it can be refused with a status."""

    def __init__(self, services: Services, tenant: str) -> None:
        super().__init__()
        self._services = services
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def compute() -> Coroutine[Any, Any, DashboardState]:
            return dashboard_state(self._services, self._tenant)

        with self._services.feeds.watched(self._tenant, compute) as events:
            await ByteStream(events, EVENT_HEADERS)(scope, receive, send)
