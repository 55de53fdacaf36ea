"""What operations see of a database: one transaction with statements by name; and what a driver must do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

Row: TypeAlias = tuple[Any, ...]
P = ParamSpec("P")
R = TypeVar("R")
DAMAGED = "the database is damaged: its operator finds the details in the log of the service"
"""Message for callers when the database is damaged."""


class Tx(Protocol):
    """One transaction. Statements are those of `sql/`, by name."""

    @property
    def now(self) -> float:
        """Unix seconds: the same value throughout the transaction."""
        ...

    def rows(self, statement: str, **values: Any) -> list[Row]: ...

    def row(self, statement: str, **values: Any) -> Row | None:
        """Return the first row; None when there is none."""
        ...

    def run(self, statement: str, **values: Any) -> int:
        """Run a statement, and return how many rows it changed."""
        ...

    def many(self, statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement for each of the rows, which have the same names (those not in it are ignored)."""
        ...


class Driver(Protocol):
    """Runs operations, which are functions of a `Tx`, each in a transaction of its own.

    An operation may be run again after it was rolled back, so it has no effect but that on the database. Errors of the
    database come out as `StoreUnavailable`, those that the operation raises as they are; after either nothing of it has
    happened.
    """

    async def write(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `operation`, and return its result once it is durable."""
        ...

    async def read(self, operation: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation that changes nothing; it does not wait for writers."""
        ...

    async def check(self, operation: Callable[[Tx], None]) -> None:
        """Do as `write`, but fail soon where that would wait for the database to come back."""
        ...

    async def verify(self) -> None:
        """Raise `StoreUnavailable` when the database can tell that its records of files are damaged."""
        ...

    async def close(self) -> None: ...
