"""Operations on batches and their stored lines, for owners and for workers, which move them from stage to stage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import Any

from batchwright.errors import Conflict, NotFound
from batchwright.limiting.quotas import UNLIMITED, Quotas
from batchwright.store.operations.files import add_file, is_there
from batchwright.store.operations.outbox import announce
from batchwright.store.operations.quotas import require_queue
from batchwright.store.operations.workers import require_lease
from batchwright.store.records import (
    ENDED,
    BatchProblem,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineCounts,
    LineState,
    NewLine,
    StoredLine,
    TokenUsage,
)
from batchwright.store.transaction import Row, Tx

PAGE_BYTES = 4 * 2**20
_NEWEST = 2**62
_COUNTS = [each.name for each in fields(BatchRecord)].index("counts")


def _as_record(row: Row) -> BatchRecord:
    """The record in a row of `batch_columns`: the fields in order, `counts` and `usage` expanded in their places."""
    counts, usage = row[_COUNTS : _COUNTS + 3], row[_COUNTS + 3 : _COUNTS + 7]
    folded = [*row[:_COUNTS], LineCounts(*counts), TokenUsage(*usage), *row[_COUNTS + 7 :]]
    values: dict[str, Any] = dict(zip(BatchRecord.__dataclass_fields__, folded, strict=True))
    values["metadata"] = json.loads(values["metadata"])
    values["errors"] = tuple(BatchProblem(**problem) for problem in json.loads(values["errors"]))
    values["simple"], values["paused"] = bool(values["simple"]), bool(values["paused"])
    return BatchRecord(**values)


def _problems_as_json(problems: Sequence[BatchProblem]) -> str:
    return json.dumps([asdict(problem) for problem in problems])


def _add(tx: Tx, batch: BatchRecord) -> tuple[int | None, BatchRecord]:
    """The key and the record of the batch; or None and the batch made before with the same idempotency key."""
    values = {name: getattr(batch, name) for name in BatchRecord.__dataclass_fields__}
    values |= asdict(values.pop("counts")) | asdict(values.pop("usage"))
    values["metadata"] = json.dumps(dict(batch.metadata))
    values["errors"] = _problems_as_json(batch.errors)
    row = tx.row("add_batch", **values)
    if row is not None:
        return row[0], batch
    before = _of_idempotency_key(tx, batch)
    if before is None:
        raise Conflict(f"there is already a batch {batch.id}")
    return None, before


def _of_idempotency_key(tx: Tx, batch: BatchRecord) -> BatchRecord | None:
    key = batch.idempotency_key
    return None if key is None else batch_of_idempotency_key(tx, batch.tenant, key)


def _require_input(tx: Tx, batch: BatchRecord) -> None:
    if not is_there(tx, batch.tenant, batch.input_file_id):
        raise NotFound(f"there is no file {batch.input_file_id}: upload it first")


def create_batch(
    tx: Tx, batch: BatchRecord, *, file: FileRecord | None = None, defaults: Quotas = UNLIMITED
) -> BatchRecord:
    """Add a batch and return it, or the batch made before with the same tenant and idempotency key.

    `file`: its input, which is added with it, and not if there is a batch already; None: the input was added before.
    Raises `NotFound` if that no longer exists, and `QuotaExceeded` if too much is enqueued or stored.
    """
    before = _of_idempotency_key(tx, batch)
    if before is not None:
        return before
    if file is None:
        _require_input(tx, batch)
    require_queue(tx, batch, defaults)
    key, made = _add(tx, batch)
    if file is not None and key is not None:
        add_file(tx, file, defaults=defaults)
    return made


def batch(tx: Tx, tenant: str, batch_id: str) -> BatchRecord | None:
    row = tx.row("batch_of_tenant", tenant=tenant, id=batch_id)
    return _as_record(row) if row else None


def batch_of_idempotency_key(tx: Tx, tenant: str, idempotency_key: str) -> BatchRecord | None:
    """The batch that a tenant made with this key; None if there is none."""
    row = tx.row("batch_of_idempotency_key", tenant=tenant, idempotency_key=idempotency_key)
    return _as_record(row) if row else None


def batches(
    tx: Tx,
    tenant: str,
    *,
    limit: int,
    after: str | None = None,
    simple: bool = False,
    status: BatchStatus | None = None,
) -> list[BatchRecord]:
    """A page of a tenant's batches, newest first. `after` and `NotFound`: as for `files`."""
    before = _NEWEST
    if after is not None:
        row = tx.row("batch_key_of_tenant", tenant=tenant, id=after)
        if row is None:
            raise NotFound(f"after={after!r}: there is no such batch; list from the start", param="after")
        before = row[0]
    rows = tx.rows("batches", tenant=tenant, before=before, simple=simple, status=status, limit=limit)
    return [_as_record(row) for row in rows]


