"""The application of the service, many times."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import BaseRoute

from batchwright.server.app import create_app
from batchwright.service.composition import Services

_routes: list[BaseRoute] = []


def app_of(services: Services) -> FastAPI:
    """Return what `create_app` does, with the routes of the first one."""
    app = create_app(services)
    share_routes(app)
    return app


def share_routes(app: FastAPI) -> None:
    """Give the application the routes of the first one, which are the same for all services.

    FastAPI prepares the routes of an application at its first request, which takes longer than most tests.
    """
    if _routes:
        app.router.routes[:] = _routes
    else:
        _routes.extend(app.router.routes)
