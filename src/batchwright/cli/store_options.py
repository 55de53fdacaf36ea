"""Options that say where the service keeps its state, and opening the store that they name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from batchwright.cli.flags import flag, with_flags
from batchwright.errors import BatchwrightError, InputError, MissingExtra

if TYPE_CHECKING:
    from stamina.instrumentation import RetryDetails

    from batchwright.service.files.blobs import Blobs
    from batchwright.service.settings import Settings
    from batchwright.store.store import Store

_T = TypeVar("_T")


def _folder(text: str) -> Path:
    # An empty text may come from an unset variable in a script, so it does not mean the current folder.
    if not text:
        raise typer.BadParameter("'' names no folder: leave it out for the default, or give . for the current one")
    return Path(text)


@dataclass(frozen=True, slots=True)
class StoreFlags:
    """Values of the options that say where the store is; None: not given."""

    data: Path | None = None
    database: str | None = None
    config: Path | None = None


_FLAGS = (
    flag(
        "data",
        Path,
        "Folder of the service's files (BATCHWRIGHT_DATA). Default: the platform's folder for user data.",
        metavar="FOLDER",
        parser=_folder,
    ),
    flag(
        "database",
        str,
        "SQLite file, or postgresql://… (BATCHWRIGHT_DATABASE). Default: batchwright.db in the data folder.",
    ),
    flag(
        "config", Path, "TOML file of settings, as `batchwright serve` takes it (BATCHWRIGHT_CONFIG).", metavar="FILE"
    ),
)


def store_command(app: typer.Typer, name: str) -> Callable[[Callable[..., None]], None]:
    """Return a decorator that adds a command to `app` with these options in place of its parameter `flags`."""

    def add(command: Callable[..., None]) -> None:
        app.command(name)(with_flags(command, "flags", _FLAGS, lambda given: StoreFlags(**given)))

    return add


def settings_with(flags: StoreFlags, **more: object) -> Settings:
    """Return the settings that `batchwright serve` would have with these flags, so that both find the same store.

    `more`: values of other flags by the names of their settings.

    Raises `InputError` for an invalid setting, wherever it came from; `MissingExtra` without the extra `server`.
    """
    try:
        from stamina.instrumentation import set_on_retry_hooks

        from batchwright.service.setting_sources import load_settings
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"this command needs {error.name}, which comes with the extra: pip install 'batchwright[server]'"
        ) from error
    # Without a hook, structlog prints each retry to standard output, among the JSON and the results.
    set_on_retry_hooks([_report_retry])
    return load_settings({"data": flags.data, "database": flags.database, **more}, config=flags.config)


def write_audit(settings: Settings, action: str, what: str) -> None:
    """Write into the audit log that the user of this command line did `action` to `what`, an id or a name."""
    from batchwright.service.access.audit import AuditLog, operator

    log = AuditLog(settings.data / "audit", retention=settings.audit_retention)
    try:
        log.write(action, "done", object=what, **operator())
    except OSError as error:
        typer.echo(f"this is done, but it is not in the audit log: {error}", err=True)


def _report_retry(details: RetryDetails) -> None:
    """Report waits for a database. Retries of its driver's own errors, within a second, are not reported."""
    if isinstance(details.caused_by, BatchwrightError):
        typer.echo(f"{details.caused_by}; trying again", err=True)


@asynccontextmanager
async def open_local_store(settings: Settings, *, create: bool = False) -> AsyncIterator[Store]:
    """Open the store that these settings name, and close it at the end.

    `create`: create the store if there is none, and say so on standard error. Otherwise that is an `InputError`, since
    the name may be mistyped, and a new store would hold nothing to show. Raises `StoreMismatch` where the data folder
    has files and there is no store, and `StoreUnavailable`.
    """
    from batchwright.service.files.custody import database_of, require_database
    from batchwright.store import open_store, shown_url

    database = database_of(settings.database, settings.data)
    is_new = not require_database(database, settings.data)
    if is_new and not create:
        raise InputError(
            f"there is no store at {shown_url(database)}: see to --data, --database and --config; `batchwright serve`, "
            "`keys create` and `jobs submit` make one"
        )
    if settings.database is None:
        # Readable by its owner only: it holds secrets and what tenants uploaded.
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
    """Return what `work` returns for the store that these settings name; `create` is that of `open_local_store`.

    `audit`: returns the action and its object for the audit log, given what `work` returned. Raises what
    `open_local_store` does, and `StoreMismatch` where the data folder belongs to another store.
    """
    from batchwright.service.files.custody import check_folder, database_of

    async def main() -> _T:
        async with open_local_store(settings, create=create) as store:
            await check_folder(store, settings.data, database_of(settings.database, settings.data))
            return await work(store)

    result = asyncio.run(main())
    if audit is not None:
        write_audit(settings, *audit(result))
    return result


@asynccontextmanager
async def open_local_files(settings: Settings, *, create: bool = False) -> AsyncIterator[tuple[Store, Blobs]]:
    """Open the store and the files that these settings name, as `open_local_store` does.

    Raises `StoreMismatch` when they do not belong together.
    """
    from batchwright.service.files.custody import database_of, joined
    from batchwright.store import shown_url

    async with open_local_store(settings, create=create) as store:
        yield store, await joined(store, settings.data, shown_url(database_of(settings.database, settings.data)))
