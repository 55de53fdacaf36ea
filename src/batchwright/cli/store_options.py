"""Where the service keeps its state: the options that every command with a store has, and opening it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchwright.errors import BatchwrightError, MissingExtra

if TYPE_CHECKING:
    from stamina.instrumentation import RetryDetails

    from batchwright.jobs.store.interface import Store
    from batchwright.server.settings import Settings

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
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


def settings_with(data: Path | None, database: str | None, **more: object) -> Settings:
    """The settings that `batchwright serve` would have with these flags, so that both find the same store.

    `more`: other flags, by the names of their settings.

    Raises `InputError` for a setting that cannot be, wherever it came from; `MissingExtra` without the extra `server`.
    """
    try:
        from stamina.instrumentation import set_on_retry_hooks

        from batchwright.server.sources import load_settings
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"this command needs {error.name}, which comes with the extra: pip install 'batchwright[server]'"
        ) from error
    # Without a hook structlog prints each try to standard output, into the JSON and the results that go there.
    set_on_retry_hooks([_tell_of_retry])
    return load_settings({"data": data, "database": database, **more})


def _tell_of_retry(details: RetryDetails) -> None:
    """What the driver of a database tries again within a second is not told; whoever waits for it is told of."""
    if isinstance(details.caused_by, BatchwrightError):
        typer.echo(f"{details.caused_by}; trying again", err=True)


def database_of(settings: Settings) -> str:
    """What to give to `open_store`: the database of the settings, or the SQLite file in the data folder.

    The folder is made where it is missing, for its owner only: it holds secrets and what tenants uploaded.
    """
    if settings.database is not None:
        return settings.database
    settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(settings.data / "batchwright.db")


@asynccontextmanager
async def open_local_store(data: Path | None, database: str | None) -> AsyncIterator[Store]:
    """The store that these options name, closed at the end. Raises as `settings_with`, and `StoreUnavailable`."""
    settings = settings_with(data, database)
    from batchwright.jobs.store import open_store

    async with open_store(database_of(settings)) as store:
        yield store