def request_cancel(tx: Tx, tenant: str, batch_id: str) -> BatchRecord | None:
    """Set the ending of a batch that is validating or in progress and has none yet, and move it to `cancelling`.

    Returns the batch as it is afterwards; None if there is no such batch.
    """
    row = tx.row("lock_batch_of_tenant", tenant=tenant, id=batch_id)
    if row is None:
        return None
    key, status, ending = row
    if ending is None and status in ("validating", "in_progress"):
        tx.run("cancel_batch", key=key, now=tx.now)
        if status == "validating":
            tx.run("forget_lines", key=key, now=tx.now)
    return batch(tx, tenant, batch_id)


def set_paused(tx: Tx, tenant: str, batch_id: str, paused: bool) -> BatchRecord | None:
    """Pause or resume a batch. Its lines are not claimed; those already claimed go on, and so does its time.

    Has no effect once the batch has an ending. Returns the batch as it is afterwards; None if there is no such batch.
    """
    row = tx.row("lock_batch_of_tenant", tenant=tenant, id=batch_id)
    if row is None:
        return None
    key, status, ending = row
    if ending is None and status not in ENDED:
        tx.run("pause_batch", key=key, paused=paused)
    return batch(tx, tenant, batch_id)


def retry_batch(tx: Tx, tenant: str, batch_id: str, batch: BatchRecord, *, defaults: Quotas = UNLIMITED) -> BatchRecord:
    """Make `batch`, in progress, from the lines that did not succeed in an ended batch; they keep their numbers.

    Sets the input file, the parent, the status and the counts of `batch`, and its model if that is None. The lines
    of the new batch are copies, which stay when those of the old batch are removed. An idempotency key is honoured
    as in `create_batch`. Raises `NotFound` for the old batch or its input file, `Conflict` if that batch has not
    ended, has no such lines or they were removed, and `QuotaExceeded` as `create_batch` does.
    """
    before = _of_idempotency_key(tx, batch)
    if before is not None:
        return before
    # Locked, so that its lines are not removed while they are copied.
    row = tx.row("lock_batch_of_tenant", tenant=tenant, id=batch_id)
    if row is None:
        raise NotFound(f"there is no batch {batch_id}")
    parent_key = row[0]
    parent = _record(tx, batch_id)
    total = _count_retriable(tx, parent_key, parent)
    made = replace(
        batch,
        input_file_id=parent.input_file_id,
        model=batch.model or parent.model,
        parent_id=parent.id,
        status="in_progress",
        in_progress_at=tx.now,
        counts=LineCounts(total=total),
        enqueued_lines=total,
        enqueued_tokens=parent.enqueued_tokens * total // max(total, parent.counts.total),
    )
    _require_input(tx, made)
    require_queue(tx, made, defaults)
    key, made = _add(tx, made)
    if key is not None:
        tx.run("copy_unsuccessful_lines", batch=key, parent=parent_key)
    return made


def _count_retriable(tx: Tx, key: int, batch: BatchRecord) -> int:
    """Number of lines that did not succeed. Raises `Conflict` if the batch has not ended, or has none (any more)."""
    if batch.status not in ENDED:
        raise Conflict(f"batch {batch.id} has not ended (it is {batch.status}): retry it when it has, or cancel it")
    removed = _removed_on(tx, key)
    if removed is not None and batch.counts.failed:
        raise Conflict(
            f"batch {batch.id} cannot be retried: its lines were removed with its output files on {removed}; "
            "make a batch of the lines that are to be computed again"
        )
    total = 0
    if batch.lines_removed_at is None:
        [(total,)] = tx.rows("count_unsuccessful_lines", batch=key)
    if total == 0:
        if batch.status == "failed":
            why = "its input was not valid; mend it and make a new batch"
        elif batch.in_progress_at is None:
            why = (
                f"it was {batch.status} before its input was read; make a new batch of {batch.input_file_id}, its input"
            )
        else:
            why = "all of them succeeded"
        raise Conflict(f"batch {batch.id} has no lines to retry: {why}")
    return total


