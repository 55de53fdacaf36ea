"""Around every request: its id, the limits of its body, its line in the log, its place in the figures."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.clock import Clock
from batchwright.server.errors import HttpError, as_http, error_response, log_failure, shutting_down
from batchwright.server.observability.figures import HttpFigures
from batchwright.server.observability.logs import logger

UPLOAD = ("POST", "/v1/files")
"""Has a cap of its own, counted as it passes into its blob."""
ANSWER_HEADERS = "answer_headers"
"""In the state of a request: headers of its answer, whatever that will be."""
HUNG_UP = 499
"""What the log and the figures say of a request whose client went away before the answer."""
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")


def new_request_id() -> str:
    return "req_" + secrets.token_hex(12)


class Frame:
    """The outermost layer of the application. Nothing passes it but answers in the form of the service."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        figures: HttpFigures,
        clock: Clock,
        max_body_size: int,
        upload_timeout: float,
        stopping: Callable[[], bool],
    ) -> None:
        """`upload_timeout` in seconds. `stopping`: whether the service goes, and so may cancel a request."""
        self._app = app
        self._figures = figures
        self._clock = clock
        self._max_body_size = max_body_size
        self._upload_timeout = upload_timeout
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._answer(scope, receive, send, request_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        started, status = self._clock.now(), HUNG_UP
        answering = False

        async def sender(message: Message) -> None:
            nonlocal status, answering
            if message["type"] == "http.response.start":
                answering, status = True, message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(scope["state"].get(ANSWER_HEADERS, {}))
                headers["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, self._bounded(scope, receive), sender)
        except ClientDisconnect:
            status = HUNG_UP
        except Exception as error:
            answer = as_http(error)
            log_failure(error, answer, path=scope["path"])
            if not answering:
                await error_response(answer)(scope, receive, sender)
        finally:
            self._tell(scope, status, self._clock.now() - started)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """`receive`, which raises 408 when the body brings nothing for too long, and 413 past the cap on it."""
        most = None if (scope["method"], scope["path"]) == UPLOAD else self._max_body_size
        length = Headers(scope=scope).get("content-length", "")
        announced = int(length) if length.isdecimal() and len(length) < 20 else 0
        passed, arrived = 0, False

        async def bounded() -> Message:
            nonlocal passed, arrived
            if most is not None and announced > most:
                raise self._too_large()
            # What is still to come after the body is that the client hangs up, which may take any time.
            message = await (receive() if arrived else self._soon(receive))
            arrived = not message.get("more_body", False)
            passed += len(message.get("body", b""))
            if most is not None and passed > most:
                raise self._too_large()
            return message

        return bounded

    async def _soon(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._upload_timeout):
                return await receive()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not self._stopping():
                raise
            # By uvicorn, which would answer with a text. This is the end of the request either way.
            task.uncancel()
            raise shutting_down(close=True) from None
        except TimeoutError:
            raise HttpError(
                408,
                f"the body brought nothing for {self._upload_timeout:g} s: send it again",
                kind="timeout_error",
                code="upload_too_slow",
                headers={"connection": "close"},
            ) from None

    def _too_large(self) -> HttpError:
        return HttpError(
            413,
            f"the body has more than {self._max_body_size:,} bytes: send less, or raise max_body_size of the service",
            code="request_too_large",
            headers={"connection": "close"},
        )

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        path = getattr(scope.get("route"), "path", None) or "(none)"
        # A client may invent methods, each of which would be a series of its own.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._figures.answered(method, path, status, seconds)
        level = "debug" if path in ("/health", "/ready", "/metrics") or path.startswith("/dashboard") else "info"
        getattr(logger, level)(
            "request",
            method=scope["method"],
            path=scope["path"],
            status=status,
            ms=round(seconds * 1e3, 1),
            tenant=scope.get("state", {}).get("tenant"),
        )
