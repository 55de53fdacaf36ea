"""`batchwright webhooks`: the addresses that are notified when a tenant's batches end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from batchwright.cli.keys import TenantOption
from batchwright.cli.store_options import StoreFlags, settings_with, store_command, with_local_store
from batchwright.cli.tables import print_table, when
from batchwright.service.access.api_keys import DEFAULT_TENANT

if TYPE_CHECKING:
    from batchwright.service.webhooks.webhook_service import Webhooks
    from batchwright.store.store import Store

_T = TypeVar("_T")

app = typer.Typer(
    name="webhooks", help="Manage the addresses that are notified when batches end.", no_args_is_help=True
)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it: wh_….", show_default=False)]


@store_command(app, "create")
def create(
    flags: StoreFlags,
    url: Annotated[str, typer.Argument(help="Where the messages are sent: https://host/path.", show_default=False)],
    tenant: TenantOption = DEFAULT_TENANT,
    webhook_allow: Annotated[
        str | None,
        typer.Option(
            help="As of `batchwright serve`: hosts and networks that need not be global (BATCHWRIGHT_WEBHOOK_ALLOW).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Create a webhook and print the secret that its messages are signed with."""
    webhook = _with_webhooks(
        flags,
        lambda webhooks: webhooks.create(tenant, url),
        webhook_allow,
        create=True,
        audit=lambda made: ("webhook.create", made.id),
    )
    typer.echo(f"{webhook.id} for tenant {tenant}; the receiver checks signatures with this secret:", err=True)
    typer.echo(webhook.secrets[0])


@store_command(app, "list")
def list_webhooks(flags: StoreFlags, tenant: TenantOption = DEFAULT_TENANT) -> None:
    """Show the webhooks of a tenant."""
    found = _with_webhooks(flags, lambda webhooks: webhooks.webhooks(tenant))
    rows = [(each.id, each.url, when(each.created_at), when(each.disabled_at)) for each in found]
    print_table(("id", "url", "created", "turned off"), rows)


@store_command(app, "rotate")
def rotate(flags: StoreFlags, webhook_id: IdArgument, tenant: TenantOption = DEFAULT_TENANT) -> None:
    """Give a webhook a new secret and print it. Messages carry the old signature as well, until the next rotation."""
    webhook = _with_webhooks(
        flags, lambda webhooks: webhooks.rotate(tenant, webhook_id), audit=lambda _: ("webhook.rotate", webhook_id)
    )
    typer.echo(webhook.secrets[0])


@store_command(app, "secret")
def secret(
    flags: StoreFlags,
    tenant: TenantOption = DEFAULT_TENANT,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="Make a new one first. Messages carry the old signature as well, until the next rotation."
        ),
    ] = False,
) -> None:
    """Print the secret that messages to a request's own callback_url are signed with."""
    typer.echo(
        _with_webhooks(
            flags,
            lambda webhooks: webhooks.rotate_callback_secret(tenant) if rotate else webhooks.callback_secret(tenant),
            audit=(lambda _: ("webhook.secret.rotate", tenant)) if rotate else None,
        )
    )


@store_command(app, "disable")
def disable(flags: StoreFlags, webhook_id: IdArgument, tenant: TenantOption = DEFAULT_TENANT) -> None:
    """Turn a webhook off; its pending messages are given up."""
    _with_webhooks(
        flags, lambda webhooks: webhooks.disable(tenant, webhook_id), audit=lambda _: ("webhook.disable", webhook_id)
    )


@store_command(app, "enable")
def enable(flags: StoreFlags, webhook_id: IdArgument, tenant: TenantOption = DEFAULT_TENANT) -> None:
    """Turn a webhook on again, for batches that end from now on."""
    _with_webhooks(
        flags, lambda webhooks: webhooks.enable(tenant, webhook_id), audit=lambda _: ("webhook.enable", webhook_id)
    )


@store_command(app, "delete")
def delete(flags: StoreFlags, webhook_id: IdArgument, tenant: TenantOption = DEFAULT_TENANT) -> None:
    """Remove a webhook; its pending messages are given up."""
    _with_webhooks(
        flags, lambda webhooks: webhooks.delete(tenant, webhook_id), audit=lambda _: ("webhook.delete", webhook_id)
    )


@store_command(app, "failed")
def failed(
    flags: StoreFlags,
    tenant: TenantOption = DEFAULT_TENANT,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most messages to show.")] = 100,
) -> None:
    """Show the messages that were given up, the newest first, and why."""
    rows = []
    for delivery, reason in _with_webhooks(flags, lambda webhooks: webhooks.failed(tenant, limit)):
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
    """Return what `work` returns; `create` and `audit` are those of `with_local_store`."""
    settings = settings_with(flags, webhook_allow=webhook_allow)
    # Imported only now: these need the extra `server`, without which the command line has to start.
    from batchwright.service.webhooks.addresses import AllowList
    from batchwright.service.webhooks.sender import Sender
    from batchwright.service.webhooks.webhook_service import Webhooks

    async def sending(store: Store) -> _T:
        sender = Sender(AllowList.parse(settings.webhook_allow))
        try:
            return await work(Webhooks(store, sender))
        finally:
            sender.close()

    return with_local_store(settings, sending, create=create, audit=audit)
