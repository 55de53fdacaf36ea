"""`/health`, `/ready` and `/metrics`: the state of the process, for those who operate it."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response

from batchwright.server.http.context import ServicesOf, needs, needs_key
from batchwright.server.http.error_answers import unavailable
from batchwright.service.observability.scrape import CONTENT_TYPE, exposition
from batchwright.version import __version__
from batchwright.wire.api_model import ApiModel

router = APIRouter(tags=["Operation"])


class Health(ApiModel):
    """The answer of a live process."""

    status: Literal["healthy"] = "healthy"
    version: str = __version__


class Ready(ApiModel):
    """The answer of a service that takes work."""

    status: Literal["ready"] = "ready"


@router.get("/health")
async def health() -> Health:
    """Report that the process is alive."""
    return Health()


@router.get("/ready")
async def ready(services: ServicesOf) -> Ready:
    """Report whether work is taken: the database and the model answer, and the service is not stopping. If not, 503."""
    reason = await services.why_not_ready()
    if reason is not None:
        raise unavailable(reason, "not_ready")
    return Ready()


@router.get(
    "/metrics",
    response_class=Response,
    dependencies=[needs_key, needs("metrics")],
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(services: ServicesOf) -> Response:
    """Show the metrics for Prometheus."""
    return Response(exposition(await services.scrape()), headers={"content-type": CONTENT_TYPE})
