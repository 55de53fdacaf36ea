"""What the dashboard shows: once, or every second for as long as somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from batchwright.server.context import ServicesOf, Tenant
from batchwright.server.dashboard.state import DashboardState
from batchwright.server.dashboard.view import dashboard_state
from batchwright.server.services import Services
from batchwright.server.sse import EventStream

router = APIRouter(prefix="/dashboard", tags=["Dashboard"])

_PERIOD = 1.0


@router.get("/state")
async def get_dashboard_state(services: ServicesOf, tenant: Tenant) -> DashboardState:
    """Everything that the dashboard shows."""
    return await dashboard_state(services, tenant)


@router.get(
    "/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def dashboard_events(services: ServicesOf, tenant: Tenant) -> Response:
    """The same as server-sent events, one a second, until the client hangs up or the service stops."""
    return EventStream(_states(services, tenant), done=b"")


async def _states(services: Services, tenant: str) -> AsyncIterator[Any]:
    while True:
        yield (await dashboard_state(services, tenant)).model_dump(mode="json")
        with suppress(TimeoutError):
            await asyncio.wait_for(services.stopping.wait(), _PERIOD)
        if services.stopping.is_set():
            return
