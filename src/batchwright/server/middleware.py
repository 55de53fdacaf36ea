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
from batchwright.server.body_limits import BodyCount, BodyLimits, ByteBudget
from batchwright.server.errors import HttpError, as_http, error_response, log_failure, shutting_down
from batchwright.server.methods import without_body
from batchwright.server.observability.figures import HttpFigures
from batchwright.server.observability.logs import logger

HUNG_UP = 499
"""What the log and the figures say of a request whose client went away before the answer."""
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")


def new_request_id() -> str:
    return "req_" + secrets.token_hex(12)


class Frame:
    """The outermost layer: an id, headers that every answer has, a line in the log.

    What is inside sees paths without slashes at their end, and GET in place of HEAD.
    """

    def __init__(self, app: ASGIApp, *, figures: HttpFigures, clock: Clock) -> None:
        self._app = app
        self._figures = figures
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, method = self._clock.now(), HUNG_UP, scope["method"]
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else new_request_id()
        inner = {
            **scope,
            "method": "GET" if method == "HEAD" else method,
            "path": scope["path"].rstrip("/") or "/",
            "state": {**scope.get("state", {}), "request_id": request_id},
        }

        async def sender(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                # Of a stream: until its first event.
                headers["openai-processing-ms"] = str(round((self._clock.now() - started) * 1e3))
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                if method == "HEAD":
                    await self._app(inner, *without_body(sender))
                else:
                    await self._app(inner, receive, sender)
            except ClientDisconnect:
                status = status if method == "HEAD" else HUNG_UP
            finally:
                self._tell(inner, method, status, self._clock.now() - started)

    def _tell(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        path = getattr(scope.get("route"), "path_format", None) or "(none)"
        # A client may invent methods, each of which would be a series of its own.
        self._figures.answered(method if method in _METHODS else "other", path, status, seconds)
        level = "debug" if path in ("/health", "/ready", "/metrics") or path.startswith("/dashboard") else "info"
        getattr(logger, level)(
            "request",
            method=method,
            path=scope["path"],
            status=status,
            ms=round(seconds * 1e3, 1),
            tenant=scope["state"].get("tenant"),
        )


class Bounds:
    """Bounds the body of every request, and turns every error into an answer: nothing passes it but answers in the form
    of the service.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: BodyLimits,
        budget: ByteBudget,
        upload_timeout: float,
        stopping: Callable[[], bool],
        on_large_bodies_gone: Callable[[], None],
    ) -> None:
        """`upload_timeout` in seconds. `stopping`: whether the service goes, and so may cancel a request.

        `on_large_bodies_gone` is called when the last request with a large body has ended.
        """
        self._app = app
        self._limits = limits
        self._budget = budget
        self._upload_timeout = upload_timeout
        self._stopping = stopping
        self._on_large_bodies_gone = on_large_bodies_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = BodyCount(self._limits.most(scope["method"], scope["path"]), self._budget)
        answering = False

        async def sender(message: Message) -> None:
            nonlocal answering
            answering = True
            await send(message)

        try:
            headers = Headers(scope=scope)
            _require_plain(headers)
            body.announce(headers.get("content-length", ""))
            await self._app(scope, self._bounded(receive, body), sender)
        except ClientDisconnect:
            raise
        except Exception as error:
            answer = as_http(error)
            log_failure(error, answer, path=scope["path"])
            if not answering:
                await error_response(answer)(scope, receive, send)
        finally:
            if body.end() and not self._budget.in_work:
                self._on_large_bodies_gone()

    def _bounded(self, receive: Receive, body: BodyCount) -> Receive:
        """`receive`, which raises 408 when the body brings nothing for too long, and what `BodyCount` raises."""
        arrived = False

        async def bounded() -> Message:
            nonlocal arrived
            # What is still to come after the body is that the client hangs up, which may take any time.
            message = await (receive() if arrived else self._soon(receive))
            arrived = not message.get("more_body", False)
            body.count(len(message.get("body", b"")))
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


def _require_plain(headers: Headers) -> None:
    """Raises `HttpError` (415) for a body that is compressed, whose size would not be known until it is expanded."""
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise HttpError(
            415,
            f"Content-Encoding {coding[:40]!r} is not taken: send the body as it is",
            code="unsupported_content_encoding",
            headers={"accept-encoding": "identity", "connection": "close"},
        )
