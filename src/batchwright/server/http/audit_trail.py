"""Audit log of requests: routes declare what they do, and a middleware records the outcome."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.clock import Clock
from batchwright.server.http.error_answers import as_http
from batchwright.server.http.middleware import HUNG_UP
from batchwright.service.access.audit import AuditLog


class Sparing:
    """Limit on records that strangers can cause: only the first few of a kind pass in each period (in seconds)."""

    def __init__(self, most: int, period: float) -> None:
        self._most = most
        self._period = period
        self._seen: Counter[str] = Counter()
        self._until = float("-inf")
        self._suppressed = 0

    def take(self, kind: str, now: float) -> tuple[bool, int]:
        """Return whether this record passes, and how many did not in the period that has just ended."""
        suppressed = 0
        if now >= self._until:
            suppressed, self._suppressed = self._suppressed, 0
            self._seen.clear()
            self._until = now + self._period
        # Strangers choose the kinds, so their number is bounded, too.
        if self._seen[kind] >= self._most or len(self._seen) > 1000 * self._most:
            self._suppressed += 1
            return False, suppressed
        self._seen[kind] += 1
        return True, suppressed


_DEED = "deed"
_REFUSALS = 10
"""Refusals that are recorded per address and minute; further ones are only counted."""
_PATH = 200


@dataclass(slots=True)
class Deed:
    """An action of a request, for the audit log."""

    action: str
    object: str | None = None
    """Id of what the action is done to; a route that creates something sets it."""


def audited(action: str, of: str | None = None) -> Any:
    """Return a dependency, with a `Deed` as its value, for routes that change state or read contents.

    `of`: name of the path parameter with the id of the object.
    """

    async def note(request: Request) -> Deed:
        deed = Deed(action, None if of is None else request.path_params.get(of))
        setattr(request.state, _DEED, deed)
        return deed

    return Depends(note)


def not_audited(request: Request) -> None:
    """Leave the request out of the audit log."""
    delattr(request.state, _DEED)


class AuditMiddleware:
    """Middleware around `auth.AuthMiddleware` that records actions, and refusals for lack of a key or a scope."""

    def __init__(self, app: ASGIApp, *, log: AuditLog, clock: Clock) -> None:
        self._app = app
        self._log = log
        self._clock = clock
        self._sparing = Sparing(_REFUSALS, 60.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = HUNG_UP

        async def sender(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sender)
        except ClientDisconnect:
            # The body that a HEAD request does not want is cut off in the same way.
            if scope["method"] != "HEAD":
                status = HUNG_UP
            raise
        except Exception as error:
            status = as_http(error).status
            raise
        finally:
            self._note(scope, status)

    def _note(self, scope: Scope, status: int) -> None:
        deed: Deed | None = scope["state"].get(_DEED)
        if deed is not None:
            whose = deed.object and deed.object[:_PATH]
            outcome = "done" if status < 400 else "refused" if status < 499 else "failed"
            self._log.record(deed.action, outcome, object=whose, **_who(scope, status))
        elif status in (401, 403):
            address = _address(scope)
            let_through, suppressed = self._sparing.take(address or "", self._clock.now())
            if suppressed:
                self._log.record("access.refused", "refused", suppressed=suppressed)
            if let_through:
                where = f"{scope['method']} {scope['path']}"[:_PATH]
                self._log.record("access.refused", "refused", object=where, **_who(scope, status))


def _who(scope: Scope, status: int) -> dict[str, Any]:
    state = scope["state"]
    key = state.get("key")
    return {
        "status": status,
        "tenant": state.get("tenant"),
        "key": None if key is None else key.id,
        "key_name": None if key is None else key.name,
        "address": _address(scope),
        "request_id": state.get("request_id"),
    }


def _address(scope: Scope) -> str | None:
    client = scope.get("client")
    return client[0] if client else None
