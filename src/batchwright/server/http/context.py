"""What routes are given: the services behind the application, and whose request it is.

These are coroutine functions, though none of them waits: FastAPI calls any other function on a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from batchwright.request import Flow
from batchwright.server.http.auth import require_scope
from batchwright.service.composition import Services
from batchwright.store.records import ApiKey, KeyScope


async def services_of(request: Request) -> Services:
    """Those that `create_app` was given."""
    services: Services = request.app.state.services
    return services


async def tenant_of(request: Request) -> str:
    """Set by `auth.AuthMiddleware`, which no request to a route with a tenant passes by."""
    tenant: str = request.state.tenant
    return tenant


async def key_of(request: Request) -> ApiKey | None:
    """The key that the request came with; None where no keys are used. Set by `auth.AuthMiddleware`."""
    key: ApiKey | None = request.state.key
    return key


@dataclass(frozen=True)
class ScopeCheck:
    """A dependency that raises `HttpError` (403) for a key without a scope."""

    scope: KeyScope

    async def __call__(self, request: Request) -> None:
        self.require(request)

    def require(self, request: Request) -> None:
        """Raises as a request would for which this is a dependency."""
        require_scope(request.state.key, self.scope)


def needs(scope: KeyScope) -> Any:
    """A dependency of routes: 403 for a key without this scope."""
    return Depends(ScopeCheck(scope))


async def request_id_of(request: Request) -> str:
    """Set by `middleware.RequestMiddleware`."""
    request_id: str = request.state.request_id
    return request_id


async def flow_of(request: Request) -> Flow:
    """Whose share of the model a request takes: that of its key; where no keys are used, one of its own."""
    request_id, key = await request_id_of(request), await key_of(request)
    return Flow(request_id, request_id) if key is None else Flow(key.id, request_id, key.weight)


needs_key = Depends(HTTPBearer(auto_error=False, scheme_name="key", description="A key of batchwright keys create."))
"""Tells it in the OpenAPI description; `auth.AuthMiddleware` is who looks at the key."""

ServicesOf = Annotated[Services, Depends(services_of)]
Key = Annotated[ApiKey | None, Depends(key_of)]
Tenant = Annotated[str, Depends(tenant_of)]
RequestId = Annotated[str, Depends(request_id_of)]
FlowOf = Annotated[Flow, Depends(flow_of)]
