"""Methods of HTTP: which a path has, and those that it has by itself, HEAD where there is GET, and OPTIONS."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OWN = ("GET", "POST", "PUT", "PATCH", "DELETE")


def allowed(routes: Sequence[BaseRoute], scope: Scope) -> str:
    """What stands in `Allow` for the path of `scope`; empty where there is nothing."""
    found = [
        method
        for method in _OWN
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    if "GET" in found:
        found.insert(1, "HEAD")
    return ", ".join([*found, "OPTIONS"]) if found else ""


class MethodMiddleware:
    """Answers OPTIONS with what a path has. It needs no key: `/openapi.json` tells the same."""

    def __init__(self, app: ASGIApp, *, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        methods = allowed(self._routes, scope) if scope["type"] == "http" and scope["method"] == "OPTIONS" else ""
        if not methods:
            await self._app(scope, receive, send)
            return
        await Response(status_code=204, headers={"allow": methods})(scope, receive, send)


def without_body(send: Send) -> tuple[Receive, Send]:
    """For a request with HEAD that is answered as with GET: the body is left out, and a stream ends at once."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return receive, send_head
