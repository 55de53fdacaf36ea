"""Checks that an SQLite file is a store of batchwright, before it is opened and while it is open.

The file is only ever opened through SQLite: closing another descriptor of it in this process would release the locks of
all its connections. Checks read over a connection of their own, which has no pages in its cache.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from batchwright.errors import StoreUnavailable
from batchwright.store.transaction import DAMAGED

APPLICATION_ID = 0x62776A73
"""Application id in the header of the file; it is 0 in stores made by earlier versions."""
_TABLES = frozenset({"files", "batches", "lines", "results", "workers"})
_LOOKED_AT = (*sorted(_TABLES), "api_keys", "identity")
"""Tables that an open store must have, since it was brought to this version."""
_BUSY_MS = 2_000
_SENSELESS = (apsw.CorruptError, apsw.NotADBError)
"""Errors that SQLite raises for senseless pages, whatever the statement."""
DAMAGE = (*_SENSELESS, apsw.SQLError, UnicodeDecodeError)
"""Errors raised for overwritten pages. Statements fit the tables, so an SQL error means that the tables are gone."""


def holds_a_store(path: Path) -> bool:
    """Whether the file is a store; False if it does not exist or is empty. Writes nothing.

    Raises `StoreUnavailable` if it is something else, or damaged.
    """
    try:
        if path.stat().st_size == 0:
            # Not opened: SQLite would remove a write-ahead log that lies beside it.
            return False
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreUnavailable(f"the database {path} cannot be opened: {error.strerror}") from error
    if path.is_dir():
        raise StoreUnavailable(f"the database {path} cannot be opened: {os.strerror(errno.EISDIR)}")
    try:
        with _reading(path) as connection:
            return is_a_store(connection, path)
    except DAMAGE as error:
        raise StoreUnavailable(
            f"the database {path} is damaged, or no database at all: {error}; put back a backup, or name another file "
            "with --database",
            told=DAMAGED,
        ) from error
    except apsw.Error as error:
        raise StoreUnavailable(f"the database {path} cannot be read: {error}; see to its permissions") from error


def is_a_store(connection: apsw.Connection, path: Path) -> bool:
    """Whether the database has our tables; False if it is empty. Raises `StoreUnavailable` for anything else."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    version, application = connection.pragma("user_version"), connection.pragma("application_id")
    if not tables and version == 0 and application in (0, APPLICATION_ID):
        return False
    if version > 0 and tables >= _TABLES and application in (0, APPLICATION_ID):
        return True
    raise StoreUnavailable(
        f"the database {path} is not a store of batchwright: it has other tables "
        f"({', '.join(sorted(tables)[:5]) or 'none'}); name another file with --database",
        told=DAMAGED,
    )


class SqliteFile:
    """The file of an open store. Methods raise `StoreUnavailable` if it is damaged; all but `require_sound` block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = path.stat()
        self._place = (found.st_dev, found.st_ino)
        self._size = found.st_size
        self.damage: str | None = None
        """Message about damage that was found, reported until the store is opened again; None if there was none."""

    def look(self) -> None:
        """Check that this is still the file that was opened, and that its first pages can be read."""
        self.require_sound()
        try:
            found = self._path.stat()
        except OSError as error:
            raise self._damaged(f"it is not there any more ({error.strerror})") from error
        if (found.st_dev, found.st_ino) != self._place:
            raise self._damaged("another file was put in its place while it was open")
        if found.st_size < self._size:
            # Truncated, or vacuumed: only the second leaves a database that is whole.
            self._examine("quick_check(1)")
        self._size = found.st_size
        self._examine()

    def verify(self) -> None:
        """Check that the records of files are sound, which takes time in proportion to their number."""
        self.look()
        self._examine("quick_check('files')")

    def require_sound(self) -> None:
        """Raise if damage was found before. Does not block."""
        if self.damage is not None:
            raise StoreUnavailable(self.damage, told=DAMAGED)

    def note(self, error: BaseException) -> None:
        """Note the error of a statement: if it shows damage, `require_sound` raises from now on."""
        if self.damage is None and isinstance(error, _SENSELESS):
            self._damaged(str(error))

    def _damaged(self, what: str) -> StoreUnavailable:
        self.damage = (
            f"the database {self._path} is damaged: {what}; stop all processes, put back the file or a backup of it, "
            "and start again"
        )
        return StoreUnavailable(self.damage, told=DAMAGED)

    def _examine(self, check: str | None = None) -> None:
        try:
            with _reading(self._path) as connection:
                if not is_a_store(connection, self._path):
                    raise self._damaged("it is empty")
                # All columns, or an index would answer for its table.
                for table in _LOOKED_AT:
                    connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchall()
                if check is not None:
                    [(told,), *_] = connection.execute(f"PRAGMA {check}").fetchall()
                    if told != "ok":
                        raise self._damaged(str(told))
        except DAMAGE as error:
            raise self._damaged(str(error)) from error
        except apsw.Error as error:
            raise StoreUnavailable(f"the database {self._path} cannot be read: {error}; see to its disk") from error


@contextmanager
def _reading(path: Path) -> Iterator[apsw.Connection]:
    """A connection that only reads, which is closed at the end of the block."""
    connection = apsw.Connection(os.fspath(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.set_busy_timeout(_BUSY_MS)
        connection.pragma("query_only", True)
        yield connection
    finally:
        connection.close()
