"""Middleware around every request: its id, log line and metrics, CORS, OPTIONS, limits on its body, error answers."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.clock import Clock
from batchwright.errors import ServiceStopping
from batchwright.server.http.body_limits import BodyCount, BodyLimits, ByteBudget
from batchwright.server.http.error_answers import HttpError, allowed, as_http, error_response, log_failure
from batchwright.server.http.sse import event
from batchwright.service.observability.figures import HttpFigures
from batchwright.service.observability.logs import logger
from batchwright.service.settings import Settings

ANSWER_HEADERS = "answer_headers"
"""Name, in the state of a request, of the headers that are added to its answer, even to an error."""
HUNG_UP = 499
"""Status that the log and the metrics give a request whose client hung up before the answer."""
_LAST_WORD = 0.5
"""Seconds that a client has to receive the end of its answer when the service stops."""
_CROSS_ORIGIN_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")


def new_request_id() -> str:
    return "req_" + secrets.token_hex(12)


class RequestMiddleware:
    """The outermost layer: gives each request an id, common headers on its answer, a log line and its metrics.

    Inner layers see paths without trailing slashes, and GET in place of HEAD.
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
                headers.update(inner["state"].get(ANSWER_HEADERS, {}))
                headers["x-request-id"] = request_id
                # For a stream, the time until its first event.
                headers["openai-processing-ms"] = str(round((self._clock.now() - started) * 1e3))
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                if method == "HEAD":
                    await self._app(inner, *_without_body(sender))
                else:
                    await self._app(inner, receive, sender)
            except ClientDisconnect:
                status = status if method == "HEAD" else HUNG_UP
            finally:
                self._record(inner, method, status, self._clock.now() - started)

    def _record(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        path = getattr(scope.get("route"), "path_format", None) or "(none)"
        # A client may invent methods, each of which would become a time series.
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


def _without_body(send: Send) -> tuple[Receive, Send]:
    """Return channels for a HEAD request that is answered as GET: the body is left out, and a stream ends at once."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return receive, send_head


class CrossOriginMiddleware(CORSMiddleware):
    """Starlette's CORS middleware, with refusals in the service's form of errors.

    It allows no credentials that a browser adds by itself: a page must know a key and send it in a header. Where no key
    is needed, `auth.AuthMiddleware` decides what a page may do.
    """

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        super().__init__(
            app, allow_origins=origins, allow_methods=_CROSS_ORIGIN_METHODS, allow_headers=("*",), expose_headers=("*",)
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        message = f"{bytes(response.body).decode()}: see cors_origins of the service"
        return error_response(HttpError(400, message, code="cors_refused", headers=headers))


class MethodMiddleware:
    """Answers OPTIONS with the methods of a path. No key is needed, as `/openapi.json` shows the same."""

    def __init__(self, app: ASGIApp, *, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        methods = allowed(self._routes, scope) if scope["type"] == "http" and scope["method"] == "OPTIONS" else ""
        if not methods:
            await self._app(scope, receive, send)
            return
        await Response(status_code=204, headers={"allow": methods})(scope, receive, send)


@dataclass(slots=True)
class _Arrival:
    """How a body arrives: within `stall` seconds for each piece, and for the whole within `stall` seconds plus its size
    divided by `rate` bytes a second. Only time in which the service waits for the body counts.
    """

    stall: float
    rate: int
    size: int = 0
    """Bytes that have arrived."""
    waited: float = 0.0
    ended: bool = False
    """Whether all of the body has arrived, or the client has hung up."""

    @property
    def patience(self) -> float:
        """Seconds that the next piece may take."""
        return min(self.stall, self.stall + self.size / self.rate - self.waited)


class _Answer:
    """The answer to one request: whether it has begun, and how to end it when the service cannot go on with it."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._events = False
        self._send = send

    async def send(self, message: Message) -> None:
        """Forward `message` to the client."""
        if message["type"] == "http.response.start":
            self.begun = True
            self._events = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
        await self._send(message)

    async def give_up(self, error: HttpError, scope: Scope, receive: Receive) -> None:
        """End with `error`: as the answer if none has begun, or as an event of a stream; else cut the answer off."""
        if not self.begun:
            await error_response(error)(scope, receive, self.send)
        elif self._events:
            await self._send({"type": "http.response.body", "body": event(error.body), "more_body": False})


class BodyMiddleware:
    """Limits the body of every request, and turns every error into an answer in the service's form."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        clock: Clock,
        stopping: Callable[[], bool],
        on_large_bodies_gone: Callable[[], None],
    ) -> None:
        """`stopping`: whether the service is stopping, and so may cancel a request. `on_large_bodies_gone` is called
        when the last request with a large body has ended.
        """
        self._app = app
        self._clock = clock
        self._limits = BodyLimits(settings)
        self._budget = ByteBudget(settings.max_body_memory)
        self._upload_timeout = settings.upload_timeout
        self._min_upload_rate = settings.min_upload_rate
        self._stopping = stopping
        self._on_large_bodies_gone = on_large_bodies_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer, body = _Answer(send), BodyCount(self._limits.most(scope["method"], scope["path"]), self._budget)
        try:
            await self._within_form(scope, receive, answer, body)
        except asyncio.CancelledError:
            # If the service stops, uvicorn would log the cancelled task with its traceback, and answer in plain text.
            task = asyncio.current_task()
            if task is None or not self._stopping():
                raise
            task.uncancel()
            error = as_http(ServiceStopping())
            error.headers["connection"] = "close"
            log_failure(error, error, path=scope["path"])
            # Do not wait for a client that does not read, nor for anything after a second cancellation.
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(_LAST_WORD):
                    await answer.give_up(error, scope, receive)
        finally:
            if body.end() and not self._budget.in_progress:
                self._on_large_bodies_gone()

    async def _within_form(self, scope: Scope, receive: Receive, answer: _Answer, body: BodyCount) -> None:
        """Answer the request, and turn any exception into an error in the service's form."""
        headers, arrival = Headers(scope=scope), _Arrival(self._upload_timeout, self._min_upload_rate)
        try:
            _require_plain(headers)
            body.announce(headers.get("content-length", ""))
            await self._app(scope, self._bounded(receive, body, arrival), answer.send)
        except ClientDisconnect:
            raise
        except Exception as error:
            answered = as_http(error)
            log_failure(error, answered, path=scope["path"])
            if not answer.begun:
                if _closes_after(scope, headers) and answered.status != 408:
                    # A connection that is closed before all of the body has arrived is reset, and a client that reads
                    # only after it has sent everything would lose the answer.
                    with suppress(TimeoutError, HttpError):
                        async with asyncio.timeout(self._upload_timeout):
                            while not arrival.ended:
                                await self._soon(receive, arrival)
                await error_response(answered)(scope, receive, answer.send)

    def _bounded(self, receive: Receive, body: BodyCount, arrival: _Arrival) -> Receive:
        """Return `receive` with limits: it raises 408 when the body arrives too slowly, and what `BodyCount` raises."""

        async def bounded() -> Message:
            # After the body, only a disconnect can follow, at any time.
            message = await (receive() if arrival.ended else self._soon(receive, arrival))
            body.count(len(message.get("body", b"")))
            return message

        return bounded

    async def _soon(self, receive: Receive, arrival: _Arrival) -> Message:
        began = self._clock.now()
        try:
            async with asyncio.timeout(arrival.patience):
                message = await receive()
        except TimeoutError:
            raise HttpError(
                408,
                f"the body came too slowly: nothing for {self._upload_timeout:g} s, or less than "
                f"{self._min_upload_rate:,} bytes a second: send it again",
                kind="timeout_error",
                code="upload_too_slow",
                headers={"connection": "close"},
            ) from None
        arrival.size += len(message.get("body", b""))
        arrival.waited += self._clock.now() - began
        arrival.ended = not message.get("more_body", False)
        return message


def _closes_after(scope: Scope, headers: Headers) -> bool:
    """Return whether the connection ends with the answer and the client sends its body without waiting for one."""
    if "100-continue" in headers.get("expect", "").lower():
        return False
    return scope["http_version"] == "1.0" or "close" in headers.get("connection", "").lower()


def _require_plain(headers: Headers) -> None:
    """Raise `HttpError` (415) for a compressed body, whose size is not known until it is expanded."""
    codings = ",".join(headers.getlist("content-encoding")).lower().split(",")
    if coding := next((each for each in map(str.strip, codings) if each not in ("", "identity")), None):
        raise HttpError(
            415,
            f"Content-Encoding {coding[:40]!r} is not taken: send the body as it is",
            code="unsupported_content_encoding",
            headers={"accept-encoding": "identity"},
        )
