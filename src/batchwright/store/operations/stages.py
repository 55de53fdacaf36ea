"""Operations by which workers take a batch from one stage of its life to the next."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.store.operations.batches import as_record, problems_as_json
from batchwright.store.operations.files import add_file
from batchwright.store.operations.outbox import announce
from batchwright.store.operations.workers import require_lease
from batchwright.store.records import BatchProblem, BatchRecord, FileRecord, NewLine
from batchwright.store.transaction import Tx


def _record(tx: Tx, batch_id: str) -> BatchRecord:
    [row] = tx.rows("batch", id=batch_id)
    return as_record(row)


def take_validation(tx: Tx, worker: str) -> BatchRecord | None:
    require_lease(tx, worker)
    row = tx.row("take_validation", worker=worker, now=tx.now)
    if row is None:
        return None
    key, batch_id = row
    tx.run("remove_lines", batch=key)
    return _record(tx, batch_id)


def _validated_by(tx: Tx, worker: str, batch_id: str) -> int | None:
    """The key of a batch, which is locked, if this worker is validating it; None otherwise."""
    row = tx.row("lock_batch", id=batch_id)
    if row is None:
        return None
    key, status, ending, holder = row
    return int(key) if (status, ending, holder) == ("validating", None, worker) else None


def add_lines(tx: Tx, worker: str, batch_id: str, lines: Sequence[NewLine]) -> bool:
    key = _validated_by(tx, worker, batch_id)
    if key is None:
        return False
    rows = [
        {
            "batch": key,
            "number": line.number,
            "custom_id": line.custom_id,
            "first_byte": line.offset,
            "bytes": line.length,
        }
        for line in lines
    ]
    tx.many("add_lines", rows)
    return True


def begin(tx: Tx, worker: str, batch_id: str, *, total: int, model: str | None) -> bool:
    key = _validated_by(tx, worker, batch_id)
    if key is None:
        return False
    tx.run("begin_batch", key=key, total=total, model=model, now=tx.now)
    if total == 0:
        tx.run("finalize_batch", key=key, now=tx.now)
    return True


def reject(tx: Tx, worker: str, batch_id: str, problems: Sequence[BatchProblem]) -> bool:
    key = _validated_by(tx, worker, batch_id)
    if key is None:
        return False
    tx.run("reject_batch", key=key, errors=problems_as_json(problems), now=tx.now)
    tx.run("forget_lines", key=key, now=tx.now)
    announce(tx, key, "batch.failed")
    return True


def expire_batches(tx: Tx) -> list[str]:
    overdue = tx.rows("overdue_batches", now=tx.now)
    for key, _, status in overdue:
        tx.run("expire_batch", key=key)
        if status == "validating":
            tx.run("forget_lines", key=key, now=tx.now)
    return [batch_id for _, batch_id, _ in overdue]


def take_finishing(tx: Tx, worker: str) -> BatchRecord | None:
    require_lease(tx, worker)
    row = tx.row("take_finishing", worker=worker)
    return _record(tx, row[0]) if row else None


def finish(
    tx: Tx, worker: str, batch_id: str, *, output: FileRecord | None, errors: FileRecord | None, unfinished: int
) -> bool:
    row = tx.row("lock_batch", id=batch_id)
    if row is None:
        return False
    key, _, ending, holder = row
    if ending is None or holder != worker:
        return False
    for file in (output, errors):
        if file is not None:
            add_file(tx, file)
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