def results(tx: Tx, tenant: str, batch_id: str, *, after: int, limit: int) -> list[StoredLine] | None:
    """A page of the finished lines with `sequence` > `after`, in the order in which they were committed.

    At most `limit`, and fewer if they are large; an empty page is the last one. No line appears later at a place
    that was passed before. None if there is no such batch. Raises `NotFound` if the results were removed.
    """
    row = tx.row("batch_key_of_tenant", tenant=tenant, id=batch_id)
    if row is None:
        return None
    found = _page(tx, "results", "result_sizes", batch=row[0], after=after, limit=limit)
    removed = _removed_on(tx, row[0])
    if removed is not None:
        raise NotFound(f"the results of batch {batch_id} were removed with its output files on {removed}")
    return found


def count_batches(tx: Tx, tenant: str | None = None, *, simple: bool | None = None) -> dict[BatchStatus, int]:
    """Number of batches by status. `tenant` None: of all tenants. `simple` None: of both kinds."""
    return dict(tx.rows("count_batches", tenant=tenant, simple=simple))


def ending_among(tx: Tx, batch_ids: Sequence[str]) -> set[str]:
    """The ids of those batches that have an ending or are gone, whose lines need no longer be computed."""
    return {row[0] for row in tx.rows("ending_among", ids=json.dumps([*batch_ids]))}


# Stages in the life of a batch, as workers see them.


def _record(tx: Tx, batch_id: str) -> BatchRecord:
    [row] = tx.rows("batch", id=batch_id)
    return _as_record(row)


def take_validation(tx: Tx, worker: str) -> BatchRecord | None:
    """Take a batch to validate that no other worker has. Lines added by an earlier try are removed.

    It is the oldest one of the tenant whose last turn was longest ago, so that a tenant with many batches does not hold
    up the others. A worker validates one batch at a time: a batch that it took and neither began nor rejected is
    returned again. None if there is none. Raises `LeaseLost`.
    """
    require_lease(tx, worker)
    held = tx.row("held_validation", worker=worker, now=tx.now)
    row = held or _take_in_turn(tx, worker, "tenants_to_validate", "take_validation")
    if row is None:
        return None
    key, batch_id = row
    tx.run("remove_lines", batch=key)
    batch = _record(tx, batch_id)
    if held is None:
        # Last, since commits of the tenant's results wait for its row.
        tx.run("tenant_validates", tenant=batch.tenant, now=tx.now)
    return batch


def _take_in_turn(tx: Tx, worker: str, tenants: str, take: str) -> Row | None:
    """Take a batch of the first of `tenants` that has one which no worker holds. The caller notes the turn.

    The last two are names of statements. Returns the row of the batch; None if there is none.
    """
    taken = (tx.row(take, tenant=tenant, worker=worker, now=tx.now) for (tenant,) in tx.rows(tenants))
    return next((row for row in taken if row is not None), None)


def _validated_by(tx: Tx, worker: str, batch_id: str) -> int | None:
    """The key of a batch, which is locked, if this worker is validating it; None otherwise."""
    row = tx.row("lock_batch", id=batch_id)
    if row is None:
        return None
    key, status, ending, holder = row
    return int(key) if (status, ending, holder) == ("validating", None, worker) else None


def add_lines(tx: Tx, worker: str, batch_id: str, lines: Sequence[NewLine]) -> bool:
    """Add lines. Returns False, and adds none, if the batch is no longer this worker's or has an ending."""
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
            "position": line.position,
        }
        for line in lines
    ]
    tx.many("add_lines", rows)
    return True


def begin(tx: Tx, worker: str, batch_id: str, *, total: int, model: str | None, shared: float | None = None) -> bool:
    """Move a batch of `total` lines from validating to in_progress, or to finalizing if `total` is 0.

    `shared`: as in `BatchRecord`. Returns False as `add_lines` does.
    """
    key = _validated_by(tx, worker, batch_id)
    if key is None:
        return False
    tx.run("begin_batch", key=key, total=total, model=model, shared=shared, now=tx.now)
    if total == 0:
        tx.run("finalize_batch", key=key, now=tx.now)
    return True


def reject(tx: Tx, worker: str, batch_id: str, problems: Sequence[BatchProblem]) -> bool:
    """Move a batch from validating to failed, announce it, and remove its lines. Returns False as `add_lines` does."""
    key = _validated_by(tx, worker, batch_id)
    if key is None:
        return False
    tx.run("reject_batch", key=key, errors=_problems_as_json(problems), now=tx.now)
    tx.run("forget_lines", key=key, now=tx.now)
    announce(tx, key, "batch.failed")
    return True


