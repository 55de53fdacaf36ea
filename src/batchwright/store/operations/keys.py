"""Operations on API keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from batchwright.limiting.quotas import of_values
from batchwright.store.records import ApiKey
from batchwright.store.transaction import Row, Tx

_COLUMNS = len(ApiKey.__dataclass_fields__)
_SCOPES, _QUOTAS = 7, 12


def _as_key(row: Row) -> ApiKey:
    """The record of a row whose first columns are `key_columns`: the fields of the record in order."""
    values = [*row[:_COLUMNS]]
    values[_SCOPES] = tuple(json.loads(values[_SCOPES]))
    values[_QUOTAS] = of_values(json.loads(values[_QUOTAS]))
    return ApiKey(*values)


def _values(key: ApiKey) -> dict[str, Any]:
    return asdict(key) | {"scopes": json.dumps(key.scopes), "quotas": json.dumps(key.quotas.as_values())}


def add_key(tx: Tx, key: ApiKey, digest: bytes) -> None:
    """Add a key. `digest`: SHA-256 of its secret."""
    tx.run("add_key", **_values(key), digest=digest)


def key(tx: Tx, digest: bytes) -> ApiKey | None:
    """The key whose secret has this digest; None if there is none, or it is revoked or expired.

    The secret from before the last rotation is valid until its time is over; `expires_at` is then no later than that.
    """
    row = tx.row("key", digest=digest, now=tx.now)
    if row is None:
        return None
    found, until = _as_key(row), row[_COLUMNS]
    if until is not None and (found.expires_at is None or until < found.expires_at):
        return replace(found, expires_at=until)
    return found


def any_key(tx: Tx) -> bool:
    """Whether a key was ever issued, revoked and expired keys included."""
    return tx.row("any_key") is not None


def keys(tx: Tx, tenant: str | None = None) -> list[ApiKey]:
    """Keys of a tenant, or of all tenants (None), newest first, revoked keys included."""
    return [_as_key(row) for row in tx.rows("keys", tenant=tenant)]


def update_key(tx: Tx, key_id: str, changes: Mapping[str, Any]) -> ApiKey | None:
    """Replace fields of a key by name: `name`, `expires_at`, `scopes`, `weight`, `best_priority`, `quotas`.

    `quotas` replaces single quotas by name; a quota of None removes the limit. Returns the key as it is afterwards;
    None if there is no such key.
    """
    row = tx.row("lock_key", id=key_id)
    if row is None:
        return None
    key = _as_key(row)
    changed = replace(key, **{**changes, "quotas": replace(key.quotas, **changes.get("quotas", {}))})
    values = _values(changed)
    names = ("id", "name", "expires_at", "scopes", "weight", "best_priority", "quotas")
    tx.run("update_key", **{name: values[name] for name in names})
    return changed


def rotate_key(tx: Tx, key_id: str, digest: bytes, prefix: str, overlap: float) -> ApiKey | None:
    """Give a key another secret. The previous secret works for `overlap` more seconds; older ones stop working.

    Returns the key as it is afterwards; None if there is no such key, or it is revoked.
    """
    row = tx.row("lock_key", id=key_id)
    if row is None or (key := _as_key(row)).revoked_at is not None:
        return None
    until = tx.now + overlap
    tx.run("rotate_key", id=key_id, digest=digest, prefix=prefix, until=until)
    return replace(key, prefix=prefix, previous_until=until)


def note_key_uses(tx: Tx, used_at: Mapping[str, float]) -> None:
    """Record when keys were last used, by key id. A time earlier than the recorded one is ignored."""
    for key_id in sorted(used_at):
        tx.run("note_key_use", id=key_id, used_at=used_at[key_id])


def revoke_key(tx: Tx, key_id: str) -> bool:
    """Revoke a key, which stays listed with the time of its first revocation. False if there is no such key."""
    return tx.run("revoke_key", id=key_id, now=tx.now) == 1
