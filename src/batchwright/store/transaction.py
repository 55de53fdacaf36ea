"""What operations see of a database: one transaction with statements by name; and what a driver must do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

Row: TypeAlias = tuple[Any, ...]
P = ParamSpec("P")
R = TypeVar("R")
DAMAGED = "the database is damaged: its operator finds the details in the log of the service"
"""What callers are told of it."""


class Tx(Protocol):
    """One transaction. Statements are those of `sql/`, by name."""

    @property
    def now(self) -> float:
        """Unix seconds: the same value throughout the transaction."""
        ...

    def rows(self, statement: str, **values: Any) -> list[Row]: ...

    def row(self, statement: str, **values: Any) -> Row | None:
        """The first row, None when there is none."""
        ...

    def run(self, statement: str, **values: Any) -> int:
        """How many rows it changed."""
        ...

    def many(self, statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """For each of the rows, all of which have the same names (those that the statement has not are ignored)."""
        ...


class Driver(Protocol):
    """Runs operations, which are functions of a `Tx`, each in a transaction of its own.

    An operation may be run again after it was rolled back, so it has no effect but that on the database. Errors of the
    database come out as `StoreUnavailable`, those that the operation raises as they are; after either nothing of it has
    happened.
    """

    async def write(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What `operation` returns, once it is durable."""
        ...

    async def read(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """For operations that change nothing; these do not wait for writers."""
        ...

    async def check(self, operation: Callable[[Tx], None]) -> None:
        """As `write`, but fails soon where that would wait for the database to come back."""
        ...

    async def verify(self) -> None:
        """Raises `StoreUnavailable` when the database can tell that what it says of files is damaged."""
        ...

    async def close(self) -> None: ...
