"""The interface between operations and database drivers: transactions, and SQL statements by name.

Statements stand under `-- name:` lines in the files of `sql/`, one file for each subject, written for SQLite.
`sql/postgresql.sql` replaces those that PostgreSQL needs in another form. `{name}` stands for the text of another
entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

Dialect: TypeAlias = Literal["sqlite", "postgresql"]
Row: TypeAlias = tuple[Any, ...]
P = ParamSpec("P")
R = TypeVar("R")
DAMAGED = "the database is damaged: its operator finds the details in the log of the service"
"""Message for callers when the database is damaged."""

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"--.*$", re.MULTILINE)
_PLACE = re.compile(r"\{(\w+)\}")
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")


class Tx(Protocol):
    """A transaction, which runs the statements of `sql/` by name."""

    @property
    def now(self) -> float:
        """The time in Unix seconds, the same throughout the transaction."""

    def rows(self, statement: str, **values: Any) -> list[Row]: ...

    def row(self, statement: str, **values: Any) -> Row | None:
        """The first row; None if there is none."""

    def run(self, statement: str, **values: Any) -> int:
        """Run a statement, and return the number of rows that it changed."""

    def many(self, statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement for each of `rows`, which all have the same names; names it does not use are ignored."""


class Driver(Protocol):
    """A runner of operations, which are functions of a `Tx`, each in a transaction of its own.

    An operation may be run again after it was rolled back, so it must have no effect outside the database. Errors of
    the database are raised as `StoreUnavailable`, those of the operation as they are; after either, nothing of the
    operation has happened.
    """

    async def write(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `operation`, and return its result once its changes are durable."""

    async def read(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation that changes nothing, without waiting for writers."""

    async def check(self, operation: Callable[[Tx], None]) -> None:
        """Like `write`, but fail soon instead of waiting for the database to come back."""

    async def verify(self) -> None:
        """Raise `StoreUnavailable` if the database can see that its records of files are damaged."""

    async def close(self) -> None: ...


def _folder() -> Traversable:
    return files("batchwright.store") / "sql"


def _entries(script: Traversable) -> dict[str, str]:
    _, *parts = _NAME.split(script.read_text("utf-8"))
    return {
        name: _COMMENT.sub("", text).strip().removesuffix(";")
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


@cache
def statements(dialect: Dialect) -> dict[str, str]:
    """All statements by name, with parameters in the form of the driver of `dialect`."""
    found: dict[str, str] = {}
    for script in _folder().iterdir():
        if script.name.endswith(".sql") and script.name != "postgresql.sql":
            found |= _entries(script)
    if dialect == "postgresql":
        found |= _entries(_folder() / "postgresql.sql")
    found = {name: _PLACE.sub(lambda place: found[place[1]], text) for name, text in found.items()}
    if dialect == "postgresql":
        found = {name: _PARAMETER.sub(r"%(\1)s", text) for name, text in found.items()}
    return found


def migrations(dialect: Dialect) -> list[str]:
    """The scripts that make the schema, in order; the n-th script leads to version n."""
    scripts = (_folder() / "migrations" / dialect).iterdir()
    return [script.read_text("utf-8") for script in sorted(scripts, key=lambda script: script.name)]
