"""Operations on quotas and weights, and the checks against them in the transactions that add something."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from batchwright.errors import InvalidRequest, QuotaExceeded
from batchwright.limiting.quotas import UNLIMITED, Quotas, of_values
from batchwright.limiting.rates import Change
from batchwright.limiting.shares import WEIGHTS
from batchwright.store.records import BatchRecord, FileRecord, QuotaUse
from batchwright.store.transaction import Tx

_KEPT = ("storage_bytes", "enqueued_lines", "enqueued_tokens")
"""Names of the quotas that limit what the store keeps, in the order of the fields of `QuotaUse`."""


def set_tenant_weight(tx: Tx, tenant: str, weight: float) -> None:
    """Set a tenant's share of the capacity, 0.01 to 1000, by default 1. Raises `InvalidRequest` for other values."""
    least, most = WEIGHTS
    if not least <= weight <= most:
        raise InvalidRequest(f"weight={weight}: must be {least:g} to {most:g}", param="weight")
    tx.run("set_tenant_weight", tenant=tenant, weight=float(weight))


def tenant_weights(tx: Tx) -> dict[str, float]:
    """Weights of tenants, by tenant, that are not 1."""
    return dict(tx.rows("tenant_weights"))


def tenant_quotas(tx: Tx) -> dict[str, Quotas]:
    """Quotas of the tenants that have any of their own, by tenant."""
    return {tenant: of_values(json.loads(values)) for tenant, values in tx.rows("tenant_quotas")}


def set_tenant_quotas(tx: Tx, tenant: str, limits: Quotas, weight: float | None = None) -> None:
    """Replace the quotas of a tenant; defaults apply to those that `limits` lacks.

    `weight`: set as by `set_tenant_weight`, in the same transaction; None: unchanged.
    """
    if weight is not None:
        set_tenant_weight(tx, tenant, weight)
    if limits == UNLIMITED:
        tx.run("remove_tenant_quotas", tenant=tenant)
    else:
        tx.run("set_tenant_quotas", tenant=tenant, quotas=json.dumps(limits.as_values()))


def quota_use(tx: Tx, tenant: str, key_id: str | None = None) -> QuotaUse:
    """Amounts that a tenant, or one of its keys, uses in the store."""
    return QuotaUse(_stored(tx, tenant, key_id), *_enqueued(tx, tenant, key_id))


def kept_quotas(tx: Tx, defaults: Quotas) -> list[tuple[str, int, int]]:
    """Limits on what the store keeps: a name such as `tenant:a/storage_bytes`, the limit, and the amount used."""
    keys = [(key_id, tenant, of_values(json.loads(values))) for key_id, tenant, values in tx.rows("quotas_of_keys")]
    of_tenants = tenant_quotas(tx)
    all_limits = (defaults, *of_tenants.values(), *(limits for _, _, limits in keys))
    if all(getattr(limits, name) is None for limits in all_limits for name in _KEPT):
        return []
    used: defaultdict[tuple[str, str | None], list[int]] = defaultdict(lambda: [0] * len(_KEPT))
    for name, at in (("stored_of_all", 0), ("enqueued_of_all", 1)):
        for tenant, key_id, *amounts in tx.rows(name, now=tx.now):
            for owner in {(tenant, None), (tenant, key_id)}:
                for place, amount in enumerate(amounts, at):
                    used[owner][place] += amount
    tenants = {tenant for tenant, _ in used} | {tenant for _, tenant, _ in keys} | {*of_tenants}
    limited = [
        (f"tenant:{tenant}", of_tenants.get(tenant, UNLIMITED).over(defaults), used[tenant, None])
        for tenant in sorted(tenants)
    ]
    limited += [(f"key:{key_id}", limits, used[tenant, key_id]) for key_id, tenant, limits in keys]
    return [
        (f"{subject}/{name}", limit, amount)
        for subject, limits, amounts in limited
        for name, amount in zip(_KEPT, amounts, strict=True)
        if (limit := getattr(limits, name)) is not None
    ]


def require_storage(tx: Tx, file: FileRecord, defaults: Quotas) -> None:
    """Raise `QuotaExceeded` if there is no room for this file."""
    for whose, key_id, quotas in _quotas(tx, file.tenant, file.key_id, defaults):
        if (most := quotas.storage_bytes) is None:
            continue
        used = _stored(tx, file.tenant, key_id)
        if used + file.bytes > most:
            raise QuotaExceeded(
                f"{whose} stores {used:,} bytes of at most {most:,}, and the file has {file.bytes:,}: delete files",
                quota="storage_bytes",
                kind="insufficient_quota",
                code="insufficient_quota",
                passing=False,
            )


def require_queue(tx: Tx, batch: BatchRecord, defaults: Quotas) -> None:
    """Raise `QuotaExceeded` if there is no room for the lines of this batch."""
    asked = (batch.enqueued_lines, batch.enqueued_tokens)
    for whose, key_id, quotas in _quotas(tx, batch.tenant, batch.key_id, defaults):
        limits = (("requests", quotas.enqueued_lines), ("tokens", quotas.enqueued_tokens))
        if all(most is None for _, most in limits):
            continue
        waiting = _enqueued(tx, batch.tenant, key_id)
        for (kind, most), used, more, what in zip(limits, waiting, asked, ("lines", "tokens"), strict=True):
            if most is not None and used + more > most:
                raise QuotaExceeded(
                    f"{whose} has {used:,} {what} of batches waiting of at most {most:,}, and this batch has "
                    f"{more:,}: {'wait until others have ended' if more <= most else 'make it smaller'}",
                    quota=f"enqueued_{what}",
                    kind=kind,
                    passing=more <= most,
                )


def _quotas(tx: Tx, tenant: str, key_id: str | None, defaults: Quotas) -> Iterator[tuple[str, str | None, Quotas]]:
    """The tenant and the key to check, each as its description, the id if it is a key, and its quotas.

    The tenant is locked: what it and its keys use does not change until the transaction ends.
    """
    row = tx.row("quotas_of_tenant", tenant=tenant)
    of_tenant = (UNLIMITED if row is None else of_values(json.loads(row[0]))).over(defaults)
    row = None if key_id is None else tx.row("quotas_of_key", key_id=key_id)
    of_key = UNLIMITED if row is None else of_values(json.loads(row[0]))
    if of_tenant == of_key == UNLIMITED:
        return
    tx.rows("lock_tenant", tenant=tenant)
    yield f"tenant {tenant}", None, of_tenant
    yield f"key {key_id}", key_id, of_key


def _stored(tx: Tx, tenant: str, key_id: str | None) -> int:
    [(used,)] = tx.rows("stored_bytes", tenant=tenant, key_id=key_id, now=tx.now)
    return int(used)


def _enqueued(tx: Tx, tenant: str, key_id: str | None) -> tuple[int, int]:
    """Number of lines without a result, and the approximate number of tokens in their prompts."""
    [(lines, tokens)] = tx.rows("enqueued", tenant=tenant, key_id=key_id)
    return lines, tokens


def share_rates(
    tx: Tx, changes: Sequence[Change], rates: Sequence[str], oldest: int, since: int
) -> tuple[float, list[Change]]:
    tx.rows("lock_exchange")
    tx.many("add_rates", [change._asdict() for change in changes])
    tx.run("forget_rates", oldest=oldest)
    return read_rates(tx, rates, oldest, since)


def read_rates(tx: Tx, rates: Sequence[str], oldest: int, since: int) -> tuple[float, list[Change]]:
    found = tx.rows("rates", rates=json.dumps([*rates]), oldest=oldest, since=since)
    return tx.now, [Change(*row) for row in found]
