"""`batchwright keys`: create, list, change and revoke API keys in the store that the service uses."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import typer

from batchwright.cli.quotas import read_limits, shown
from batchwright.cli.store_options import StoreFlags, settings_with, store_command, with_local_store
from batchwright.cli.tables import print_table, when
from batchwright.errors import InvalidRequest
from batchwright.limiting.quotas import NAMES, UNLIMITED, Quotas
from batchwright.service.access.api_keys import (
    DEFAULT_SCOPES,
    DEFAULT_TENANT,
    SCOPES,
    SEEN_WITHIN,
    ApiKeys,
    require_name,
)
from batchwright.service.batches.batch_checks import duration_seconds
from batchwright.store.records import ApiKey
from batchwright.wire.fields import DEFAULT_PRIORITY

_T = TypeVar("_T")

app = typer.Typer(name="keys", help="Create, list, change and revoke API keys.", no_args_is_help=True)

TenantOption = Annotated[str, typer.Option(help="Tenant that owns the files, batches and webhooks.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it: key_….", show_default=False)]
QuotaOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help=f"A limit of its own: {', '.join(NAMES)}.", show_default=False),
]
_EXPIRES = "When the key expires: a duration (90d, 12h) or a date in UTC (2030-01-31)"
_SCOPES = f"Scopes, separated by commas: {', '.join(SCOPES)}."
_WEIGHT = "Share of what online requests get, relative to other keys."
_BEST_PRIORITY = "The smallest `priority` that its requests get; smaller ones are raised to it."


@store_command(app, "create")
def create(
    flags: StoreFlags,
    name: Annotated[
        str, typer.Argument(help="What the key is for, to distinguish it from others.", show_default=False)
    ],
    tenant: TenantOption = DEFAULT_TENANT,
    expires: Annotated[str | None, typer.Option(help=f"{_EXPIRES}. Default: never.")] = None,
    scopes: Annotated[str, typer.Option(help=_SCOPES)] = ",".join(DEFAULT_SCOPES),
    weight: Annotated[float, typer.Option(help=_WEIGHT)] = 1.0,
    best_priority: Annotated[int, typer.Option(help=_BEST_PRIORITY)] = DEFAULT_PRIORITY,
    quota: QuotaOption = None,
) -> None:
    """Create a key and print it. It is shown only once and cannot be recovered later."""
    expires_at = None if expires is None else _time_of(expires)
    record, secret = _with_keys(
        flags,
        lambda keys: keys.create(
            name,
            tenant,
            expires_at=expires_at,
            scopes=_listed(scopes),
            weight=weight,
            best_priority=best_priority,
            quotas=Quotas(**read_limits(quota or ())),
        ),
        create=True,
        audit=lambda made: ("key.create", made[0].id),
    )
    typer.echo(f"{record.id} for tenant {record.tenant}; keep this key, it is not shown again:", err=True)
    typer.echo(secret)


@store_command(app, "list")
def list_keys(
    flags: StoreFlags, tenant: Annotated[str | None, typer.Option(help="Only those of this tenant.")] = None
) -> None:
    """Show all keys by their first characters, including revoked ones."""
    if tenant is not None:
        require_name("tenant", tenant)
    now = time.time()
    rows = [
        (
            key.id,
            key.name,
            key.tenant,
            f"{key.prefix}…",
            _state(key, now),
            ",".join(key.scopes),
            f"{key.weight:g}",
            "any" if key.best_priority is None else str(key.best_priority),
            shown(key.quotas) if key.quotas != UNLIMITED else "",
            when(key.created_at),
            when(key.expires_at, "never"),
            when(key.last_used_at, "never"),
        )
        for key in _with_keys(flags, lambda keys: keys.keys(tenant))
    ]
    titles = (
        "id", "name", "tenant", "key", "state", "scopes", "weight", "best priority", "quotas", "created", "expires",
        "last used",
    )  # fmt: skip
    print_table(titles, rows)


@store_command(app, "update")
def update(
    flags: StoreFlags,
    key_id: IdArgument,
    name: Annotated[str | None, typer.Option(help="What the key is for.", show_default=False)] = None,
    expires: Annotated[str | None, typer.Option(help=f"{_EXPIRES}, or: never.", show_default=False)] = None,
    scopes: Annotated[str | None, typer.Option(help=_SCOPES, show_default=False)] = None,
    weight: Annotated[float | None, typer.Option(help=_WEIGHT, show_default=False)] = None,
    best_priority: Annotated[int | None, typer.Option(help=_BEST_PRIORITY, show_default=False)] = None,
    quota: QuotaOption = None,
) -> None:
    """Change what a key may do, and until when. A running service notices within a few seconds."""
    given: dict[str, Any] = {"name": name, "weight": weight, "best_priority": best_priority}
    changes = {field: value for field, value in given.items() if value is not None}
    if scopes is not None:
        changes["scopes"] = _listed(scopes)
    if expires is not None:
        changes["expires_at"] = None if expires == "never" else _time_of(expires)
    if quota:
        changes["quotas"] = read_limits(quota)
    if not changes:
        raise InvalidRequest(
            "nothing to change: give --name, --expires, --scopes, --weight, --best-priority or --quota"
        )

    _with_keys(flags, lambda keys: keys.update(key_id, changes), audit=lambda _: ("key.update", key_id))
    typer.echo(f"{key_id} is changed; running services heed it within {SEEN_WITHIN:g} s", err=True)


@store_command(app, "rotate")
def rotate(
    flags: StoreFlags,
    key_id: IdArgument,
    overlap: Annotated[
        str, typer.Option(help="How long the old secret still works: 24h, 30m, 7d; 0s for not at all.")
    ] = "24h",
) -> None:
    """Give a key a new secret and print it. The old one works during the overlap; id, scopes and limits stay."""
    seconds = duration_seconds(overlap)
    if seconds is None:
        raise InvalidRequest(f"--overlap {overlap}: must be a duration such as 90d, 12h, 30m or 60s", param="overlap")
    record, secret = _with_keys(
        flags, lambda keys: keys.rotate(key_id, seconds), audit=lambda _: ("key.rotate", key_id)
    )
    until = when(record.previous_until or 0.0)
    typer.echo(
        f"the old secret of {record.id} works until {until} UTC; keep this one, it is not shown again:", err=True
    )
    typer.echo(secret)


@store_command(app, "revoke")
def revoke(key_id: IdArgument, flags: StoreFlags) -> None:
    """Revoke a key. A running service notices within a few seconds."""
    _with_keys(flags, lambda keys: keys.revoke(key_id), audit=lambda _: ("key.revoke", key_id))
    typer.echo(f"{key_id} is revoked; running services refuse it within {SEEN_WITHIN:g} s", err=True)


def _state(key: ApiKey, now: float) -> str:
    if key.revoked_at is not None:
        return f"revoked {when(key.revoked_at)}"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired"
    if key.previous_until is not None and key.previous_until > now:
        return f"valid, old secret until {when(key.previous_until)}"
    return "valid"


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _time_of(text: str) -> float:
    """Return the Unix time of a date, or of a duration from now."""
    if (seconds := duration_seconds(text)) is not None:
        return time.time() + seconds
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise InvalidRequest(
            f"--expires {text}: must be a duration such as 90d or 12h, or a date such as 2030-01-31", param="expires"
        ) from None


def _with_keys(
    flags: StoreFlags,
    work: Callable[[ApiKeys], Awaitable[_T]],
    *,
    create: bool = False,
    audit: Callable[[_T], tuple[str, str]] | None = None,
) -> _T:
    """Return what `work` returns; `create` and `audit` are those of `with_local_store`."""
    return with_local_store(settings_with(flags), lambda store: work(ApiKeys(store)), create=create, audit=audit)
