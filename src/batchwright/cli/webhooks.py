"""`batchwright webhooks`: who is told how a tenant's batches end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from batchwright.cli.keys import TenantOption, when
from batchwright.cli.store_options import (
    ConfigOption,
    DatabaseOption,
    DataOption,
    StoreFlags,
    settings_with,
    with_local_store,
)
from batchwright.cli.tables import print_table
from batchwright.service.access.api_keys import DEFAULT_TENANT

if TYPE_CHECKING:
    from batchwright.service.webhooks.webhook_service import Webhooks
    from batchwright.store.store import Store

_T = TypeVar("_T")

app = typer.Typer(name="webhooks", help="Say who is told how batches end.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it: wh_….", show_default=False)]


@app.command("create")
def create(
    url: Annotated[str, typer.Argument(help="Where the messages are sent: https://host/path.", show_default=False)],
    tenant: TenantOption = DEFAULT_TENANT,
    webhook_allow: Annotated[
        str | None,
        typer.Option(
            "--webhook-allow",
            help="As of `batchwright serve`: hosts and networks that need not be global (BATCHWRIGHT_WEBHOOK_ALLOW).",
            show_default=False,
        ),
    ] = None,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a webhook and print the secret that its messages are signed with."""
    webhook = _with_webhooks(
        StoreFlags(data, database, config),
        lambda webhooks: webhooks.create(tenant, url),
        webhook_allow,
        create=True,
        audit=lambda made: ("webhook.create", made.id),
    )
    typer.echo(f"{webhook.id} for tenant {tenant}; the receiver checks signatures with this secret:", err=True)
    typer.echo(webhook.secrets[0])


@app.command("list")
def list_webhooks(
    tenant: TenantOption = DEFAULT_TENANT,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the webhooks of a tenant."""
    rows = []
    for webhook in _with_webhooks(StoreFlags(data, database, config), lambda webhooks: webhooks.webhooks(tenant)):
        off = "" if webhook.disabled_at is None else when(webhook.disabled_at)
        rows.append((webhook.id, webhook.url, when(webhook.created_at), off))
    print_table(("id", "url", "created", "turned off"), rows)


@app.command("rotate")
def rotate(
    webhook_id: IdArgument,
    tenant: TenantOption = DEFAULT_TENANT,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Give a webhook a new secret and print it. Messages bear the old signature as well, until the next rotation."""
    webhook = _with_webhooks(
        StoreFlags(data, database, config),
        lambda webhooks: webhooks.rotate(tenant, webhook_id),
        audit=lambda _: ("webhook.rotate", webhook_id),
    )
    typer.echo(webhook.secrets[0])


@app.command("secret")
def secret(
    tenant: TenantOption = DEFAULT_TENANT,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="Make a new one first. Messages bear the old signature as well, until the next rotation."
        ),
    ] = False,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Print the secret that messages to a request's own callback_url are signed with."""
    flags = StoreFlags(data, database, config)
    if rotate:
        typer.echo(
            _with_webhooks(
                flags,
                lambda webhooks: webhooks.rotate_callback_secret(tenant),
                audit=lambda _: ("webhook.secret.rotate", tenant),
            )
        )
    else:
        typer.echo(_with_webhooks(flags, lambda webhooks: webhooks.callback_secret(tenant)))


@app.command("disable")
def disable(
    webhook_id: IdArgument,
    tenant: TenantOption = DEFAULT_TENANT,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Turn a webhook off; messages that wait for it are given up."""
    _with_webhooks(
        StoreFlags(data, database, config),
        lambda webhooks: webhooks.disable(tenant, webhook_id),
        audit=lambda _: ("webhook.disable", webhook_id),
    )


@app.command("enable")
def enable(
    webhook_id: IdArgument,
    tenant: TenantOption = DEFAULT_TENANT,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Turn a webhook on again, for batches that end from now on."""
    _with_webhooks(
        StoreFlags(data, database, config),
        lambda webhooks: webhooks.enable(tenant, webhook_id),
        audit=lambda _: ("webhook.enable", webhook_id),
    )


@app.command("delete")
def delete(
    webhook_id: IdArgument,
    tenant: TenantOption = DEFAULT_TENANT,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Remove a webhook; messages that wait for it are given up."""
    _with_webhooks(
        StoreFlags(data, database, config),
        lambda webhooks: webhooks.delete(tenant, webhook_id),
        audit=lambda _: ("webhook.delete", webhook_id),
    )


@app.command("failed")
def failed(
    tenant: TenantOption = DEFAULT_TENANT,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Most messages to show.")] = 100,
    data: DataOption = None,
    database: DatabaseOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the messages that were given up, the newest first, and why."""
    rows = []
    for delivery, reason in _with_webhooks(
        StoreFlags(data, database, config), lambda webhooks: webhooks.failed(tenant, limit)
    ):
        created, tries = when(delivery.created_at), str(delivery.tries)
        rows.append((delivery.event_id, delivery.type, delivery.batch_id, delivery.url, created, tries, reason))
    print_table(("event", "type", "batch", "url", "created", "tries", "reason"), rows)


def _with_webhooks(
    flags: StoreFlags,
    work: Callable[[Webhooks], Awaitable[_T]],
    webhook_allow: str | None = None,
    *,
    create: bool = False,
    audit: Callable[[_T], tuple[str, str]] | None = None,
) -> _T:
    """What `work` returns; `create` and `audit` as for `with_local_store`."""
    settings = settings_with(flags, webhook_allow=webhook_allow)
    # Only now: what sends webhooks comes with the extra `server`, and the command line starts without it.
    from batchwright.service.webhooks.allowed import AllowList
    from batchwright.service.webhooks.sender import Sender
    from batchwright.service.webhooks.webhook_service import Webhooks

    async def sending(store: Store) -> _T:
        sender = Sender(AllowList.parse(settings.webhook_allow))
        try:
            return await work(Webhooks(store, sender))
        finally:
            sender.close()

    return with_local_store(settings, sending, create=create, audit=audit)
