"""Where the service keeps its state: the options that every command with a store has, and opening it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from batchwright.errors import BatchwrightError, InputError, MissingExtra

if TYPE_CHECKING:
    from stamina.instrumentation import RetryDetails

    from batchwright.service.files.blobs import Blobs
    from batchwright.service.settings import Settings
    from batchwright.store.store import Store

_T = TypeVar("_T")


def _folder(text: str) -> Path:
    # Such as an unset variable in a script: the current folder must be asked for.
    if not text:
        raise typer.BadParameter("'' names no folder: leave it out for the default, or give . for the current one")
    return Path(text)


DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        parser=_folder,
        metavar="FOLDER",
        help="Folder of the service's files (BATCHWRIGHT_DATA). Default: the platform's folder for user data.",
        show_default=False,
    ),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="SQLite file, or postgresql://… (BATCHWRIGHT_DATABASE). Default: batchwright.db in the data folder.",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file of settings, as `batchwright serve` takes it (BATCHWRIGHT_CONFIG).",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class StoreFlags:
    """The options that say where the store is, as they were given; None: not given."""

    data: Path | None = None
    database: str | None = None
    config: Path | None = None


def settings_with(flags: StoreFlags, **more: object) -> Settings:
    """The settings that `batchwright serve` would have with these flags, so that both find the same store.

    `more`: other flags, by the names of their settings.

    Raises `InputError` for a setting that cannot be, wherever it came from; `MissingExtra` without the extra `server`.
    """
    try:
        from stamina.instrumentation import set_on_retry_hooks

        from batchwright.service.setting_sources import load_settings
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"this command needs {error.name}, which comes with the extra: pip install 'batchwright[server]'"
        ) from error
    # Without a hook structlog prints each try to standard output, into the JSON and the results that go there.
    set_on_retry_hooks([_tell_of_retry])
    return load_settings({"data": flags.data, "database": flags.database, **more}, config=flags.config)


def write_audit(settings: Settings, action: str, what: str) -> None:
    """Write into the audit log that whoever works at this command line did `action` to `what`, an id or a name."""
    from batchwright.service.access.audit import AuditLog, operator

    log = AuditLog(settings.data / "audit", retention=settings.audit_retention)
    try:
        log.write(action, "done", object=what, **operator())
    except OSError as error:
        typer.echo(f"this is done, but it is not in the audit log: {error}", err=True)


def _tell_of_retry(details: RetryDetails) -> None:
    """What the driver of a database tries again within a second is not told; whoever waits for it is told of."""
    if isinstance(details.caused_by, BatchwrightError):
        typer.echo(f"{details.caused_by}; trying again", err=True)


@asynccontextmanager
async def open_local_store(settings: Settings, *, create: bool = False) -> AsyncIterator[Store]:
    """The store that these settings name, closed at the end.

    `create`: where there is none it is made, and that is said on standard error. Otherwise `InputError` is raised: what
    was named may be mistyped, and in a new store there is nothing to be found. Raises `StoreMismatch` where the data
    folder has files and there is no store, and `StoreUnavailable`.
    """
    from batchwright.service.files.paired_store import database_of, require_database
    from batchwright.store import open_store, shown_url

    database = database_of(settings.database, settings.data)
    is_new = not require_database(database, settings.data)
    if is_new and not create:
        raise InputError(
            f"there is no store at {shown_url(database)}: see to --data, --database and --config; `batchwright serve`, "
            "`keys create` and `jobs submit` make one"
        )
    if settings.database is None:
        # For its owner only: it holds secrets and what tenants uploaded.
        settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with open_store(database) as store:
        if is_new:
            typer.echo(f"made a new store at {shown_url(database)}", err=True)
        yield store


def with_local_store(
    settings: Settings,
    work: Callable[[Store], Awaitable[_T]],
    *,
    create: bool = False,
    audit: Callable[[_T], tuple[str, str]] | None = None,
) -> _T:
    """What `work` returns of the store that these settings name; `create` as for `open_local_store`.

    `audit`: action and object of what was done, from what `work` returned. Raises as `open_local_store`, and
    `StoreMismatch` where the data folder is that of another store.
    """
    from batchwright.service.files.paired_store import check_folder, database_of

    async def main() -> _T:
        async with open_local_store(settings, create=create) as store:
            await check_folder(store, settings.data, database_of(settings.database, settings.data))
            return await work(store)

    came = asyncio.run(main())
    if audit is not None:
        write_audit(settings, *audit(came))
    return came


@asynccontextmanager
async def open_local_files(settings: Settings, *, create: bool = False) -> AsyncIterator[tuple[Store, Blobs]]:
    """The store and the files that these settings name; otherwise as `open_local_store`.

    Raises `StoreMismatch` when they do not belong together.
    """
    from batchwright.service.files.paired_store import database_of, joined
    from batchwright.store import shown_url

    async with open_local_store(settings, create=create) as store:
        yield store, await joined(store, settings.data, shown_url(database_of(settings.database, settings.data)))
