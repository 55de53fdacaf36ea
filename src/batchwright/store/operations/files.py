"""Operations on the records of files, and on the identity that ties the store to the folder with their bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from batchwright.errors import Conflict, NotFound
from batchwright.limiting.quotas import UNLIMITED, Quotas
from batchwright.store.operations.quotas import require_storage
from batchwright.store.records import FileRecord, Purpose, StoreIdentity
from batchwright.store.transaction import Tx

_END_OF_TIME = 1e300


def add_file(tx: Tx, file: FileRecord, *, defaults: Quotas | None = UNLIMITED) -> None:
    """Make a file visible. Raises `QuotaExceeded` if its tenant or its key has no room for it.

    `defaults`: the quotas of tenants that have none of their own; None: no quota is checked. The use that is compared
    with a quota does not change until the file is added, whatever other processes add.
    """
    if defaults is not None:
        require_storage(tx, file, defaults)
    tx.run("add_file", **asdict(file))


def file(tx: Tx, tenant: str, file_id: str) -> FileRecord | None:
    """A file; None if there is none, or it belongs to another tenant, or it was deleted or has expired."""
    row = tx.row("file", tenant=tenant, id=file_id, now=tx.now)
    return FileRecord(*row) if row else None


def is_there(tx: Tx, tenant: str, file_id: str) -> bool:
    """Whether the tenant has this file. It is locked: it cannot be deleted until the transaction ends."""
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
    """A page of the files of a tenant, by time of creation, then id. `after`: the last id of the page before.

    Raises `NotFound` for an unknown `after`: an empty page would be taken for the end of the list.
    """
    statement, created_at = ("files_ascending", -_END_OF_TIME) if order == "asc" else ("files_descending", _END_OF_TIME)
    if after is not None:
        row = tx.row("file_created_at", tenant=tenant, id=after)
        if row is None:
            raise NotFound(f"after={after!r}: there is no such file; list from the start", param="after")
        created_at = row[0]
    place = {"created_at": created_at, "id": after or ""}
    rows = tx.rows(statement, tenant=tenant, purpose=purpose, limit=limit, now=tx.now, **place)
    return [FileRecord(*row) for row in rows]


def delete_file(tx: Tx, tenant: str, file_id: str) -> bool:
    """Delete a file; False if there is none. Raises `Conflict` for the input of a batch that has not ended."""
    if not is_there(tx, tenant, file_id):
        return False
    reader = tx.row("reader_of_file", id=file_id)
    if reader is not None:
        raise Conflict(f"file {file_id} is the input of batch {reader[0]}, which has not ended: cancel it first")
    tx.run("delete_file", tenant=tenant, id=file_id, now=tx.now)
    return True


def take_dead_files(tx: Tx, limit: int) -> list[str]:
    """Ids of files, of all tenants, whose bytes can be removed: they were deleted, or expired and are not read by
    an unfinished batch. They stay on this list until `forget_files`, so that a crash in between leaves no bytes behind.
    """
    return [row[0] for row in tx.rows("dead_files", limit=limit, now=tx.now)]


def known_files(tx: Tx, file_ids: Sequence[str]) -> set[str]:
    """The ids that have a record, of any tenant; files with other ids are left over from a crash."""
    return {row[0] for row in tx.rows("known_files", ids=json.dumps([*file_ids]))}


def identity(tx: Tx) -> StoreIdentity | None:
    """The identity of the store; None if it was never used with a folder of files."""
    row = tx.row("identity")
    return StoreIdentity(*row) if row else None


def set_identity(tx: Tx, old: StoreIdentity | None, new: StoreIdentity) -> bool:
    """Replace the identity `old` with `new`. Returns False, and changes nothing, if the current one is not `old`."""
    if old is None:
        return tx.run("add_identity", **asdict(new)) == 1
    before = {f"old_{name}": value for name, value in asdict(old).items()}
    return tx.run("change_identity", **asdict(new), **before) == 1


def a_live_file(tx: Tx) -> str | None:
    """The id of any file that is neither deleted nor expired; None if there is none."""
    row = tx.row("a_live_file", now=tx.now)
    return row[0] if row else None
