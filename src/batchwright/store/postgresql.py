"""The PostgreSQL driver, which runs each operation in a short transaction on one of a few threads.

A transaction that the database rolled back (a deadlock, a lost connection, a restart) is retried for a while. If a
connection is lost in COMMIT, the outcome is unknown. Each transaction therefore counts itself in the row of its
connection, which shows the outcome as soon as the database answers again: the operation is then either done or run
again, never both. (The id of a transaction would not do: a server that crashed may give out ids a second time.)

Operations lock rows in one order: worker, batches by key, lines by batch and number, tenants by name. Claims lock
tenants first and take lines by position, but do not wait for these: they skip locked ones. The one exception takes
lines from a dead worker, and has their tenants rest, before it frees its batches: if that meets a late commit, one of
the two is run again.
"""

from __future__ import annotations

import asyncio
import queue
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, Concatenate

import psycopg
import stamina
from psycopg import errors

from batchwright.crash_points import crash_point
from batchwright.errors import Conflict, InvalidRequest, StoreUnavailable
from batchwright.store.transaction import DAMAGED, P, R, Row, Tx, migrations, statements

_THREADS = 8
_PATIENCE = 15.0
"""Seconds to wait for a database that does not answer: longer than it takes to restart."""
_IMPATIENCE = 2.0
"""Seconds to wait for it when it is opened or checked."""
_MIGRATION_LOCK = 0x62617463687772

# A process that was stopped in a transaction must not keep its locks for ever. Every statement has an index that it is
# meant to use. The planner, which has no statistics of a batch that arrived a second ago, is left little choice, and
# plans each time anew, since the sizes of tables change by orders of magnitude.
_SESSION = """
SET search_path TO batchwright;
SET default_transaction_isolation TO 'read committed';
SET idle_in_transaction_session_timeout TO '10s';
SET enable_seqscan TO off;
SET enable_bitmapscan TO off;
SET enable_hashjoin TO off;
SET enable_mergejoin TO off;
SET jit TO off;
SET plan_cache_mode TO force_custom_plan;
"""


class _ForNow(Exception):
    """Failure of a transaction that can be run again."""


_HOPELESS = (errors.InsufficientResources, errors.SystemError, errors.QueryCanceled)
_DAMAGE = (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName, psycopg.InternalError)
_PASSING = (psycopg.OperationalError, psycopg.InterfaceError, errors.ReadOnlySqlTransaction, _ForNow)


class _Connection(psycopg.Connection[Row]):
    """Connection with a name in the table `connections`."""

    name: str


