"""Opening of a store by its URL."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from batchwright.errors import InvalidRequest, MissingExtra, StoreUnavailable
from batchwright.store.store import Store
from batchwright.store.transaction import Driver


def open_store(url: str | Path, *, now: Callable[[], float] | None = None) -> Store:
    """Open the store at `url`, with its schema brought up to date.

    `url` is `postgresql://…`, `sqlite:///relative.db`, `sqlite:////absolute.db`, or the path of an SQLite file, which
    is made where there is none. `now` gives Unix seconds; by default it is the database's own clock (with SQLite that
    of the machine), so that processes on several machines agree on who still holds a lease.

    Blocks while it opens. Close it, or use it as an asynchronous context manager:

        async with open_store("batches.db") as store:
            ...

    Raises `MissingExtra` where the driver of the database is not installed, `InvalidRequest` for another kind of URL,
    and `StoreUnavailable` when the database cannot be reached, is damaged, or was written by a newer version or another
    program.
    """
    return Store(_driver(str(url), now))


def store_exists(url: str | Path) -> bool:
    """Return whether there is a store at `url`, or `open_store` would make one. Blocks, and makes nothing.

    An empty file is none. Raises `MissingExtra`, `InvalidRequest` and `StoreUnavailable` as `open_store`.
    """
    path = _path(str(url))
    if path is None:
        return _has_schema(str(url))
    try:
        from batchwright.store.sqlite_file import holds_a_store
    except ImportError as error:
        raise _needs_sqlite(error) from error
    return holds_a_store(path)


def shown_url(url: str | Path) -> str:
    """Return `url` for people to read, without the password that the address of a server may have."""
    parts = urlsplit(str(url))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else str(url)


def _has_schema(url: str) -> bool:
    try:
        import psycopg
    except ImportError as error:
        raise _needs_postgres(error) from error
    _require_address(url)
    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            return connection.execute("SELECT to_regclass('batchwright.schema_version')").fetchone() != (None,)
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL does not take this: {error}; see to the server and its address") from error


def _driver(url: str, now: Callable[[], float] | None) -> Driver:
    path = _path(url)
    if path is None:
        try:
            from batchwright.store.postgresql import PostgresqlDriver
        except ImportError as error:
            raise _needs_postgres(error) from error
        _require_address(url)
        return PostgresqlDriver(url, now)
    try:
        from batchwright.store.sqlite import SqliteDriver
    except ImportError as error:
        raise _needs_sqlite(error) from error
    return SqliteDriver(path, now or time.time)


def _require_address(url: str) -> None:
    """Raise `InvalidRequest` for a URL that the driver cannot read; its own message would quote the password."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        conninfo_to_dict(url)
    except ProgrammingError:
        raise InvalidRequest(
            f"database={shown_url(url)}: cannot be read; in a name or a password write %25 for %, %2F for / and %40 "
            "for @",
            param="database",
        ) from None


def _needs_sqlite(error: ImportError) -> MissingExtra:
    return MissingExtra(f"a store in SQLite needs {error.name}: pip install 'batchwright[server]'")


def _needs_postgres(error: ImportError) -> MissingExtra:
    return MissingExtra(f"a store in PostgreSQL needs {error.name}: pip install 'batchwright[postgres]'")


def _path(url: str) -> Path | None:
    """Return the path of the SQLite file; None: the store is in PostgreSQL. Raises `InvalidRequest`."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("postgresql", "postgres"):
        return None
    if separator and scheme != "sqlite":
        raise InvalidRequest(
            f"database={scheme}://…: no such kind of database; use postgresql://… or sqlite:///path", param="database"
        )
    path = rest.removeprefix("/") if separator else url
    if not path:
        raise InvalidRequest(f"database={url!r}: names no file; use sqlite:///path", param="database")
    return Path(path)
