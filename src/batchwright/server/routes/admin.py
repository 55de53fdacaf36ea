"""`/v1/admin`: API keys and quotas, of all tenants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel, ConfigDict, Field, field_validator

from batchwright.errors import NotFound, shown
from batchwright.limiting.quotas import UNLIMITED, Quotas, of_values
from batchwright.server.http.audit_trail import Deed, audited
from batchwright.server.http.context import ServicesOf, needs
from batchwright.server.http.json_bodies import JsonRoute
from batchwright.service.access.api_keys import DEFAULT_OVERLAP, DEFAULT_SCOPES, DEFAULT_TENANT, require_name
from batchwright.store.records import ApiKey, KeyScope
from batchwright.wire.fields import DEFAULT_PRIORITY

router = APIRouter(prefix="/v1/admin", tags=["Administration"], dependencies=[needs("admin")], route_class=JsonRoute)

_KEY = re.compile(r"key_[0-9a-f]{24}")
_EXACT = ConfigDict(extra="forbid", strict=True)
"""`true` is no 1, nor `"5"` a 5: what limits others is not guessed."""
_Limit = Annotated[int, Field(ge=1, le=2**53)]


async def key_id_of(key_id: Annotated[str, Path(examples=["key_0123456789abcdef01234567"])]) -> str:
    """The id in the path. Raises `NotFound`."""
    if not _KEY.fullmatch(key_id):
        raise NotFound(f"no key {shown(key_id)}")
    return key_id


async def tenant_name_of(tenant: str) -> str:
    """The tenant in the path. Raises `InvalidRequest`."""
    return require_name("tenant", tenant)


KeyId = Annotated[str, Depends(key_id_of)]
TenantName = Annotated[str, Depends(tenant_name_of)]


class QuotaValues(BaseModel):
    """Limits; null: not limited here."""

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
    """Limits of a tenant; and its share of what batches get, which stays as it is where it is left out."""

    weight: Annotated[float, Field(ge=0.01, le=1000.0)] | None = None


class KeyObject(BaseModel):
    """A key; its secret is not kept. Times are Unix seconds."""

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
    """Until when the secret before the last rotation works."""

    @classmethod
    def values_of(cls, key: ApiKey) -> dict[str, Any]:
        times = ("created_at", "expires_at", "revoked_at", "last_used_at", "previous_until")
        values: dict[str, Any] = {name: getattr(key, name) for name in ApiKey.__dataclass_fields__}
        values |= {name: None if values[name] is None else int(values[name]) for name in times}
        return values | {"scopes": list(key.scopes), "quotas": QuotaValues(**key.quotas.as_values())}


class NewKeyObject(KeyObject):
    """A key with its secret, which is shown this once."""

    secret: str


class KeyList(BaseModel):
    """Keys, the newest first; revoked ones too."""

    object: str = "list"
    data: list[KeyObject]


class KeyCreate(BaseModel):
    """What a new key is to be."""

    model_config = _EXACT

    name: str
    tenant: str = DEFAULT_TENANT
    scopes: list[KeyScope] = list(DEFAULT_SCOPES)
    expires_at: float | None = None
    weight: float = 1.0
    best_priority: int | None = DEFAULT_PRIORITY
    quotas: QuotaValues = QuotaValues()


class KeyUpdate(BaseModel):
    """What is to change of a key; what is left out stays, also of its quotas."""

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


class KeyRotate(BaseModel):
    """How a secret is replaced."""

    model_config = _EXACT

    overlap_seconds: Annotated[float, Field(ge=0.0)] = DEFAULT_OVERLAP
    """For which the one before still works."""


class TenantQuotas(BaseModel):
    """Limits of a tenant, and what it uses of those that the store counts."""

    object: str = "quotas"
    tenant: str
    quotas: QuotaValues
    weight: float
    """Share of what batches get, relative to other tenants."""
    used: dict[str, int]


class TenantQuotasList(BaseModel):
    """Of the tenants that have limits of their own."""

    object: str = "list"
    data: list[TenantQuotas]
    defaults: QuotaValues
    """Of the others."""


@router.get("/keys")
async def list_keys(services: ServicesOf, tenant: str | None = None) -> KeyList:
    """The keys of all tenants, or of one."""
    if tenant is not None:
        require_name("tenant", tenant)
    return KeyList(data=[_shown(key) for key in await services.keys.keys(tenant)])


@router.post("/keys")
async def create_key(
    body: KeyCreate, services: ServicesOf, deed: Annotated[Deed, audited("key.create")]
) -> NewKeyObject:
    """Make a key. Its secret is in the answer, and nowhere else."""
    key, secret = await services.keys.create(
        body.name,
        body.tenant,
        expires_at=body.expires_at,
        scopes=body.scopes,
        weight=body.weight,
        best_priority=body.best_priority,
        quotas=body.quotas.as_quotas(),
    )
    deed.object = key.id
    return NewKeyObject(**KeyObject.values_of(key), secret=secret)


@router.get("/keys/{key_id}")
async def retrieve_key(key_id: KeyId, services: ServicesOf) -> KeyObject:
    """A key."""
    return _shown(await services.keys.key(key_id))


@router.post("/keys/{key_id}", dependencies=[audited("key.update", "key_id")])
async def update_key(key_id: KeyId, body: KeyUpdate, services: ServicesOf) -> KeyObject:
    """Change a key. `expires_at` and `best_priority` may be set to null: never, and any."""
    changes = {name: getattr(body, name) for name in body.model_fields_set}
    if body.quotas is not None:
        changes["quotas"] = body.quotas.model_dump(exclude_unset=True)
    return _shown(await services.keys.update(key_id, changes))


@router.post("/keys/{key_id}/rotate", dependencies=[audited("key.rotate", "key_id")])
async def rotate_key(key_id: KeyId, services: ServicesOf, body: KeyRotate | None = None) -> NewKeyObject:
    """Give a key another secret; the one before works for the overlap, a day unless told."""
    overlap = DEFAULT_OVERLAP if body is None else body.overlap_seconds
    key, secret = await services.keys.rotate(key_id, overlap)
    return NewKeyObject(**KeyObject.values_of(key), secret=secret)


@router.delete("/keys/{key_id}", dependencies=[audited("key.revoke", "key_id")])
async def revoke_key(key_id: KeyId, services: ServicesOf) -> KeyObject:
    """Make a key worthless. It stays on the list."""
    await services.keys.revoke(key_id)
    return _shown(await services.keys.key(key_id))


@router.get("/quotas")
async def list_quotas(services: ServicesOf) -> TenantQuotasList:
    """The limits and weights of tenants that have some of their own."""
    weights = await services.store.tenant_weights()
    limited = dict.fromkeys(weights, UNLIMITED) | await services.store.tenant_quotas()
    data = [await _quotas_of(services, tenant, quotas, weights) for tenant, quotas in sorted(limited.items())]
    return TenantQuotasList(data=data, defaults=QuotaValues(**services.limits.default_quotas.as_values()))


@router.get("/quotas/{tenant}")
async def retrieve_quotas(tenant: TenantName, services: ServicesOf) -> TenantQuotas:
    """The limits of a tenant that are its own."""
    quotas = (await services.store.tenant_quotas()).get(tenant, UNLIMITED)
    return await _quotas_of(services, tenant, quotas, await services.store.tenant_weights())


@router.put("/quotas/{tenant}", dependencies=[audited("quotas.set", "tenant")])
async def set_quotas(tenant: TenantName, body: TenantLimits, services: ServicesOf) -> TenantQuotas:
    """Replace the limits of a tenant. Where none is given, the default holds."""
    quotas = body.as_quotas()
    await services.store.set_tenant_quotas(tenant, quotas, body.weight)
    services.quotas.refresh()
    return await _quotas_of(services, tenant, quotas, await services.store.tenant_weights())


async def _quotas_of(services: ServicesOf, tenant: str, quotas: Quotas, weights: Mapping[str, float]) -> TenantQuotas:
    use = await services.store.quota_use(tenant)
    used = {name: getattr(use, name) for name in type(use).__dataclass_fields__}
    shown = QuotaValues(**quotas.as_values())
    return TenantQuotas(tenant=tenant, quotas=shown, weight=weights.get(tenant, 1.0), used=used)


def _shown(key: ApiKey) -> KeyObject:
    return KeyObject(**KeyObject.values_of(key))
