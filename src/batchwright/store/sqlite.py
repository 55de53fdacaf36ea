"""The SQLite driver, with one thread that writes and one that reads.

The writer takes all waiting operations, runs each in a savepoint of one transaction, commits once, and only then
reports their results. So a hundred operations cost one fsync, one that raises undoes only itself, and what was
reported is on the disk. The reader has a connection of its own: with a write-ahead log it never waits for the writer.

Several processes may use one file; they wait for each other's transactions.

The file is only ever opened through SQLite: closing another descriptor of it in this process would release the locks of
all its connections. Checks read over a connection of their own, which has no pages in its cache.
"""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate

import apsw

from batchwright.crash_points import crash_point
from batchwright.errors import Conflict, InvalidRequest, StoreUnavailable
from batchwright.store.transaction import DAMAGED, P, R, Row, Tx, migrations, statements

_BUSY_MS = 20_000
_SWITCH_PAUSE = 0.01
"""Seconds between attempts to switch a file to a write-ahead log."""
_APPLICATION_ID = 0x62776A73
"""Application id in the header of the file; it is 0 in stores made by earlier versions."""
_TABLES = frozenset({"files", "batches", "lines", "results", "workers"})
_LOOKED_AT = (*sorted(_TABLES), "api_keys", "identity")
"""Tables that an open store must have, since it was brought to this version."""
_CHECK_BUSY_MS = 2_000
_SENSELESS = (apsw.CorruptError, apsw.NotADBError)
"""Errors that SQLite raises for malformed pages, whatever the statement."""
_DAMAGE = (*_SENSELESS, apsw.SQLError, UnicodeDecodeError)
"""Errors raised for overwritten pages. Statements fit the tables, so an SQL error means that the tables are gone."""
_UNAVAILABLE = (
    apsw.BusyError,
    apsw.CantOpenError,
    apsw.FullError,
    apsw.IOError,
    apsw.LockedError,
    apsw.NoMemError,
    apsw.ProtocolError,
    apsw.ReadOnlyError,
    *_DAMAGE,
)

_REMEDIES: tuple[tuple[tuple[type[BaseException], ...], str, str], ...] = (
    ((apsw.FullError,), "make room on its disk", "the disk of the database is full: make room on its disk"),
    ((apsw.BusyError,), "another process has held it for too long", "the database is busy: try again in a moment"),
    (_DAMAGE, "it is damaged: put back a backup, or name another file", DAMAGED),
)
"""Kinds of errors, each with a remedy for the operator, and the message for callers."""
_OTHERWISE = ("see to its disk and its permissions", "the database does not take this now: try again in a moment")


