"""What routes are given: the services behind the application, and whose request it is."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from batchwright.server.services import Services


def services_of(request: Request) -> Services:
    """Those that `create_app` was given."""
    services: Services = request.app.state.services
    return services


def tenant_of(request: Request) -> str:
    """Set by `auth.Guard`, which no request to a route with a tenant passes by."""
    tenant: str = request.state.tenant
    return tenant


def request_id_of(request: Request) -> str:
    """Set by `middleware.Frame`."""
    request_id: str = request.state.request_id
    return request_id


needs_key = Depends(HTTPBearer(auto_error=False, scheme_name="key", description="A key of batchwright keys create."))
"""Tells it in the OpenAPI description; `auth.Guard` is who looks at the key."""

ServicesOf = Annotated[Services, Depends(services_of)]
Tenant = Annotated[str, Depends(tenant_of)]
RequestId = Annotated[str, Depends(request_id_of)]
