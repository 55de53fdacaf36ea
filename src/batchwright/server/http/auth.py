"""Who may ask: with a key its tenant; without any key in the store, programs on this machine only.

Without keys nothing proves who asks, so the service is bound to loopback, and what a web page from elsewhere could make
a browser send is refused: a Host that is not this machine (DNS rebinding), an Origin that is not this service (CSRF),
unless it is one of `cors_origins` by its name.
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

PUBLIC = frozenset({"/", "/health", "/ready", "/openapi.json", "/favicon.ico"})
"""Tell nothing of any tenant. The page at `/` is empty until its script has asked for data, with a key."""
ADMIN = "/v1/admin"
PUBLIC_FOLDER = "/dashboard/static/"


class AuthMiddleware:
    """Lets a request pass with its tenant and its key (None: no keys are used) in its state, or answers 401 or 403."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, loopback: bool, origins: Collection[str] = ()) -> None:
        """`loopback`: only this machine can reach the service. Elsewhere every request needs a key, come what may.

        `origins`: those whose pages need no key where nobody does. An asterisk in them stands for none.
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
            # An answer that goes on for long asks again.
            scope.setdefault("state", {}).update(key=key, tenant=tenant, authenticate=authenticate)
        await self._app(scope, receive, send)

    async def _authenticated(self, headers: Headers, path: str) -> ApiKey | None:
        """The key of a request, as things are now. Raises `HttpError` and `StoreUnavailable`."""
        if not self._loopback or await self._keys.required():
            return await self._by_key(headers)
        # Pages of other origins may use the service, and not give themselves keys to it.
        refuse_strangers(headers, () if path.startswith(ADMIN) else self._origins)
        return None

    async def _by_key(self, headers: Headers) -> ApiKey:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("give an API key: Authorization: Bearer <key>", "missing_api_key")
        known = await self._keys.recognize(key.strip())
        if known is None:
            raise _unauthorized("the API key is not known here, was revoked, or has expired", "invalid_api_key")
        return known


def require_scope(key: ApiKey | None, needed: KeyScope) -> None:
    """Raises `HttpError` (403) for a key without this scope. Where no keys are used, this machine may do everything."""
    if key is not None and needed not in key.scopes:
        raise HttpError(
            403,
            f"this needs the scope {needed!r}, and the key {key.name} ({key.id}) has {', '.join(key.scopes)}: "
            f"use another key, or have it added (batchwright keys update {key.id} --scopes …)",
            kind="permission_error",
            code="missing_scope",
        )


def is_public(path: str) -> bool:
    """Whether a path is answered without a key."""
    return path in PUBLIC or path.startswith(PUBLIC_FOLDER)


def refuse_strangers(headers: Headers, origins: Collection[str] = ()) -> None:
    """Raises `HttpError` (403) for what a browser sends on behalf of a page that is not this service's own.

    Pages of `origins` are let through; their browser must have reached the service under a name of this machine.
    """
    host = headers.get("host", "")
    if not is_loopback(_hostname(host)):
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


def _hostname(host: str) -> str:
    """Of a Host header, without its port; empty when it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _unauthorized(message: str, code: str) -> HttpError:
    return HttpError(401, message, kind="authentication_error", code=code, headers={"www-authenticate": "Bearer"})


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, kind="permission_error", code="forbidden")