def expire_batches(tx: Tx) -> list[str]:
    """Set the ending of batches in progress or validating whose time is over. Returns their ids."""
    overdue = tx.rows("overdue_batches", now=tx.now)
    for key, _, status in overdue:
        tx.run("expire_batch", key=key)
        if status == "validating":
            tx.run("forget_lines", key=key, now=tx.now)
    return [batch_id for _, batch_id, _ in overdue]


def take_finishing(tx: Tx, worker: str) -> BatchRecord | None:
    """Take a batch that has an ending and no other worker, to build its files. None if there is none.

    Tenants take turns, as for `take_validation`. A worker finishes one batch at a time: a batch that it took and did
    not finish is returned again. Raises `LeaseLost`.
    """
    require_lease(tx, worker)
    held = tx.row("held_finishing", worker=worker)
    row = held or _take_in_turn(tx, worker, "tenants_to_finish", "take_finishing")
    if row is None:
        return None
    batch = _record(tx, row[1])
    if held is None:
        tx.run("tenant_finishes", tenant=batch.tenant, now=tx.now)
    return batch


def finish(
    tx: Tx, worker: str, batch_id: str, *, output: FileRecord | None, errors: FileRecord | None, unfinished: int
) -> bool:
    """Give a batch its files and final status, and announce its end. Returns False if it is no longer this worker's.

    `unfinished`: the number of lines without a result, which count as failed from now on.
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


# Lines of batches, read and removed in pieces of a bounded number of bytes: results may be of any size.


def _page(tx: Tx, statement: str, sizes: str, *, limit: int, **given: Any) -> list[StoredLine]:
    """The lines that `statement` finds: at most `limit`, and only as many as `PAGE_BYTES` hold, but at least one.

    `sizes` names the statement that gives the sizes of the same rows in bytes; both get the parameters `given`.
    """
    count = _fitting(tx.rows(sizes, limit=limit, **given), PAGE_BYTES)
    return [StoredLine(*line) for line in tx.rows(statement, limit=count, **given)] if count else []


def _fitting(sizes: Sequence[Row], room: int) -> int:
    """How many of the first rows, each a number of bytes, fit into `room`; at least one if there are any."""
    total = 0
    for count, (size,) in enumerate(sizes):
        total += size or 0
        if count and total > room:
            return count
    return len(sizes)


def lines(tx: Tx, batch_id: str, *, after: int, limit: int, state: LineState | None = None) -> list[StoredLine]:
    """A page of the lines with `number` > `after`, by number; empty if they were removed. `state`: only lines in it."""
    row = tx.row("batch_key", id=batch_id)
    if row is None:
        return []
    if state is None:
        found = _page(tx, "lines", "line_sizes", batch=row[0], after=after, limit=limit)
    else:
        found = _page(tx, "lines_in_state", "line_sizes_in_state", batch=row[0], after=after, limit=limit, state=state)
    [(removed_at, _)] = tx.rows("lines_removed_at", key=row[0])
    return found if removed_at is None else []


def _removed_on(tx: Tx, key: int) -> str | None:
    """The day on which the lines of this batch were removed; None if they were not, or it never had any in progress.

    Rows are removed only after that is recorded, so what was read before this returned None is complete.
    """
    [(removed_at, total)] = tx.rows("lines_removed_at", key=key)
    return None if removed_at is None or not total else datetime.fromtimestamp(removed_at, UTC).date().isoformat()


def forget_files(tx: Tx, file_ids: Sequence[str]) -> None:
    """Forget files whose bytes were removed. Batches that thereby lose their last output file lose their lines."""
    ids = json.dumps([*file_ids])
    # Locked before their files go: if two calls forget the two files of one batch, the later one then notices.
    keys = [key for (key,) in tx.rows("batches_of_files", ids=ids)]
    tx.run("forget_files", ids=ids)
    for key in keys:
        tx.run("forget_lines_without_files", key=key, now=tx.now)


def remove_lines(tx: Tx, limit: int, *, age: float) -> bool:
    """Remove at most `limit` rows of lines and results that batches no longer have, and fewer if they are large.

    Batches that ended without a file lose their lines when their output would have expired: `age` seconds after
    the end, unless the batch says otherwise. Returns whether there may be more to remove.
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
