"""`batchwright quotas`: limits of tenants and keys, and how much of them is used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from batchwright.cli.store_options import StoreFlags, settings_with, store_command, with_local_store
from batchwright.cli.tables import print_table
from batchwright.errors import InvalidRequest
from batchwright.limiting.quotas import NAMES, UNLIMITED, Quotas
from batchwright.service.access.api_keys import require_name

if TYPE_CHECKING:
    from batchwright.store.store import Store

app = typer.Typer(name="quotas", help="Limit what tenants and keys may use.", no_args_is_help=True)

_LIMITS = f"NAME=VALUE, NAME being {', '.join(NAMES)}; NAME=none removes the limit."


@store_command(app, "set")
def set_quotas(
    flags: StoreFlags,
    tenant: Annotated[str, typer.Option(help="Tenant whose limits are set.", show_default=False)],
    limits: Annotated[list[str] | None, typer.Argument(metavar="[LIMIT]…", help=_LIMITS, show_default=False)] = None,
    weight: Annotated[
        float | None, typer.Option(help="Share of what batches get, relative to other tenants (1).", show_default=False)
    ] = None,
) -> None:
    """Limit what all keys of a tenant use together. A running service notices within a few seconds."""
    require_name("tenant", tenant)
    if not limits and weight is None:
        raise InvalidRequest("nothing to change: give NAME=VALUE, or --weight")

    async def change(store: Store) -> Quotas:
        before = (await store.tenant_quotas()).get(tenant, UNLIMITED)
        changed = replace(before, **read_limits(limits or ()))
        await store.set_tenant_quotas(tenant, changed, weight)
        return changed

    settings = settings_with(flags)
    changed = with_local_store(settings, change, audit=lambda _: ("quotas.set", tenant))
    typer.echo(f"tenant {tenant}: {shown(changed)}", err=True)


@store_command(app, "list")
def list_quotas(flags: StoreFlags) -> None:
    """Show the limits of tenants and keys that have some, what they use of the store, and weights other than 1."""

    async def found(store: Store) -> list[tuple[str, ...]]:
        limited: list[tuple[str, str, str | None, Quotas]] = [
            (f"tenant {tenant}", tenant, None, quotas) for tenant, quotas in (await store.tenant_quotas()).items()
        ]
        limited += [
            (f"key {key.id} ({key.name})", key.tenant, key.id, key.quotas)
            for key in await store.keys()
            if key.quotas != UNLIMITED and key.revoked_at is None
        ]
        rows: list[tuple[str, ...]] = []
        for whose, tenant, key_id, quotas in limited:
            use = await store.quota_use(tenant, key_id)
            used = {name: f"{getattr(use, name):,} of " for name in type(use).__dataclass_fields__}
            rows += [(whose, name, f"{used.get(name, '')}{limit:,}") for name, limit in quotas.as_values().items()]
        weights = await store.tenant_weights()
        return rows + [(f"tenant {tenant}", "weight", f"{weight:g}") for tenant, weight in sorted(weights.items())]

    rows = with_local_store(settings_with(flags), found)
    print_table(("whose", "quota", "limit"), rows)


def read_limits(limits: Iterable[str]) -> dict[str, int | None]:
    """Return the limits that `NAME=VALUE` texts give, by name; None removes a limit. Raises `InvalidRequest`."""
    found: dict[str, int | None] = {}
    for limit in limits:
        name, separator, text = limit.partition("=")
        if name not in NAMES or not separator:
            raise InvalidRequest(f"quota {limit!r}: must be NAME=VALUE; the names are {', '.join(NAMES)}")
        found[name] = None if text == "none" else _value(name, text)
    return found


def shown(quotas: Quotas) -> str:
    """Return limits in one line."""
    return ", ".join(f"{name}={value}" for name, value in quotas.as_values().items()) or "no limits of its own"


def _value(name: str, text: str) -> int:
    """Return a limit as a number; bytes may be given with a unit."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text)) if name == "storage_bytes" else int(text)
    except (ValidationError, ValueError):
        example = "a size such as 10GB" if name == "storage_bytes" else "a whole number"
        raise InvalidRequest(f"{name}={text}: must be {example}, or none", param=name) from None
