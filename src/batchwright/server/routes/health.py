"""`/health`, `/ready` and `/metrics`."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from batchwright.server.http.context import ServicesOf, needs, needs_key
from batchwright.server.http.error_answers import RETRY_AFTER, HttpError
from batchwright.service.observability.scrape import CONTENT_TYPE, exposition
from batchwright.version import __version__

router = APIRouter(tags=["Operation"])


class Health(BaseModel):
    """The process lives."""

    status: Literal["ok"] = "ok"
    version: str = __version__


class Ready(BaseModel):
    """Work can be taken."""

    status: Literal["ready"] = "ready"


@router.get("/health")
async def health() -> Health:
    """Whether the process lives."""
    return Health()


@router.get("/ready")
async def ready(services: ServicesOf) -> Ready:
    """Whether work can be taken: the database and what computes answer, and the service is not stopping. Else 503."""
    reason = await services.why_not_ready()
    if reason is not None:
        headers = {"retry-after": str(RETRY_AFTER)}
        raise HttpError(503, reason, kind="server_error", code="not_ready", headers=headers)
    return Ready()


@router.get(
    "/metrics",
    response_class=Response,
    dependencies=[needs_key, needs("metrics")],
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(services: ServicesOf) -> Response:
    """The figures for Prometheus."""
    return Response(exposition(await services.scrape()), headers={"content-type": CONTENT_TYPE})
