"""Tables and times on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_UNFOLDED = 10_000
"""Columns assumed where standard output is not a terminal, so that every row stays on one line."""


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their titles, folded on a terminal and each on one line elsewhere."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    if not console.is_terminal:
        console.width = _UNFOLDED
    console.print(table)


def when(seconds: float | None, otherwise: str = "") -> str:
    """Return a Unix time for people to read, in UTC; `otherwise` for None."""
    return otherwise if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
