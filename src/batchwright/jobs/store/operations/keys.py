"""Operations on API keys."""

from __future__ import annotations

from dataclasses import asdict

from batchwright.jobs.store.records import ApiKey
from batchwright.jobs.store.transaction import Tx


def add_key(tx: Tx, key: ApiKey, digest: bytes) -> None:
    tx.run("add_key", **asdict(key), digest=digest)


def key(tx: Tx, digest: bytes) -> ApiKey | None:
    row = tx.row("key", digest=digest)
    return ApiKey(*row) if row else None


def keys(tx: Tx, tenant: str | None) -> list[ApiKey]:
    return [ApiKey(*row) for row in tx.rows("keys", tenant=tenant)]


def revoke_key(tx: Tx, key_id: str) -> bool:
    return tx.run("revoke_key", id=key_id, now=tx.now) == 1
