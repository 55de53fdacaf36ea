"""Opening of a database together with the files of its data folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from batchwright.errors import StoreMismatch
from batchwright.service.files.blobs import Blobs
from batchwright.service.files.custody import Custody, is_used
from batchwright.store import Store, open_store, shown_url, store_exists

_FILES = "files"
_DATABASE = "batchwright.db"


def database_of(database: str | None, data: Path) -> str:
    """Return where the database is: as it was named, or else in the data folder."""
    return database or str(data / _DATABASE)


def blobs_of(data: Path) -> Blobs:
    """Return the files in a data folder."""
    return Blobs(data / _FILES)


def require_database(database: str, data: Path) -> bool:
    """Return whether there is a store at `database`; False: one may be made, since the data folder belongs to none.

    Blocks, and makes nothing. Raises `StoreMismatch` when there is none and the folder is used: a new store would know
    none of its files, and none of the keys without which nobody is let in; what `store_exists` raises.
    """
    # In this order: another process that makes a store now marks the folder after it has.
    used, own = is_used(blobs_of(data)), data / _DATABASE
    exists = store_exists(database)
    if exists:
        return True
    if used:
        raise StoreMismatch(
            f"there is no store at {shown_url(database)}, or it is empty, and {data / _FILES} is that of another one: "
            "name its database (--database), or restore it from a backup, or name another data folder (--data)"
        )
    if database != str(own) and own.exists():
        raise StoreMismatch(
            f"there is no store at {shown_url(database)}, or it is empty, and the data folder has a database of its "
            f"own, {own}: leave --database out, or name another data folder (--data)"
        )
    return False


async def open_with_files(database: str, data: Path, *, now: Callable[[], float] | None = None) -> tuple[Store, Blobs]:
    """Open the store at `database` and the files in the data folder `data`; both are made where there is neither.

    `now` as for `open_store`. Raises `StoreMismatch` when they do not belong together, and what `open_store` raises.
    """
    require_database(database, data)
    store = open_store(database, now=now)
    try:
        return store, await joined(store, data, shown_url(database))
    except BaseException:
        await store.close()
        raise


async def joined(store: Store, data: Path, database: str = "that is open") -> Blobs:
    """Return the files in `data`, which belong to `store`, called `database` in messages. Raises `StoreMismatch`."""
    blobs = blobs_of(data)
    await Custody(store, blobs).join(database)
    return blobs


async def check_folder(store: Store, data: Path, database: str) -> None:
    """Check that `data` is not the folder of another store, for a process that needs no files. Raises `StoreMismatch`.

    `database` is where the store is.
    """
    await Custody(store, blobs_of(data)).check(shown_url(database), inside=database == database_of(None, data))
