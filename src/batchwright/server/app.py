"""The application: routes, errors in one form, who may ask, and what surrounds every request."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from batchwright import __version__
from batchwright.server import errors
from batchwright.server.auth import Guard, is_loopback
from batchwright.server.body_limits import BodyLimits, ByteBudget
from batchwright.server.context import needs_key
from batchwright.server.cors import Cors
from batchwright.server.dashboard import page
from batchwright.server.json_bodies import JsonThread
from batchwright.server.methods import Options
from batchwright.server.middleware import Bounds, Frame
from batchwright.server.routes import admin, batches, files, health, models, online, simple, state
from batchwright.server.services import Services
from batchwright.server.trail import Trail

_ROUTERS = (
    online.router,
    models.router,
    files.router,
    batches.router,
    simple.router,
    admin.router,
    health.router,
    state.router,
    page.router,
)
_PUBLIC = (health.router, page.router)
"""What of theirs needs a key says so itself."""
_DESCRIPTION = (
    "OpenAI-compatible online requests, files and batches, and simple batches of prompts. Every error is "
    '`{"error": {"message", "type", "param", "code"}}`.'
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": errors.Error, "description": "What was asked for cannot be done; the error says why."},
    "5XX": {"model": errors.Error, "description": "The service cannot do it now."},
}
_TELEMETRY: Any = {
    "tracing": True,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": True,
}
"""Spans of requests, which go where OpenTelemetry's own variables say, if they say anything."""


def create_app(services: Services) -> FastAPI:
    """The service over HTTP. `services` are opened and closed by the caller: see `open_services`."""
    app = FastAPI(
        title="batchwright",
        description=_DESCRIPTION,
        version=__version__,
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        telemetry=_TELEMETRY,
    )
    app.state.services = services
    settings = services.settings
    for router in _ROUTERS:
        app.include_router(router, dependencies=[] if router in _PUBLIC else [needs_key])
    errors.install(app)
    # The one that is added last is the outermost.
    app.add_middleware(
        Guard, keys=services.keys, loopback=is_loopback(settings.host), origins=frozenset(settings.cors_origins)
    )
    app.add_middleware(Trail, log=services.audit, clock=services.clock)
    app.add_middleware(Options, routes=app.routes)
    json_thread = app.state.json_thread = JsonThread()
    app.add_middleware(
        Bounds,
        clock=services.clock,
        limits=BodyLimits.of(settings),
        budget=ByteBudget(settings.max_body_memory),
        upload_timeout=settings.upload_timeout,
        min_upload_rate=settings.min_upload_rate,
        stopping=lambda: services.draining,
        on_large_bodies_gone=json_thread.give_memory_back,
    )
    if settings.cors_origins:
        app.add_middleware(Cors, origins=settings.cors_origins)
    app.add_middleware(Frame, figures=services.http, clock=services.clock)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name
