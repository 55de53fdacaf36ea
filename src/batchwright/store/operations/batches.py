"""Operations on batches, as their owners see them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from batchwright.errors import Conflict, NotFound
from batchwright.limiting.quotas import Quotas
from batchwright.store.operations.files import is_there
from batchwright.store.operations.quotas import require_queue
from batchwright.store.operations.stored_lines import page, removed_on
from batchwright.store.records import ENDED, BatchProblem, BatchRecord, BatchStatus, LineCounts, StoredLine, TokenUsage
from batchwright.store.transaction import Row, Tx

_NEWEST = 2**62
_PARTS: Mapping[str, type[LineCounts | TokenUsage]] = {"counts": LineCounts, "usage": TokenUsage}
_PART_COLUMNS = {name: [each.name for each in fields(part)] for name, part in _PARTS.items()}
_COLUMNS = [column for each in fields(BatchRecord) for column in _PART_COLUMNS.get(each.name, [each.name])]
"""The columns that `batch_columns` in `sql/batches.sql` names."""


def as_record(row: Row) -> BatchRecord:
    """The record of a row of `batch_columns`: the fields in order, `counts` and `usage` unfolded in their places."""
    values: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
    for name, part in _PARTS.items():
        values[name] = part(**{column: values.pop(column) for column in _PART_COLUMNS[name]})
    values["metadata"] = json.loads(values["metadata"])
    values["errors"] = tuple(BatchProblem(**problem) for problem in json.loads(values["errors"]))
    values["simple"], values["paused"] = bool(values["simple"]), bool(values["paused"])
    return BatchRecord(**values)


def problems_as_json(problems: Sequence[BatchProblem]) -> str:
    return json.dumps([asdict(problem) for problem in problems])


def _values(batch: BatchRecord) -> Mapping[str, Any]:
    values = {name: getattr(batch, name) for name in BatchRecord.__dataclass_fields__}
    counts, usage = values.pop("counts"), values.pop("usage")
    values["metadata"] = json.dumps(dict(batch.metadata))
    values["errors"] = problems_as_json(batch.errors)
    return values | asdict(counts) | asdict(usage)


def _add(tx: Tx, batch: BatchRecord) -> tuple[int | None, BatchRecord]:
    """The key and the record of the batch; or None and the batch made before with the same idempotency key."""
    row = tx.row("add_batch", **_values(batch))
    if row is not None:
        return row[0], batch
    before = _of_idempotency_key(tx, batch)
    if before is None:
        raise Conflict(f"there is already a batch {batch.id}")
    return None, before


def _of_idempotency_key(tx: Tx, batch: BatchRecord) -> BatchRecord | None:
    if batch.idempotency_key is None:
        return None
    row = tx.row("batch_of_idempotency_key", tenant=batch.tenant, idempotency_key=batch.idempotency_key)
    return as_record(row) if row else None


def _require_input(tx: Tx, batch: BatchRecord) -> None:
    if not is_there(tx, batch.tenant, batch.input_file_id):
        raise NotFound(f"there is no file {batch.input_file_id}: upload it first")


def create_batch(tx: Tx, batch: BatchRecord, defaults: Quotas) -> BatchRecord:
    before = _of_idempotency_key(tx, batch)
    if before is not None:
        return before
    _require_input(tx, batch)
    require_queue(tx, batch, defaults)
    return _add(tx, batch)[1]


def batch(tx: Tx, tenant: str, batch_id: str) -> BatchRecord | None:
    row = tx.row("batch_of_tenant", tenant=tenant, id=batch_id)
    return as_record(row) if row else None


def batches(
    tx: Tx, tenant: str, *, limit: int, after: str | None, simple: bool, status: BatchStatus | None
) -> list[BatchRecord]:
    before = _NEWEST
    if after is not None:
        row = tx.row("batch_key_of_tenant", tenant=tenant, id=after)
        if row is None:
            raise NotFound(f"after={after!r}: there is no such batch; list from the start", param="after")
        before = row[0]
    rows = tx.rows("batches", tenant=tenant, before=before, simple=simple, status=status, limit=limit)
    return [as_record(row) for row in rows]


def request_cancel(tx: Tx, tenant: str, batch_id: str) -> BatchRecord | None:
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
    row = tx.row("lock_batch_of_tenant", tenant=tenant, id=batch_id)
    if row is None:
        return None
    key, status, ending = row
    if ending is None and status not in ENDED:
        tx.run("pause_batch", key=key, paused=paused)
    return batch(tx, tenant, batch_id)


def retry_batch(tx: Tx, tenant: str, batch_id: str, batch: BatchRecord, defaults: Quotas) -> BatchRecord:
    before = _of_idempotency_key(tx, batch)
    if before is not None:
        return before
    # Locked, so that its lines are not removed while they are copied.
    row = tx.row("lock_batch_of_tenant", tenant=tenant, id=batch_id)
    if row is None:
        raise NotFound(f"there is no batch {batch_id}")
    parent_key = row[0]
    [parent] = [as_record(row) for row in tx.rows("batch", id=batch_id)]
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
    """Number of lines that did not succeed. Raises `Conflict` if there are none, or it is too early or too late."""
    if batch.status not in ENDED:
        raise Conflict(f"batch {batch.id} has not ended (it is {batch.status}): retry it when it has, or cancel it")
    removed = removed_on(tx, key)
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
    row = tx.row("batch_key_of_tenant", tenant=tenant, id=batch_id)
    if row is None:
        return None
    found = page(tx, "results", "result_sizes", batch=row[0], after=after, limit=limit)
    removed = removed_on(tx, row[0])
    if removed is not None:
        raise NotFound(f"the results of batch {batch_id} were removed with its output files on {removed}")
    return found


def count_batches(tx: Tx, tenant: str | None, *, simple: bool | None) -> dict[BatchStatus, int]:
    return dict(tx.rows("count_batches", tenant=tenant, simple=simple))


def ending_among(tx: Tx, batch_ids: Sequence[str]) -> set[str]:
    return {row[0] for row in tx.rows("ending_among", ids=json.dumps([*batch_ids]))}
