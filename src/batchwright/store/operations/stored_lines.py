"""Reading and removing the stored lines of batches, in pieces of a bounded number of bytes.

Results may be of any size: the vector of an embedding has thousands of characters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from batchwright.store.records import StoredLine
from batchwright.store.transaction import Row, Tx

PAGE_BYTES = 4 * 2**20


def page(tx: Tx, statement: str, sizes: str, *, batch: int, after: int, limit: int) -> list[StoredLine]:
    """The lines that `statement` finds: at most `limit`, and only as many as `PAGE_BYTES` hold, but at least one.

    `sizes` names the statement that gives the bytes of the same rows.
    """
    count = _fitting(tx.rows(sizes, batch=batch, after=after, limit=limit), PAGE_BYTES)
    return [StoredLine(*line) for line in tx.rows(statement, batch=batch, after=after, limit=count)] if count else []


def _fitting(sizes: Sequence[Row], room: int) -> int:
    """How many of the first rows, each a number of bytes, fit into `room`; at least one if there are any."""
    total = 0
    for count, (size,) in enumerate(sizes):
        total += size or 0
        if count and total > room:
            return count
    return len(sizes)


def lines(tx: Tx, batch_id: str, *, after: int, limit: int) -> list[StoredLine]:
    """A page of the lines with `number` > `after`, by number, to build files from; empty if they were removed."""
    row = tx.row("batch_key", id=batch_id)
    if row is None:
        return []
    found = page(tx, "lines", "line_sizes", batch=row[0], after=after, limit=limit)
    [(removed_at, _)] = tx.rows("lines_removed_at", key=row[0])
    return found if removed_at is None else []


def removed_on(tx: Tx, key: int) -> str | None:
    """The day on which the lines of this batch were removed; None if they were not, or it never had any in progress.

    Rows are removed only after that is noted: what was read before this returned None is whole.
    """
    [(removed_at, total)] = tx.rows("lines_removed_at", key=key)
    return None if removed_at is None or not total else datetime.fromtimestamp(removed_at, UTC).date().isoformat()


def forget_files(tx: Tx, file_ids: Sequence[str]) -> None:
    """Forget files whose bytes were removed. Batches that lose their last output file thereby lose their lines."""
    ids = json.dumps([*file_ids])
    # Locked before their files go: of two calls that forget the two files of one batch, the later one then sees it.
    keys = [key for (key,) in tx.rows("batches_of_files", ids=ids)]
    tx.run("forget_files", ids=ids)
    for key in keys:
        tx.run("forget_lines_without_files", key=key, now=tx.now)


def remove_lines(tx: Tx, limit: int, *, age: float) -> bool:
    """Remove at most `limit` rows of lines and results that batches no longer have, and fewer if they are large.

    Batches that ended without a file lose their lines when their output would have expired: `age` seconds after
    the end, unless they say otherwise. Returns whether there may be more to remove.
    """
    tx.run("forget_lines_that_never_had_files", now=tx.now, age=age, limit=limit)
    room = PAGE_BYTES
    while limit > 0 and room > 0:
        row = tx.row("next_removal")
        if row is None:
            return False
        [key] = row
        sizes = tx.rows("result_sizes", batch=key, after=0, limit=limit)
        count = _fitting(sizes, room)
        tx.run("remove_first_results", batch=key, limit=count)
        limit -= count
        room -= sum(size for (size,) in sizes[:count])
        if count < len(sizes):
            return True
        limit -= tx.run("remove_first_lines", batch=key, limit=limit)
        if limit > 0:
            tx.run("end_removal", key=key)
    return True
