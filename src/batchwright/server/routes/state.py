"""What the dashboard shows: once, or every second for as long as somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from batchwright.jobs.store.records import ApiKey
from batchwright.server.context import Key, ServicesOf, Tenant, needs
from batchwright.server.dashboard.state import DashboardState
from batchwright.server.dashboard.view import dashboard_state
from batchwright.server.services import Services
from batchwright.server.sse import EventStream

router = APIRouter(prefix="/dashboard", tags=["Dashboard"], dependencies=[needs("batches")])

_PERIOD = 1.0


@router.get("/state")
async def get_dashboard_state(services: ServicesOf, tenant: Tenant, key: Key) -> DashboardState:
    """Everything that the dashboard shows."""
    return await dashboard_state(services, tenant, key)


@router.get(
    "/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def dashboard_events(services: ServicesOf, tenant: Tenant, key: Key) -> Response:
    """The same as server-sent events, one a second, until the client hangs up or the service stops."""
    return EventStream(_states(services, tenant, key), done=b"")


async def _states(services: Services, tenant: str, key: ApiKey | None) -> AsyncIterator[Any]:
    while True:
        yield (await dashboard_state(services, tenant, key)).model_dump(mode="json")
        with suppress(TimeoutError):
            await asyncio.wait_for(services.stopping.wait(), _PERIOD)
        if services.stopping.is_set():
            return
