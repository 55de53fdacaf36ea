"""`/v1/admin`: API keys and quotas of all tenants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Path, Query
from pydantic import ConfigDict, Field, field_validator

from batchwright.limiting.quotas import UNLIMITED, Quotas, of_values
from batchwright.server.http.audit_trail import Deed, audited
from batchwright.server.http.context import ServicesOf, needs
from batchwright.server.http.json_bodies import JsonRoute
from batchwright.server.routes.parameters import KeyId
from batchwright.service.access.api_keys import DEFAULT_OVERLAP, DEFAULT_SCOPES, DEFAULT_TENANT, require_name
from batchwright.store.records import ApiKey, KeyScope
from batchwright.wire.api_model import ApiModel
from batchwright.wire.fields import DEFAULT_PRIORITY

router = APIRouter(prefix="/v1/admin", tags=["Administration"], dependencies=[needs("admin")], route_class=JsonRoute)

_EXACT = ConfigDict(extra="forbid", strict=True)
"""Takes neither `true` for 1 nor `"5"` for 5: limits are not guessed."""
_Limit = Annotated[int, Field(ge=1, le=2**53)]


async def tenant_name_of(tenant: Annotated[str, Path(description="Name of the tenant.")]) -> str:
    """Return the tenant in the path. Raises `InvalidRequest`."""
    return require_name("tenant", tenant)


TenantName = Annotated[str, Depends(tenant_name_of)]


class QuotaValues(ApiModel):
    """Limits; null means no limit here."""

    model_config = _EXACT

    storage_bytes: _Limit | None = None
    enqueued_lines: _Limit | None = None
    enqueued_tokens: _Limit | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent_requests: _Limit | None = None

    def as_quotas(self) -> Quotas:
        return of_values(self.model_dump())


class TenantLimits(QuotaValues):
    """Limits of a tenant, and its share of what batches get, which is left unchanged by default."""

    weight: Annotated[float, Field(ge=0.01, le=1000.0)] | None = None


class KeyObject(ApiModel):
    """A key, without its secret, which is not stored. Times are Unix seconds."""

    id: str
    object: str = "api_key"
    tenant: str
    name: str
    prefix: str
    """The first characters of the secret."""
    scopes: list[KeyScope]
    weight: float
    best_priority: int | None
    quotas: QuotaValues
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None
    previous_until: int | None
    """Time until which the secret before the last rotation works."""

    @classmethod
    def of(cls, key: ApiKey, **more: Any) -> Self:
        times = ("created_at", "expires_at", "revoked_at", "last_used_at", "previous_until")
        values: dict[str, Any] = {name: getattr(key, name) for name in ApiKey.__dataclass_fields__}
        values |= {name: None if values[name] is None else int(values[name]) for name in times}
        values |= {"scopes": list(key.scopes), "quotas": QuotaValues(**key.quotas.as_values())}
        return cls(**values, **more)


class NewKeyObject(KeyObject):
    """A key with its secret, which is shown only once."""

    secret: str


class KeyList(ApiModel):
    """Keys, the newest first, with revoked ones."""

    object: str = "list"
    data: list[KeyObject]


class KeyCreate(ApiModel):
    """Properties of a new key."""

    model_config = _EXACT

    name: str
    tenant: str = DEFAULT_TENANT
    scopes: list[KeyScope] = Field(default=list(DEFAULT_SCOPES))
    expires_at: float | None = None
    weight: float = 1.0
    best_priority: int | None = DEFAULT_PRIORITY
    quotas: QuotaValues = QuotaValues()


class KeyUpdate(ApiModel):
    """Changes to a key. What is left out, of its quotas too, stays as it is."""

    model_config = _EXACT

    name: str | None = None
    scopes: list[KeyScope] | None = None
    expires_at: float | None = None
    weight: float | None = None
    best_priority: int | None = None
    quotas: QuotaValues | None = None

    @field_validator("name", "scopes", "weight", "quotas")
    @classmethod
    def _require_value(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("null is no value of it: leave it out, and it stays as it is")
        return value


class KeyRotate(ApiModel):
    """Options of the replacement of a secret."""

    model_config = _EXACT

    overlap_seconds: Annotated[float, Field(ge=0.0)] = DEFAULT_OVERLAP
    """Time for which the old secret still works."""


class TenantQuotas(ApiModel):
    """Limits of a tenant, and its use of what the store counts."""

    object: str = "quotas"
    tenant: str
    quotas: QuotaValues
    weight: float
    """Share of what batches get, relative to other tenants."""
    used: dict[str, int]


class TenantQuotasList(ApiModel):
    """Quotas of the tenants that have limits or a weight of their own."""

    object: str = "list"
    data: list[TenantQuotas]
    defaults: QuotaValues
    """Limits of all other tenants."""


@router.get("/keys")
async def list_keys(
    services: ServicesOf, tenant: Annotated[str | None, Query(description="Only keys of this tenant.")] = None
) -> KeyList:
    """List the keys of all tenants, or of one."""
    if tenant is not None:
        require_name("tenant", tenant)
    return KeyList(data=[KeyObject.of(key) for key in await services.keys.keys(tenant)])


@router.post("/keys")
async def create_key(
    body: KeyCreate, services: ServicesOf, deed: Annotated[Deed, audited("key.create")]
) -> NewKeyObject:
    """Create a key. Its secret is in the answer, and nowhere else."""
    given = {
        name: getattr(body, name) for name in ("name", "tenant", "scopes", "expires_at", "weight", "best_priority")
    }
    key, secret = await services.keys.create(**given, quotas=body.quotas.as_quotas())
    deed.object = key.id
    return NewKeyObject.of(key, secret=secret)


@router.get("/keys/{key_id}")
async def retrieve_key(key_id: KeyId, services: ServicesOf) -> KeyObject:
    """Show a key."""
    return KeyObject.of(await services.keys.key(key_id))


@router.post("/keys/{key_id}", dependencies=[audited("key.update", "key_id")])
async def update_key(key_id: KeyId, body: KeyUpdate, services: ServicesOf) -> KeyObject:
    """Change a key. Null as `expires_at` means never, as `best_priority` any."""
    changes = {name: getattr(body, name) for name in body.model_fields_set}
    if body.quotas is not None:
        changes["quotas"] = body.quotas.model_dump(exclude_unset=True)
    return KeyObject.of(await services.keys.update(key_id, changes))


@router.post("/keys/{key_id}/rotate", dependencies=[audited("key.rotate", "key_id")])
async def rotate_key(key_id: KeyId, services: ServicesOf, body: KeyRotate | None = None) -> NewKeyObject:
    """Give a key a new secret; the old one works for the overlap, by default a day."""
    overlap = DEFAULT_OVERLAP if body is None else body.overlap_seconds
    key, secret = await services.keys.rotate(key_id, overlap)
    return NewKeyObject.of(key, secret=secret)


@router.delete("/keys/{key_id}", dependencies=[audited("key.revoke", "key_id")])
async def revoke_key(key_id: KeyId, services: ServicesOf) -> KeyObject:
    """Revoke a key. It stays on the list."""
    await services.keys.revoke(key_id)
    return KeyObject.of(await services.keys.key(key_id))


@router.get("/quotas")
async def list_quotas(services: ServicesOf) -> TenantQuotasList:
    """List the limits and weights of tenants that have their own."""
    weights = await services.store.tenant_weights()
    limited = dict.fromkeys(weights, UNLIMITED) | await services.store.tenant_quotas()
    data = [await _quotas_of(services, tenant, quotas, weights) for tenant, quotas in sorted(limited.items())]
    return TenantQuotasList(data=data, defaults=QuotaValues(**services.limits.default_quotas.as_values()))


@router.get("/quotas/{tenant}")
async def retrieve_quotas(tenant: TenantName, services: ServicesOf) -> TenantQuotas:
    """Show a tenant's own limits."""
    quotas = (await services.store.tenant_quotas()).get(tenant, UNLIMITED)
    return await _quotas_of(services, tenant, quotas, await services.store.tenant_weights())


@router.put("/quotas/{tenant}", dependencies=[audited("quotas.set", "tenant")])
async def set_quotas(tenant: TenantName, body: TenantLimits, services: ServicesOf) -> TenantQuotas:
    """Replace the limits of a tenant. The default holds for each that is not given."""
    quotas = body.as_quotas()
    await services.store.set_tenant_quotas(tenant, quotas, body.weight)
    services.quotas.refresh()
    return await _quotas_of(services, tenant, quotas, await services.store.tenant_weights())


async def _quotas_of(services: ServicesOf, tenant: str, quotas: Quotas, weights: Mapping[str, float]) -> TenantQuotas:
    use = await services.store.quota_use(tenant)
    used = {name: getattr(use, name) for name in type(use).__dataclass_fields__}
    shown = QuotaValues(**quotas.as_values())
    return TenantQuotas(tenant=tenant, quotas=shown, weight=weights.get(tenant, 1.0), used=used)
