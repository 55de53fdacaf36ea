"""`batchwright keys`: API keys, made, listed and revoked in the store that the service uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import typer

from batchwright.cli.store_options import (
    ConfigOption,
    DatabaseOption,
    DataOption,
    StoreFlags,
    open_local_store,
    settings_with,
)
from batchwright.cli.tables import print_table
from batchwright.jobs.service.keys import DEFAULT_TENANT, SEEN_WITHIN, ApiKeys

_T = TypeVar("_T")

app = typer.Typer(name="keys", help="Make, list and revoke API keys.", no_args_is_help=True)

TenantOption = Annotated[str, typer.Option("--tenant", help="Whose files, batches and webhooks the key opens.")]


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="What the key is for, to tell it from others.", show_default=False)],
    tenant: TenantOption = DEFAULT_TENANT,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a key and print it. It is shown this once and cannot be found out later."""
    record, key = _with_keys(StoreFlags(data, database, config), lambda keys: keys.create(name, tenant), create=True)
    typer.echo(f"{record.id} for tenant {record.tenant}; keep this key, it is not shown again:", err=True)
    typer.echo(key)


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only those of this tenant.")] = None,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Show all keys, revoked ones too, by their first characters."""
    rows = []
    for key in _with_keys(StoreFlags(data, database, config), lambda keys: keys.keys(tenant)):
        revoked = "" if key.revoked_at is None else when(key.revoked_at)
        rows.append((key.id, key.name, key.tenant, f"{key.prefix}…", when(key.created_at), revoked))
    print_table(("id", "name", "tenant", "key", "created", "revoked"), rows)


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it: key_….", show_default=False)],
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a key worthless. A service that is running notices within a few seconds."""
    _with_keys(StoreFlags(data, database, config), lambda keys: keys.revoke(key_id))
    typer.echo(f"{key_id} is revoked; running services refuse it within {SEEN_WITHIN:g} s", err=True)


def when(time: float) -> str:
    """A Unix time for people to read, in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _with_keys(flags: StoreFlags, work: Callable[[ApiKeys], Awaitable[_T]], *, create: bool = False) -> _T:
    """What `work` returns. `create`: a store that is not there yet is made."""

    async def main() -> _T:
        async with open_local_store(settings_with(flags), create=create) as store:
            return await work(ApiKeys(store))

    return asyncio.run(main())
