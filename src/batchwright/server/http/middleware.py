"""Around every request: its id, the limits of its body, its line in the log, its place in the figures."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.clock import Clock
from batchwright.errors import ServiceStopping
from batchwright.server.http.body_limits import BodyCount, BodyLimits, ByteBudget
from batchwright.server.http.error_answers import HttpError, as_http, error_response, log_failure
from batchwright.server.http.methods import without_body
from batchwright.server.http.sse import event
from batchwright.service.observability.figures import HttpFigures
from batchwright.service.observability.logs import logger

ANSWER_HEADERS = "answer_headers"
"""In the state of a request: headers of its answer, whatever that will be."""
HUNG_UP = 499
"""What the log and the figures say of a request whose client went away before the answer."""
_LAST_WORD = 0.5
"""Seconds that a client has to take the end of its answer when the service goes."""
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")


def new_request_id() -> str:
    return "req_" + secrets.token_hex(12)


class RequestMiddleware:
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
                headers.update(inner["state"].get(ANSWER_HEADERS, {}))
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


@dataclass(slots=True)
class _Arrival:
    """How a body comes: nothing may be missing for `stall` seconds, nor may all of it take longer than that and its
    size at `rate` bytes a second. Only the time counts in which the service waits for it.
    """

    stall: float
    rate: int
    size: int = 0
    """Bytes that have come."""
    waited: float = 0.0
    ended: bool = False
    """All of it has come, or the client has gone."""

    @property
    def patience(self) -> float:
        """Seconds that the next bytes may take."""
        return min(self.stall, self.stall + self.size / self.rate - self.waited)

    def came(self, size: int, seconds: float) -> None:
        """So many bytes, after so much waiting."""
        self.size += size
        self.waited += seconds


class _Answer:
    """What is sent to the client: how far it is, and how it ends when it cannot go on."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._events = False
        self._send = send

    async def send(self, message: Message) -> None:
        """Send it on."""
        if message["type"] == "http.response.start":
            self.begun = True
            self._events = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
        await self._send(message)

    async def give_up(self, error: HttpError, scope: Scope, receive: Receive) -> None:
        """End with `error`: as an answer where none was begun, as an event in a stream of events, else by a cut."""
        if not self.begun:
            await error_response(error)(scope, receive, self.send)
        elif self._events:
            await self._send({"type": "http.response.body", "body": event(error.body), "more_body": False})


class BodyMiddleware:
    """Bounds the body of every request, and turns every error into an answer: nothing passes it but answers in the form
    of the service.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Clock,
        limits: BodyLimits,
        budget: ByteBudget,
        upload_timeout: float,
        min_upload_rate: int,
        stopping: Callable[[], bool],
        on_large_bodies_gone: Callable[[], None],
    ) -> None:
        """`upload_timeout` in seconds, `min_upload_rate` in bytes a second: what a body may take (`_Arrival`).

        `stopping`: whether the service goes, and so may cancel a request. `on_large_bodies_gone` is called when the
        last request with a large body has ended.
        """
        self._app = app
        self._clock = clock
        self._limits = limits
        self._budget = budget
        self._upload_timeout = upload_timeout
        self._min_upload_rate = min_upload_rate
        self._stopping = stopping
        self._on_large_bodies_gone = on_large_bodies_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = BodyCount(self._limits.most(scope["method"], scope["path"]), self._budget)
        try:
            await self._within_life(scope, receive, _Answer(send), body)
        finally:
            if body.end() and not self._budget.in_work:
                self._on_large_bodies_gone()

    async def _within_life(self, scope: Scope, receive: Receive, answer: _Answer, body: BodyCount) -> None:
        """Answer the request; if the service goes before it is answered, say so.

        uvicorn would log the cancelled task with its traceback, and answer with a text.
        """
        try:
            await self._within_form(scope, receive, answer, body)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not self._stopping():
                raise
            task.uncancel()
            error = as_http(ServiceStopping())
            error.headers["connection"] = "close"
            log_failure(error, error, path=scope["path"])
            # A client that does not read is not waited for, nor is anything else when it is cancelled once more.
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(_LAST_WORD):
                    await answer.give_up(error, scope, receive)

    async def _within_form(self, scope: Scope, receive: Receive, answer: _Answer, body: BodyCount) -> None:
        """Answer the request; whatever is raised becomes an error in the form of the service."""
        headers, arrival = Headers(scope=scope), _Arrival(self._upload_timeout, self._min_upload_rate)
        try:
            _require_plain(headers)
            body.announce(headers.get("content-length", ""))
            await self._app(scope, self._bounded(receive, body, arrival), answer.send)
        except ClientDisconnect:
            raise
        except Exception as error:
            told = as_http(error)
            log_failure(error, told, path=scope["path"])
            if not answer.begun:
                if _closes_after(scope, headers) and told.status != 408:
                    await self._drain(receive, arrival)
                await error_response(told)(scope, receive, answer.send)

    async def _drain(self, receive: Receive, arrival: _Arrival) -> None:
        """Throw the rest of a body away. A connection that is closed before it has come is reset, and what was sent is
        lost to a client that reads only when it has sent all.
        """
        with suppress(TimeoutError, HttpError):
            async with asyncio.timeout(self._upload_timeout):
                while not arrival.ended:
                    await self._soon(receive, arrival)

    def _bounded(self, receive: Receive, body: BodyCount, arrival: _Arrival) -> Receive:
        """`receive`, which raises 408 when the body comes too slowly, and what `BodyCount` raises."""

        async def bounded() -> Message:
            # What is still to come after the body is that the client hangs up, which may take any time.
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
        arrival.came(len(message.get("body", b"")), self._clock.now() - began)
        arrival.ended = not message.get("more_body", False)
        return message


def _closes_after(scope: Scope, headers: Headers) -> bool:
    """Whether the connection ends with the answer, and the body comes whatever that is."""
    if "100-continue" in headers.get("expect", "").lower():
        return False
    return scope["http_version"] == "1.0" or "close" in headers.get("connection", "").lower()


def _require_plain(headers: Headers) -> None:
    """Raises `HttpError` (415) for a body that is compressed, whose size would not be known until it is expanded."""
    codings = ",".join(headers.getlist("content-encoding")).lower().split(",")
    if coding := next((each for each in map(str.strip, codings) if each not in ("", "identity")), None):
        raise HttpError(
            415,
            f"Content-Encoding {coding[:40]!r} is not taken: send the body as it is",
            code="unsupported_content_encoding",
            headers={"accept-encoding": "identity"},
        )
