"""Operations that remove lines and results of ended batches, when the files built from them are gone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from batchwright.store.operations import result_pages
from batchwright.store.transaction import Tx


def removed_on(tx: Tx, key: int) -> str | None:
    """Return the day on which the lines of this batch were removed; None where they are there, or none was in progress.

    Rows go only after that is noted: what was read before this returned None is whole.
    """
    [(removed_at, total)] = tx.rows("lines_removed_at", key=key)
    return None if removed_at is None or not total else datetime.fromtimestamp(removed_at, UTC).date().isoformat()


def forget_files(tx: Tx, file_ids: Sequence[str]) -> None:
    """Forget files whose bytes are gone. A batch that has lost all its output files has no lines from now on."""
    ids = json.dumps([*file_ids])
    # Locked before their files go: of two that forget the two files of one batch, the later one then sees it.
    keys = [key for (key,) in tx.rows("batches_of_files", ids=ids)]
    tx.run("forget_files", ids=ids)
    for key in keys:
        tx.run("forget_lines_without_files", key=key, now=tx.now)


def remove_lines(tx: Tx, limit: int, *, age: float) -> bool:
    """Remove at most `limit` rows of lines and results that batches do not have any more, and fewer large ones.

    Batches that ended without any file lose theirs, too, when their output would have expired: `age` seconds after
    the end, unless they say otherwise. Whether there may be more to remove.
    """
    tx.run("forget_lines_that_never_had_files", now=tx.now, age=age, limit=limit)
    room = result_pages.PAGE_BYTES
    while limit > 0 and room > 0:
        row = tx.row("next_removal")
        if row is None:
            return False
        [key] = row
        sizes = tx.rows("result_sizes", batch=key, after=0, limit=limit)
        count = result_pages.fitting(sizes, room)
        tx.run("remove_first_results", batch=key, limit=count)
        limit -= count
        room -= sum(size for (size,) in sizes[:count])
        if count < len(sizes):
            return True
        limit -= tx.run("remove_first_lines", batch=key, limit=limit)
        if limit > 0:
            tx.run("end_removal", key=key)
    return True
