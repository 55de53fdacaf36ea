"""The HTTP application: its routes, and the middleware around them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from batchwright.server.dashboard import page
from batchwright.server.dashboard.feed import Feeds
from batchwright.server.http import error_answers
from batchwright.server.http.audit_trail import AuditMiddleware
from batchwright.server.http.auth import AuthMiddleware
from batchwright.server.http.context import needs_key
from batchwright.server.http.json_bodies import JsonThread
from batchwright.server.http.middleware import (
    BodyMiddleware,
    CrossOriginMiddleware,
    MethodMiddleware,
    RequestMiddleware,
)
from batchwright.server.routes import admin, batches, dashboard, files, health, online, simple_batches
from batchwright.service.composition import Services
from batchwright.service.settings import is_loopback
from batchwright.version import __version__

_ROUTERS = (
    online.router,
    files.router,
    batches.router,
    simple_batches.router,
    admin.router,
    health.router,
    dashboard.router,
    page.router,
)
_PUBLIC = (health.router, page.router)
"""Routers of public paths. Their routes that need a key say so themselves."""
_DESCRIPTION = (
    "OpenAI-compatible online requests, files and batches, and simple batches of prompts. Every error is "
    '`{"error": {"message", "type", "param", "code"}}`.'
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": error_answers.Error, "description": "What was asked for cannot be done; the error says why."},
    "5XX": {"model": error_answers.Error, "description": "The service cannot do it now."},
}
_TELEMETRY: Any = {"tracing": True, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": True}
"""Settings by which spans of requests go where OpenTelemetry's own environment variables say, if they are set."""


def describe_api() -> dict[str, Any]:
    """Return the OpenAPI description of the application, which is the same for all services."""
    return _with_routes().openapi()


def create_app(services: Services) -> FastAPI:
    """Return the application for `services`, which the caller opens and closes (`open_services`)."""
    app = _with_routes()
    app.state.services = services
    settings = services.settings
    app.state.feeds = Feeds(settings.max_page_streams, services.stopping)
    error_answers.install(app)
    # The middleware that is added last is the outermost.
    loopback, origins = is_loopback(settings.host), frozenset(settings.cors_origins)
    app.add_middleware(AuthMiddleware, keys=services.keys, loopback=loopback, origins=origins)
    app.add_middleware(AuditMiddleware, log=services.audit, clock=services.clock)
    app.add_middleware(MethodMiddleware, routes=app.routes)
    json_thread = app.state.json_thread = JsonThread()
    app.add_middleware(
        BodyMiddleware,
        settings=settings,
        clock=services.clock,
        stopping=lambda: services.draining,
        on_large_bodies_gone=json_thread.give_memory_back,
    )
    if settings.cors_origins:
        app.add_middleware(CrossOriginMiddleware, origins=settings.cors_origins)
    app.add_middleware(RequestMiddleware, figures=services.http, clock=services.clock)
    return app


def _with_routes() -> FastAPI:
    app = FastAPI(
        title="batchwright",
        description=_DESCRIPTION,
        version=__version__,
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        telemetry=_TELEMETRY,
    )
    for router in _ROUTERS:
        app.include_router(router, dependencies=[] if router in _PUBLIC else [needs_key])
    return app
