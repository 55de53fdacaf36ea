"""Operations on the records of files, and on the identity that ties the store to the folder with their bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from batchwright.errors import Conflict, NotFound
from batchwright.limiting.quotas import Quotas
from batchwright.store.operations.quotas import require_storage
from batchwright.store.records import FileRecord, Purpose, StoreIdentity
from batchwright.store.transaction import Tx

_END_OF_TIME = 1e300


def add_file(tx: Tx, file: FileRecord, defaults: Quotas | None = None) -> None:
    """`defaults`: the quotas of a tenant that has none of its own; None: no quota is checked."""
    if defaults is not None:
        require_storage(tx, file, defaults)
    tx.run("add_file", **asdict(file))


def file(tx: Tx, tenant: str, file_id: str) -> FileRecord | None:
    row = tx.row("file", tenant=tenant, id=file_id, now=tx.now)
    return FileRecord(*row) if row else None


def is_there(tx: Tx, tenant: str, file_id: str) -> bool:
    """Whether the tenant has this file. It is locked: it cannot be deleted until the transaction ends."""
    return tx.row("lock_file", tenant=tenant, id=file_id, now=tx.now) is not None


def files(
    tx: Tx, tenant: str, *, limit: int, purpose: Purpose | None, order: Literal["asc", "desc"], after: str | None
) -> list[FileRecord]:
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
    if not is_there(tx, tenant, file_id):
        return False
    reader = tx.row("reader_of_file", id=file_id)
    if reader is not None:
        raise Conflict(f"file {file_id} is the input of batch {reader[0]}, which has not ended: cancel it first")
    tx.run("delete_file", tenant=tenant, id=file_id, now=tx.now)
    return True


def take_dead_files(tx: Tx, limit: int) -> list[str]:
    return [row[0] for row in tx.rows("dead_files", limit=limit, now=tx.now)]


def known_files(tx: Tx, file_ids: Sequence[str]) -> set[str]:
    return {row[0] for row in tx.rows("known_files", ids=json.dumps([*file_ids]))}


def identity(tx: Tx) -> StoreIdentity | None:
    row = tx.row("identity")
    return StoreIdentity(*row) if row else None


def set_identity(tx: Tx, old: StoreIdentity | None, new: StoreIdentity) -> bool:
    if old is None:
        return tx.run("add_identity", **asdict(new)) == 1
    before = {f"old_{name}": value for name, value in asdict(old).items()}
    return tx.run("change_identity", **asdict(new), **before) == 1


def a_live_file(tx: Tx) -> str | None:
    row = tx.row("a_live_file", now=tx.now)
    return row[0] if row else None
