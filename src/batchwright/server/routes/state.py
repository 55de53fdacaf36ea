"""What the dashboard shows: once, or every second for as long as somebody looks."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchwright.jobs.store.records import ApiKey
from batchwright.server.context import Key, ServicesOf, Tenant, needs
from batchwright.server.dashboard.state import DashboardState
from batchwright.server.dashboard.view import dashboard_state
from batchwright.server.errors import HttpError
from batchwright.server.services import Services
from batchwright.server.sse import EVENT_HEADERS, ByteStream

router = APIRouter(prefix="/dashboard", tags=["Dashboard"], dependencies=[needs("batches")])


@router.get("/state")
async def get_dashboard_state(services: ServicesOf, tenant: Tenant, key: Key) -> DashboardState:
    """Everything that the dashboard shows."""
    return await dashboard_state(services, tenant, key)


@router.get(
    "/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def dashboard_events(services: ServicesOf, tenant: Tenant, key: Key) -> Response:
    """The same as server-sent events, one a second, until the client hangs up or the service stops."""
    return _PageStream(services, tenant, key)


class _PageStream(Response):
    """Takes its place among the open dashboards when it begins to be sent, so that it can be refused with a status."""

    def __init__(self, services: Services, tenant: str, key: ApiKey | None) -> None:
        super().__init__()
        self._services = services
        self._tenant = tenant
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def compute() -> DashboardState:
            if self._key is not None and not await self._services.keys.is_valid(self._key.id):
                message = "the API key is not valid any more: use another"
                raise HttpError(401, message, kind="authentication_error", code="invalid_api_key")
            return await dashboard_state(self._services, self._tenant, self._key)

        with self._services.feeds.watched(self._tenant, None if self._key is None else self._key.id, compute) as events:
            await ByteStream(events, EVENT_HEADERS)(scope, receive, send)
