"""Authentication: by API keys or, while the store has no key, for programs on this machine only.

Without keys, nothing proves who is calling, so the service is bound to loopback, and refuses what foreign web pages
could make a browser send: a Host that is not this machine (DNS rebinding), and an Origin that is not this service
(CSRF), unless `cors_origins` names it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from batchwright.errors import shown
from batchwright.server.http.error_answers import HttpError
from batchwright.service.access.api_keys import DEFAULT_TENANT, ApiKeys
from batchwright.service.settings import is_loopback
from batchwright.store.records import ApiKey, KeyScope

PUBLIC = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json", "/favicon.ico"})
"""Paths that reveal nothing about any tenant. The page at `/` is empty until its script asks for data, with a key."""
ADMIN = "/v1/admin"
PUBLIC_FOLDER = "/dashboard/static/"


class AuthMiddleware:
    """Puts the tenant and the key (None: no keys are used) of a request into its state, or raises 401 or 403."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, loopback: bool, origins: Collection[str] = ()) -> None:
        """`loopback`: whether only this machine can reach the service. If not, every request needs a key.

        `origins`: origins whose pages may use the service while no keys are used. An asterisk in them allows none.
        """
        self._app = app
        self._origins = origins
        self._keys = keys
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_public(scope["path"]):
            authenticate = partial(self._authenticated, Headers(scope=scope), scope["path"])
            key = await authenticate()
            tenant = DEFAULT_TENANT if key is None else key.tenant
            # An answer that takes long, such as the dashboard's stream, authenticates again.
            scope.setdefault("state", {}).update(key=key, tenant=tenant, authenticate=authenticate)
        await self._app(scope, receive, send)

    async def _authenticated(self, headers: Headers, path: str) -> ApiKey | None:
        """Return the key of a request, by the keys that exist now. Raises `HttpError` and `StoreUnavailable`."""
        if self._loopback and not await self._keys.required():
            # Pages of other origins may use the service, but not create keys for themselves.
            refuse_strangers(headers, () if path.startswith(ADMIN) else self._origins)
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("give an API key: Authorization: Bearer <key>", "missing_api_key")
        known = await self._keys.recognize(key.strip())
        if known is None:
            raise _unauthorized("the API key is not known here, was revoked, or has expired", "invalid_api_key")
        return known


def require_scope(key: ApiKey | None, needed: KeyScope) -> None:
    """Raise `HttpError` (403) for a key without this scope. Without keys, this machine may do everything."""
    if key is not None and needed not in key.scopes:
        raise HttpError(
            403,
            f"this needs the scope {needed!r}, and the key {key.name} ({key.id}) has {', '.join(key.scopes)}: "
            f"use another key, or have it added (batchwright keys update {key.id} --scopes …)",
            kind="permission_error",
            code="missing_scope",
        )


def is_public(path: str) -> bool:
    """Return whether a path is answered without a key."""
    return path in PUBLIC or path.startswith(PUBLIC_FOLDER)


def refuse_strangers(headers: Headers, origins: Collection[str] = ()) -> None:
    """Raise `HttpError` (403) for a request that a browser sends for a page of another site.

    Pages of `origins` are allowed, if their browser reached the service under a name of this machine.
    """
    host = headers.get("host", "")
    try:
        hostname = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        hostname = ""
    if not is_loopback(hostname):
        raise _forbidden(
            f"Host {shown(host)} is not this machine; other hosts need an API key: batchwright keys create"
        )
    origin = headers.get("origin")
    if origin is not None and origin.lower() in origins:
        return
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise _forbidden(f"Origin {shown(origin)} is not this service")
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise _forbidden("a page of another site may not use this service")


def _unauthorized(message: str, code: str) -> HttpError:
    return HttpError(401, message, kind="authentication_error", code=code, headers={"www-authenticate": "Bearer"})


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, kind="permission_error", code="forbidden")
