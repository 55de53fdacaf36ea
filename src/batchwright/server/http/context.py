"""Dependencies of routes: the services, the key, tenant and share of a request, and its quotas.

They are coroutine functions although they wait for nothing, because FastAPI calls other functions on a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from fastapi.security import HTTPBearer

from batchwright.inference.inference import Call
from batchwright.limiting.rates import Kind, Standing
from batchwright.request import Flow
from batchwright.server.http.auth import require_scope
from batchwright.server.http.middleware import ANSWER_HEADERS
from batchwright.service.access.online_quotas import Use, duration_text
from batchwright.service.composition import Services
from batchwright.service.observability.slo_classes import SLO_HEADER
from batchwright.store.records import ApiKey, KeyScope


async def services_of(request: Request) -> Services:
    """Return the services that `create_app` was given."""
    services: Services = request.app.state.services
    return services


async def tenant_of(request: Request) -> str:
    """Return the tenant, which `auth.AuthMiddleware` sets for every path that is not public."""
    tenant: str = request.state.tenant
    return tenant


async def key_of(request: Request) -> ApiKey | None:
    """Return the key of the request, which `auth.AuthMiddleware` sets; None where no keys are used."""
    key: ApiKey | None = request.state.key
    return key


@dataclass(frozen=True)
class ScopeCheck:
    """A dependency that raises `HttpError` (403) for a key without `scope`."""

    scope: KeyScope

    async def __call__(self, request: Request) -> None:
        self.require(request)

    def require(self, request: Request) -> None:
        """Raise `HttpError` if the key of the request lacks the scope."""
        require_scope(request.state.key, self.scope)


def needs(scope: KeyScope) -> Any:
    """Return a dependency of routes that answers 403 to a key without `scope`."""
    return Depends(ScopeCheck(scope))


async def request_id_of(request: Request) -> str:
    """Return the id that `middleware.RequestMiddleware` gave the request."""
    request_id: str = request.state.request_id
    return request_id


async def flow_of(request: Request) -> Flow:
    """Return the flow whose share of the model the request uses: its key's, or its own where no keys are used."""
    request_id, key = await request_id_of(request), await key_of(request)
    return Flow(request_id, request_id) if key is None else Flow(key.id, request_id, key.weight)


async def slo_named_by(
    # Not in the schema: only the settings say which names are valid.
    name: Annotated[str | None, Header(alias=SLO_HEADER, include_in_schema=False)] = None,
) -> str | None:
    """Return the class of service level objectives that the request names."""
    return name


needs_key = Depends(HTTPBearer(auto_error=False, scheme_name="key", description="A key of batchwright keys create."))
"""Mentions the key in the OpenAPI description; `auth.AuthMiddleware` checks it."""

ServicesOf = Annotated[Services, Depends(services_of)]
Key = Annotated[ApiKey | None, Depends(key_of)]
Tenant = Annotated[str, Depends(tenant_of)]
RequestId = Annotated[str, Depends(request_id_of)]
FlowOf = Annotated[Flow, Depends(flow_of)]
SloNamed = Annotated[str | None, Depends(slo_named_by)]


def within_quotas(services: Services, request: Request, *calls: Call) -> AbstractAsyncContextManager[Use]:
    """Hold what `calls` of one request use of its quotas, and add `x-ratelimit-*` headers to its answer.

    Raises `QuotaExceeded`.
    """

    def notify(standings: Mapping[Kind, Standing]) -> None:
        headers: dict[str, str] = {}
        for kind, standing in standings.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(standing.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(standing.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = duration_text(standing.reset)
        setattr(request.state, ANSWER_HEADERS, headers)

    return services.quotas.admitted(request.state.tenant, request.state.key, calls, notify)
