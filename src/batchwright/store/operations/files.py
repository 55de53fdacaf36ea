"""Operations on the records of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from batchwright.errors import Conflict, NotFound
from batchwright.limiting.quotas import UNLIMITED, Quotas
from batchwright.store.operations.quotas import require_storage
from batchwright.store.records import FileRecord, Purpose
from batchwright.store.transaction import Tx

_END_OF_TIME = 1e300


def add_file(tx: Tx, file: FileRecord, *, defaults: Quotas | None = UNLIMITED) -> None:
    """Make a file visible. Raises `QuotaExceeded` where its tenant or its key has no room for it.

    `defaults`: the quotas of tenants that have none of their own; None: quotas do not matter. What is compared with a
    quota does not change until the file is added, whatever other processes add.
    """
    if defaults is not None:
        require_storage(tx, file, defaults)
    tx.run("add_file", **asdict(file))


def file(tx: Tx, tenant: str, file_id: str) -> FileRecord | None:
    """Return a file; None: there is no such file, or it is another tenant's, deleted or expired."""
    row = tx.row("file", tenant=tenant, id=file_id, now=tx.now)
    return FileRecord(*row) if row else None


def is_there(tx: Tx, tenant: str, file_id: str) -> bool:
    """Return whether the tenant has this file; until the end of the transaction it is not deleted."""
    return tx.row("lock_file", tenant=tenant, id=file_id, now=tx.now) is not None


def files(
    tx: Tx,
    tenant: str,
    *,
    limit: int,
    purpose: Purpose | None = None,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> list[FileRecord]:
    """Return files by time of creation (then id). `after`: the id of the last one of the previous page.

    Raises `NotFound` for an `after` that is unknown: an empty page would be taken for the end of the list.
    """
    ascending = order == "asc"
    place = (-_END_OF_TIME if ascending else _END_OF_TIME, "")
    if after is not None:
        row = tx.row("file_created_at", tenant=tenant, id=after)
        if row is None:
            raise NotFound(f"after={after!r}: there is no such file; list from the start", param="after")
        place = (row[0], after)
    rows = tx.rows(
        "files_ascending" if ascending else "files_descending",
        tenant=tenant,
        purpose=purpose,
        created_at=place[0],
        id=place[1],
        limit=limit,
        now=tx.now,
    )
    return [FileRecord(*row) for row in rows]


def delete_file(tx: Tx, tenant: str, file_id: str) -> bool:
    """Delete a file. False: no such file. Raises `Conflict` for the input of a batch that has not ended."""
    if not is_there(tx, tenant, file_id):
        return False
    reader = tx.row("reader_of_file", id=file_id)
    if reader is not None:
        raise Conflict(f"file {file_id} is the input of batch {reader[0]}, which has not ended: cancel it first")
    tx.run("delete_file", tenant=tenant, id=file_id, now=tx.now)
    return True


def take_dead_files(tx: Tx, limit: int) -> list[str]:
    """Return ids of files, of all tenants, that are deleted or expired (and that no unfinished batch reads),
    whose bytes can be removed. They stay on this list until `forget_files`, so that a crash between the two leaves
    no bytes behind.
    """
    return [row[0] for row in tx.rows("dead_files", limit=limit, now=tx.now)]


def known_files(tx: Tx, file_ids: Sequence[str]) -> set[str]:
    """Return which of these have a record, of whatever tenant: the rest were left behind by a crash."""
    return {row[0] for row in tx.rows("known_files", ids=json.dumps([*file_ids]))}
