"""Opening a store by its URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from batchwright.errors import InvalidRequest, MissingExtra, StoreUnavailable
from batchwright.store.store import Store


def open_store(url: str | Path, *, now: Callable[[], float] | None = None) -> Store:
    """Open the store at `url`, with its schema brought up to date.

    `url` is `postgresql://…`, `sqlite:///relative.db`, `sqlite:////absolute.db`, or the path of an SQLite file, which
    is created if it does not exist. `now` gives Unix seconds; by default it is the database's own clock (with SQLite
    that of the machine), so that processes on several machines agree on which leases are valid.

    Blocks while it opens. Close it, or use it as an asynchronous context manager:

        async with open_store("batches.db") as store:
            ...

    Raises `MissingExtra` if the driver of the database is not installed, `InvalidRequest` for another kind of URL, and
    `StoreUnavailable` if the database cannot be reached, is damaged, or was written by a newer version or another
    program.
    """
    path = _path(str(url))
    if path is None:
        with _extra("PostgreSQL", "postgres"):
            from batchwright.store.postgresql import PostgresqlDriver
        _require_address(str(url))
        return Store(PostgresqlDriver(str(url), now))
    with _extra("SQLite", "server"):
        from batchwright.store.sqlite import SqliteDriver
    return Store(SqliteDriver(path, now or time.time))


def store_exists(url: str | Path) -> bool:
    """Whether there is already a store at `url`; if not, `open_store` would create one. Blocks, and creates nothing.

    An empty file is not a store. Raises `MissingExtra`, `InvalidRequest` and `StoreUnavailable` as `open_store` does.
    """
    path = _path(str(url))
    if path is None:
        with _extra("PostgreSQL", "postgres"):
            import psycopg
        _require_address(str(url))
        try:
            with psycopg.connect(str(url), connect_timeout=5) as connection:
                return connection.execute("SELECT to_regclass('batchwright.schema_version')").fetchone() != (None,)
        except psycopg.Error as error:
            raise StoreUnavailable(
                f"PostgreSQL does not take this: {error}; see to the server and its address"
            ) from error
    with _extra("SQLite", "server"):
        from batchwright.store.sqlite import holds_a_store
    return holds_a_store(path)


def shown_url(url: str | Path) -> str:
    """`url` for display, without any password in it."""
    parts = urlsplit(str(url))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else str(url)


def _require_address(url: str) -> None:
    """Raise `InvalidRequest` for a URL that the driver cannot read: the driver's message would quote the password."""
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


@contextmanager
def _extra(database: str, extra: str) -> Iterator[None]:
    """Raise `MissingExtra` if an import in the block fails."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(f"a store in {database} needs {error.name}: pip install 'batchwright[{extra}]'") from error


def _path(url: str) -> Path | None:
    """The path of an SQLite file; None for PostgreSQL. Raises `InvalidRequest` for any other URL."""
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
