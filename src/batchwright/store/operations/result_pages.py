"""Pages of lines with their results, which may be of any size: a vector of an embedding has thousands of characters."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.store.records import StoredLine
from batchwright.store.transaction import Row, Tx

PAGE_BYTES = 4 * 2**20


def page(tx: Tx, statement: str, sizes: str, *, batch: int, after: int, limit: int) -> list[StoredLine]:
    """Return what `statement` finds: at most `limit`, and only as many as `PAGE_BYTES` hold, but one at least.

    `sizes` names the statement that gives the bytes of the same rows.
    """
    count = fitting(tx.rows(sizes, batch=batch, after=after, limit=limit), PAGE_BYTES)
    return [StoredLine(*line) for line in tx.rows(statement, batch=batch, after=after, limit=count)] if count else []


def fitting(sizes: Sequence[Row], room: int) -> int:
    """Return how many of the first rows, each of so many bytes, fit into `room`; at least one if there is any."""
    total = 0
    for count, (size,) in enumerate(sizes):
        total += size or 0
        if count and total > room:
            return count
    return len(sizes)
