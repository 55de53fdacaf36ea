"""Operations that take a batch from one stage of its life to the next, as workers see them."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.store.operations.batches import as_record, problems_as_json
from batchwright.store.operations.files import add_file
from batchwright.store.operations.outbox import announce
from batchwright.store.operations.workers import require_lease
from batchwright.store.records import BatchProblem, BatchRecord, FileRecord, NewLine
from batchwright.store.transaction import Tx


def _record(tx: Tx, batch_id: str) -> BatchRecord | None:
    row = tx.row("batch", id=batch_id)
    return as_record(row) if row else None


def take_validation(tx: Tx, worker: str) -> BatchRecord | None:
    """Take the oldest batch to validate that no worker validates. Lines that an earlier try added are removed.

    A worker validates one batch at a time: one that it took before and neither began nor rejected is given again.
    None: there is none. Raises `LeaseLost`.
    """
    require_lease(tx, worker)
    row = tx.row("take_validation", worker=worker, now=tx.now)
    if row is None:
        return None
    key, batch_id = row
    tx.run("remove_lines", batch=key)
    return _record(tx, batch_id)


def _validated_by(tx: Tx, worker: str, batch_id: str) -> int | None:
    """Return the key of a batch that this worker is validating, locked; None when it is not."""
    row = tx.row("lock_batch", id=batch_id)
    if row is None:
        return None
    key, status, ending, holder = row
    return int(key) if (status, ending, holder) == ("validating", None, worker) else None


def add_lines(tx: Tx, worker: str, batch_id: str, lines: Sequence[NewLine]) -> bool:
    """Add lines to a batch. False: the batch is not this worker's any more, or has an ending; nothing was added."""
    key = _validated_by(tx, worker, batch_id)
    if key is None:
        return False
    tx.many(
        "add_lines",
        [
            {
                "batch": key,
                "number": line.number,
                "custom_id": line.custom_id,
                "first_byte": line.offset,
                "bytes": line.length,
            }
            for line in lines
        ],
    )
    return True


def begin(tx: Tx, worker: str, batch_id: str, *, total: int, model: str | None) -> bool:
    """Begin a validated batch, or finalize it at once where `total`, the number of lines that were added, is 0.

    False as in `add_lines`.
    """
    key = _validated_by(tx, worker, batch_id)
    if key is None:
        return False
    tx.run("begin_batch", key=key, total=total, model=model, now=tx.now)
    if total == 0:
        tx.run("finalize_batch", key=key, now=tx.now)
    return True


def reject(tx: Tx, worker: str, batch_id: str, problems: Sequence[BatchProblem]) -> bool:
    """Fail a batch in validation, with a message to the outbox; added lines are removed. False as in `add_lines`."""
    key = _validated_by(tx, worker, batch_id)
    if key is None:
        return False
    tx.run("reject_batch", key=key, errors=problems_as_json(problems), now=tx.now)
    tx.run("forget_lines", key=key, now=tx.now)
    announce(tx, key, "batch.failed")
    return True


def expire_batches(tx: Tx) -> list[str]:
    """Set the ending of batches in progress, or validating, that have expired. Returns their ids."""
    overdue = tx.rows("overdue_batches", now=tx.now)
    for key, _, status in overdue:
        tx.run("expire_batch", key=key)
        if status == "validating":
            tx.run("forget_lines", key=key, now=tx.now)
    return [batch_id for _, batch_id, _ in overdue]


def take_finishing(tx: Tx, worker: str) -> BatchRecord | None:
    """Take a batch with an ending whose files no worker builds. None: there is none.

    A worker finishes one batch at a time: one that it took before and did not finish is given again. Raises
    `LeaseLost`.
    """
    require_lease(tx, worker)
    row = tx.row("take_finishing", worker=worker)
    return _record(tx, row[0]) if row else None


def finish(
    tx: Tx, worker: str, batch_id: str, *, output: FileRecord | None, errors: FileRecord | None, unfinished: int
) -> bool:
    """Give a batch its files and final status, and the outbox its messages. False: not this worker's any more.

    `unfinished`: lines that had no result, which now count as failed.
    """
    row = tx.row("lock_batch", id=batch_id)
    if row is None:
        return False
    key, _, ending, holder = row
    if ending is None or holder != worker:
        return False
    for file in (output, errors):
        if file is not None:
            add_file(tx, file, defaults=None)
    tx.run(
        "finish_batch",
        key=key,
        output_file_id=output.id if output else None,
        error_file_id=errors.id if errors else None,
        unfinished=unfinished,
        now=tx.now,
    )
    tx.run("free_lines_of_batch", batch=key)
    tx.run("clear_suspects_of_batch", batch=key)
    announce(tx, key, f"batch.{ending}")
    return True