class _PostgresqlTx:
    """A `Tx` on one connection, inside a transaction."""

    def __init__(self, connection: _Connection, now: Callable[[], float] | None) -> None:
        self._connection = connection
        self._statements = statements("postgresql")
        self._clock = now

    @cached_property
    def now(self) -> float:
        if self._clock is not None:
            return self._clock()
        [(seconds,)] = self.rows("clock")
        return float(seconds)

    def begin(self) -> int:
        """Read the time of the database, and return the number of this transaction on the connection."""
        row = self.row("begin", connection=self._connection.name)
        if row is None:
            self._connection.close()
            raise _ForNow("the connection was not used for a day, and is made anew")
        seconds, number = row
        if self._clock is None:
            self.now = seconds
        return int(number)

    def _execute(self, statement: str, values: Mapping[str, Any]) -> psycopg.Cursor[Row]:
        return self._connection.execute(self._statements[statement], values)

    def rows(self, statement: str, **values: Any) -> list[Row]:
        return self._execute(statement, values).fetchall()

    def row(self, statement: str, **values: Any) -> Row | None:
        return self._execute(statement, values).fetchone()

    def run(self, statement: str, **values: Any) -> int:
        return self._execute(statement, values).rowcount

    def many(self, statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run one statement, which takes the columns as arrays."""
        if rows:
            self._execute(statement, {name: [row[name] for row in rows] for name in rows[0]})


class PostgresqlDriver:
    """A `Driver` on a database. Its tables are in the schema `batchwright`."""

    def __init__(self, url: str, now: Callable[[], float] | None) -> None:
        """Raises `StoreUnavailable` if the database cannot be reached, or was written by a newer version."""
        self._url = url
        self._now = now
        self._idle: queue.LifoQueue[_Connection | None] = queue.LifoQueue()
        for _ in range(_THREADS):
            self._idle.put(None)
        self._closed = False
        self._persist(self._migrate, _IMPATIENCE)
        self._threads = ThreadPoolExecutor(_THREADS, "store")

    async def write(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        run = partial(self._write, operation.__name__, lambda tx: operation(tx, *args, **kwargs), _PATIENCE)
        return await self._in_thread(run)

    async def read(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        def run() -> R:
            with self._connection() as connection:
                with self._transaction(connection):
                    result = operation(_PostgresqlTx(connection, self._now), *args, **kwargs)
                connection.execute("COMMIT")
                return result

        return await self._in_thread(partial(self._persist, run, _PATIENCE))

    async def check(self, operation: Callable[[Tx], None]) -> None:
        await self._in_thread(partial(self._write, operation.__name__, operation, _IMPATIENCE))

    async def verify(self) -> None:
        """Do nothing: the server checks its own pages when they are read."""

    async def close(self) -> None:
        """Finish running operations, and close the connections."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        while not self._idle.empty():
            connection = self._idle.get()
            if connection is not None:
                connection.close()

    async def _in_thread(self, run: Callable[[], R]) -> R:
        if self._closed:
            raise StoreUnavailable("the connection to PostgreSQL was closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    # On the threads.

    def _persist(self, run: Callable[[], R], patience: float) -> R:
        """Return the result of `run`, which is retried for `patience` seconds while the database does not answer."""

        def may_pass(error: Exception) -> bool:
            return isinstance(error, _PASSING) and not isinstance(error, _HOPELESS)

        try:
            for attempt in stamina.retry_context(
                on=may_pass, attempts=None, timeout=patience, wait_initial=0.02, wait_max=1.0, wait_jitter=0.02
            ):
                with attempt:
                    return run()
        except _PASSING as error:
            raise StoreUnavailable(f"PostgreSQL does not take this: {error}; see to the server and its disk") from error
        except _DAMAGE as error:
            raise StoreUnavailable(
                f"PostgreSQL has not what batchwright made there: {error}; restore a backup into it",
                public_message=DAMAGED,
            ) from error
        except psycopg.IntegrityError as error:
            raise Conflict(f"what is to be added is already there: {error}") from error
        except psycopg.DataError as error:
            raise InvalidRequest(f"PostgreSQL cannot store this: {error}") from error
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"a text is no valid Unicode: {error}; remove its lone surrogates") from error
        raise AssertionError("unreachable: the loop ends by returning or raising")

    def _write(self, name: str, operation: Callable[[Tx], R], patience: float) -> R:
        # The name of the connection, the number of the transaction, and its result, if its COMMIT was in doubt.
        doubt: tuple[str, int, R] | None = None

        def attempt() -> R:
            nonlocal doubt
            if doubt is not None and self._was_committed(*doubt[:2]):
                return doubt[2]
            doubt = None
            with self._connection() as connection:
                with self._transaction(connection):
                    tx = _PostgresqlTx(connection, self._now)
                    number = tx.begin()
                    result = operation(tx)
                crash_point(f"store.{name}.before_commit")
                crash_point("store.before_commit")
                try:
                    connection.execute("COMMIT")
                except _HOPELESS:
                    raise
                except psycopg.OperationalError:
                    doubt = (connection.name, number, result)
                    raise _ForNow("the connection was lost in COMMIT, and it is not known what came of it") from None
                crash_point("store.after_commit")
                crash_point(f"store.{name}.after_commit")
                return result

        return self._persist(attempt, patience)

    def _was_committed(self, name: str, number: int) -> bool:
        """Whether the last committed transaction of the connection `name` is the `number`-th."""
        with self._connection() as connection:
            row = _PostgresqlTx(connection, self._now).row("commits", connection=name)
        return row is not None and bool(row[0] == number)

    @contextmanager
    def _transaction(self, connection: _Connection) -> Iterator[None]:
        """Begin a transaction, and roll it back if the block raises."""
        connection.execute("BEGIN")
        try:
            yield
        except BaseException:
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """A connection for exclusive use; there is one for each thread. A broken connection is not put back."""
        connection = self._idle.get()
        try:
            if connection is None:
                connection = self._connect()
            yield connection
        finally:
            if connection is not None and connection.closed:
                connection = None
            self._idle.put(connection)

    def _connect(self, *, named: bool = True) -> _Connection:
        """Open a connection. `named`: whether to add it to the table `connections`."""
        connection = _Connection.connect(self._url, autocommit=True, connect_timeout=5, client_encoding="utf8")
        connection.name = uuid.uuid4().hex
        try:
            connection.execute(_SESSION)
            if named:
                tx = _PostgresqlTx(connection, self._now)
                tx.run("forget_connections")
                tx.run("add_connection", connection=connection.name)
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self) -> None:
        scripts = migrations("postgresql")
        with closing(self._connect(named=False)) as connection, self._transaction(connection):
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MIGRATION_LOCK])
            connection.execute("CREATE SCHEMA IF NOT EXISTS batchwright")
            connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
            row = connection.execute("SELECT max(version) FROM schema_version").fetchone()
            version = (row[0] if row else None) or 0
            if version > len(scripts):
                raise StoreUnavailable(
                    f"the database was written by a newer batchwright (its schema is {version}, this one knows "
                    f"{len(scripts)}): upgrade batchwright, or name another database"
                )
            if version and connection.execute("SELECT to_regclass('batchwright.files')").fetchone() == (None,):
                raise StoreUnavailable(
                    "the database lost tables of batchwright: restore a backup into it, or name another database"
                )
            for number, script in enumerate(scripts[version:], version + 1):
                connection.execute(script)
                connection.execute("INSERT INTO schema_version VALUES (%s)", [number])
            connection.execute("COMMIT")