class _SqliteTx:
    """A `Tx` on one connection."""

    def __init__(self, connection: apsw.Connection, now: Callable[[], float]) -> None:
        self._connection = connection
        self._statements = statements("sqlite")
        self.now = now()

    def rows(self, statement: str, **values: Any) -> list[Row]:
        return self._connection.execute(self._statements[statement], values).fetchall()

    def row(self, statement: str, **values: Any) -> Row | None:
        return next(iter(self.rows(statement, **values)), None)

    def run(self, statement: str, **values: Any) -> int:
        self._connection.execute(self._statements[statement], values)
        return self._connection.changes()

    def many(self, statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._connection.executemany(self._statements[statement], rows)


@dataclass(slots=True)
class _Waiting:
    """An operation in the writer's queue, and its outcome."""

    name: str
    operation: Callable[[Tx], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class SqliteDriver:
    """A `Driver` on a file, which is made if it does not exist."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        """Raises `StoreUnavailable` if the file cannot be opened, or is not a store of batchwright."""
        self._path = path
        self._now = now
        holds_a_store(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # It holds secrets: only its owner may read it and the files that SQLite puts beside it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreUnavailable(f"the database {path} cannot be opened: {error.strerror}") from error
        try:
            self._writer = self._connect()
            _migrate(self._writer, path)
            self._reader = self._connect()
            self._reader.pragma("query_only", True)
        except apsw.Error as error:
            raise self._unavailable(error) from error
        self._file = _SqliteFile(path)
        try:
            self._file.verify()
        except StoreUnavailable:
            self._reader.close()
            self._writer.close()
            raise
        self._reading = ThreadPoolExecutor(1, "store-reader")
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="store-writer", daemon=True)
        self._thread.start()
        self._closed = False

    def _connect(self) -> apsw.Connection:
        connection = apsw.Connection(str(self._path))
        connection.set_busy_timeout(_BUSY_MS)
        _use_write_ahead_log(connection)
        connection.pragma("synchronous", "full")
        connection.pragma("foreign_keys", True)
        connection.pragma("temp_store", "memory")
        connection.pragma("cache_size", -65536)
        # Pages: at the default of 1000 a busy writer would copy the same pages into the file again and again.
        connection.pragma("wal_autocheckpoint", 8000)
        connection.pragma("journal_size_limit", 128 << 20)
        return connection

    def _unavailable(self, error: BaseException) -> StoreUnavailable:
        found = ((remedy, message) for kinds, remedy, message in _REMEDIES if isinstance(error, kinds))
        remedy, message = next(found, _OTHERWISE)
        return StoreUnavailable(
            f"the database {self._path} does not take this: {error}; {remedy}", public_message=message
        )

    async def write(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._require_open()
        # The write could go to a file that no longer exists.
        self._file.require_sound()
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._queue.put(_Waiting(operation.__name__, lambda tx: operation(tx, *args, **kwargs), future))
        return await future

    async def read(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._require_open()
        work = partial(self._read, lambda tx: operation(tx, *args, **kwargs))
        return await asyncio.get_running_loop().run_in_executor(self._reading, work)

    async def check(self, operation: Callable[[Tx], None]) -> None:
        await self.write(operation)
        await asyncio.get_running_loop().run_in_executor(None, self._file.look)

    async def verify(self) -> None:
        self._require_open()
        await asyncio.get_running_loop().run_in_executor(None, self._file.verify)

    async def close(self) -> None:
        """Finish waiting operations, and close the file."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._reading.shutdown)
        self._reader.close()
        self._writer.close()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the database {self._path} was closed")

    # On the reader's thread.

    def _read(self, operation: Callable[[Tx], R]) -> R:
        try:
            self._reader.execute("BEGIN")
            try:
                return operation(_SqliteTx(self._reader, self._now))
            finally:
                self._reader.execute("ROLLBACK")
        except _UNAVAILABLE as error:
            self._file.note(error)
            raise self._unavailable(error) from error

    # On the writer's thread.

    def _write_all(self) -> None:
        open_ = True
        while open_:
            group = [self._queue.get()]
            group += [self._queue.get() for _ in range(self._queue.qsize())]
            waiting = [entry for entry in group if entry is not None]
            open_ = len(waiting) == len(group)
            if waiting:
                self._write_group(waiting)
                _report(waiting)

    def _write_group(self, waiting: Sequence[_Waiting]) -> None:
        try:
            if self._writer.in_transaction:  # the disk did not even allow the last rollback
                self._writer.execute("ROLLBACK")
            self._writer.execute("BEGIN IMMEDIATE")
            for entry in waiting:
                self._run(entry)
            for entry in waiting:
                crash_point(f"store.{entry.name}.before_commit")
            crash_point("store.before_commit")
            self._writer.execute("COMMIT")
            crash_point("store.after_commit")
            for entry in waiting:
                crash_point(f"store.{entry.name}.after_commit")
        except BaseException as error:
            with suppress(apsw.Error):
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
            self._file.note(error)
            reason = self._unavailable(error) if isinstance(error, (apsw.Error, UnicodeDecodeError)) else error
            for entry in waiting:
                entry.error = entry.error or reason

    def _run(self, entry: _Waiting) -> None:
        """Run one operation. Raises errors that make the whole transaction impossible."""
        self._writer.execute("SAVEPOINT operation")
        try:
            entry.result = entry.operation(_SqliteTx(self._writer, self._now))
        except _UNAVAILABLE:
            raise
        except BaseException as error:
            entry.error = _explained(error)
            self._writer.execute("ROLLBACK TO operation")
        self._writer.execute("RELEASE operation")


def _use_write_ahead_log(connection: apsw.Connection) -> None:
    """Switch the file to a write-ahead log, which it keeps.

    Raises `apsw.BusyError` if others hold the file for longer than the timeout of `connection`. SQLite itself does not
    wait here: of several processes that switch a new file at once, all but one get that error immediately.
    """
    until = time.monotonic() + _BUSY_MS / 1000
    while True:
        try:
            connection.pragma("journal_mode", "wal")
        except apsw.BusyError:
            if time.monotonic() > until:
                raise
            time.sleep(_SWITCH_PAUSE)
        else:
            return


def _explained(error: BaseException) -> BaseException:
    """The error that callers get for `error`, which is its cause; `error` itself if it is not from the database."""
    if isinstance(error, apsw.ConstraintError):
        found: BaseException = Conflict(f"what is to be added is already there: {error}")
    elif isinstance(error, UnicodeEncodeError):
        found = InvalidRequest(f"a text is no valid Unicode: {error}; remove its lone surrogates")
    else:
        return error
    found.__cause__ = error
    return found


def _report(waiting: Sequence[_Waiting]) -> None:
    """Set the futures on their event loop."""

    def resolve() -> None:
        for entry in waiting:
            if entry.future.done():
                continue
            if entry.error is not None:
                entry.future.set_exception(entry.error)
            else:
                entry.future.set_result(entry.result)

    with suppress(RuntimeError):  # the loop was closed: nobody waits any longer
        waiting[0].future.get_loop().call_soon_threadsafe(resolve)


def _migrate(connection: apsw.Connection, path: Path) -> None:
    scripts = migrations("sqlite")
    connection.execute("BEGIN IMMEDIATE")
    try:
        _is_a_store(connection, path)
        version = connection.pragma("user_version")
        if version > len(scripts):
            raise StoreUnavailable(
                f"the database {path} was written by a newer batchwright (its schema is {version}, this one knows "
                f"{len(scripts)}): upgrade batchwright, or name another file"
            )
        for script in scripts[version:]:
            connection.execute(script)
        # Nothing is written if nothing changes: a service must start even if the disk is full.
        if version < len(scripts) or connection.pragma("application_id") != _APPLICATION_ID:
            connection.pragma("user_version", len(scripts))
            connection.pragma("application_id", _APPLICATION_ID)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


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
        with _checking(path) as connection:
            return _is_a_store(connection, path)
    except _DAMAGE as error:
        raise StoreUnavailable(
            f"the database {path} is damaged, or no database at all: {error}; put back a backup, or name another file "
            "with --database",
            public_message=DAMAGED,
        ) from error
    except apsw.Error as error:
        raise StoreUnavailable(f"the database {path} cannot be read: {error}; see to its permissions") from error


def _is_a_store(connection: apsw.Connection, path: Path) -> bool:
    """Whether the database has our tables; False if it is empty. Raises `StoreUnavailable` for anything else."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    version, application = connection.pragma("user_version"), connection.pragma("application_id")
    if not tables and version == 0 and application in (0, _APPLICATION_ID):
        return False
    if version > 0 and tables >= _TABLES and application in (0, _APPLICATION_ID):
        return True
    raise StoreUnavailable(
        f"the database {path} is not a store of batchwright: it has other tables "
        f"({', '.join(sorted(tables)[:5]) or 'none'}); name another file with --database",
        public_message=DAMAGED,
    )


class _SqliteFile:
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
            raise StoreUnavailable(self.damage, public_message=DAMAGED)

    def note(self, error: BaseException) -> None:
        """Note the error of a statement: if it shows damage, `require_sound` raises from now on."""
        if self.damage is None and isinstance(error, _SENSELESS):
            self._damaged(str(error))

    def _damaged(self, what: str) -> StoreUnavailable:
        self.damage = (
            f"the database {self._path} is damaged: {what}; stop all processes, put back the file or a backup of it, "
            "and start again"
        )
        return StoreUnavailable(self.damage, public_message=DAMAGED)

    def _examine(self, check: str | None = None) -> None:
        try:
            with _checking(self._path) as connection:
                if not _is_a_store(connection, self._path):
                    raise self._damaged("it is empty")
                # All columns, or an index would answer for its table.
                for table in _LOOKED_AT:
                    connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchall()
                if check is not None:
                    [(outcome,), *_] = connection.execute(f"PRAGMA {check}").fetchall()
                    if outcome != "ok":
                        raise self._damaged(str(outcome))
        except _DAMAGE as error:
            raise self._damaged(str(error)) from error
        except apsw.Error as error:
            raise StoreUnavailable(f"the database {self._path} cannot be read: {error}; see to its disk") from error


@contextmanager
def _checking(path: Path) -> Iterator[apsw.Connection]:
    """A read-only connection, which is closed at the end of the block."""
    connection = apsw.Connection(os.fspath(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.set_busy_timeout(_CHECK_BUSY_MS)
        connection.pragma("query_only", True)
        yield connection
    finally:
        connection.close()
