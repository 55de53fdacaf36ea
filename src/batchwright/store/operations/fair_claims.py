"""Claims shared between tenants, and what tenants are charged for results."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchwright.errors import InvalidRequest
from batchwright.limiting.shares import WEIGHTS, Claimant, place, turns, virtual_time
from batchwright.store.records import ClaimedLine, LineResult
from batchwright.store.transaction import Row, Tx

_MEMORY = 100
"""Number of lines over which the tokens of a tenant's lines are averaged."""


@dataclass(frozen=True, slots=True)
class _Tenant:
    claimant: Claimant
    active: bool
    """Whether it was active at the last change."""
    rests: bool
    working: bool
    """Whether it has a batch that is running, and so lines that wait or are in flight."""
    claimable: bool


def claim_shared(tx: Tx, worker: str, limit: int, *, resting: bool | None = None) -> list[ClaimedLine]:
    """Claim pending lines, shared between tenants. Tenants that rest come after all others; `resting`: of only those
    that do, or do not.
    """
    tenants = [each for each in _tenants(tx) if each.claimable]
    claimed: list[ClaimedLine] = []
    for rests in (False, True) if resting is None else (resting,):
        claimants = [each.claimant for each in tenants if each.rests == rests]
        if claimants and len(claimed) < limit:
            claimed += _claim_in_turn(tx, worker, claimants, limit - len(claimed))
    return claimed


def _tenants(tx: Tx) -> list[_Tenant]:
    tenants = _read_tenants(tx)
    if all(each.active == each.working for each in tenants):
        return tenants
    # Others may be at it: the row is the lock.
    tx.run("add_virtual_time")
    [(before,)] = tx.rows("lock_virtual_time")
    tenants = _with_lines_in_flight(tx, _read_tenants(tx))
    active = {each.claimant.tenant: place(each.claimant) for each in tenants if each.active}
    working = {each.claimant.tenant for each in tenants if each.working}
    now = virtual_time(before, active, working)
    tx.run("set_virtual_time", time=now)
    for each in tenants:
        claimant = each.claimant
        if each.working and not each.active:
            tx.run("tenant_joins", tenant=claimant.tenant, served=max(claimant.served, now))
        elif each.active and not each.working:
            tx.run("tenant_leaves", tenant=claimant.tenant)
    return _read_tenants(tx)


def _read_tenants(tx: Tx) -> list[_Tenant]:
    return [
        _Tenant(
            Claimant(tenant, weight, served, line_tokens),
            bool(active),
            rests_until > tx.now,
            bool(working),
            bool(claimable),
        )
        for tenant, weight, served, line_tokens, active, rests_until, working, claimable in tx.rows(
            "claimants", now=tx.now
        )
    ]


def _with_lines_in_flight(tx: Tx, tenants: Sequence[_Tenant]) -> list[_Tenant]:
    lines = _lines_in_flight(tx)
    return [replace(each, claimant=_holding(each.claimant, lines)) for each in tenants]


def _lines_in_flight(tx: Tx) -> dict[str, int]:
    return {tenant: int(lines) for tenant, lines in tx.rows("lines_in_flight")}


def _holding(claimant: Claimant, lines: Mapping[str, int]) -> Claimant:
    return replace(claimant, in_flight=lines.get(claimant.tenant, 0))


def _claim_in_turn(tx: Tx, worker: str, claimants: Sequence[Claimant], limit: int) -> list[ClaimedLine]:
    """Claim lines in the order of the tenants' turns. A tenant without more lines leaves its turns to the others."""
    if len(claimants) == 1:
        return _claim_of_tenant(tx, worker, claimants[0].tenant, limit)
    held = Counter(_lines_in_flight(tx))
    lines: dict[str, deque[ClaimedLine]] = {each.tenant: deque() for each in claimants}
    order: list[str] = []
    while claimants and (room := limit - sum(map(len, lines.values()))):
        given = turns([_holding(each, held) for each in claimants], room)
        order += given
        counts = Counter(given)
        left = []
        for claimant in claimants:
            wanted = counts[claimant.tenant]
            found = _claim_of_tenant(tx, worker, claimant.tenant, wanted) if wanted else []
            lines[claimant.tenant] += found
            held[claimant.tenant] += len(found)
            if len(found) == wanted:
                left.append(claimant)
        claimants = left
    return [lines[tenant].popleft() for tenant in order if lines[tenant]]


def _claim_of_tenant(tx: Tx, worker: str, tenant: str, limit: int) -> list[ClaimedLine]:
    """Claim lines of the batches that expire first; within one by number."""
    claimed: list[ClaimedLine] = []
    after = (-math.inf, 0)
    while len(claimed) < limit:
        page = tx.rows(
            "claimable_batches", tenant=tenant, now=tx.now, after_time=after[0], after_key=after[1], limit=limit
        )
        for batch in page:
            rows = tx.rows("claim_lines", worker=worker, batch=batch[0], limit=limit - len(claimed))
            claimed += claimed_lines(batch, rows)
            if len(claimed) == limit:
                break
            after = (batch[4], batch[0])
        if not page:
            break
    return claimed


def claimed_lines(batch: Row, rows: Sequence[Row], *, given_up: bool = False) -> list[ClaimedLine]:
    """Return claimed lines from a row of `claimable_batches` and those of `claim_lines`, by number."""
    _, batch_id, input_file_id, endpoint, expires_at, best_priority, tenant = batch
    return [
        ClaimedLine(
            batch_id,
            number,
            attempt,
            custom_id,
            offset,
            length,
            input_file_id,
            endpoint,
            expires_at,
            best_priority,
            tenant,
            crashes=crashes[0] if crashes else 0,
            given_up=given_up,
        )
        for number, attempt, custom_id, offset, length, *crashes in sorted(rows)
    ]


def charge(tx: Tx, results: Mapping[str, Sequence[LineResult]]) -> None:
    """Charge each tenant for what was computed for it."""
    for tenant, taken in sorted(results.items()):
        tokens = float(sum(max(1, _tokens(result)) for result in taken))
        tx.run("charge_tenant", tenant=tenant, tokens=tokens, lines=len(taken), memory=_MEMORY)


def _tokens(result: LineResult) -> int:
    """Return the tokens that had to be computed."""
    usage = result.usage
    return usage.input_tokens - usage.cached_tokens + usage.output_tokens


def set_tenant_weight(tx: Tx, tenant: str, weight: float) -> None:
    """Set a tenant's share of the capacity, relative to others; 1 for those that were not named. Raises
    `InvalidRequest` for a weight that is not 0.01 to 1000.
    """
    least, most = WEIGHTS
    if not least <= weight <= most:
        raise InvalidRequest(f"weight={weight}: must be {least:g} to {most:g}", param="weight")
    tx.run("set_tenant_weight", tenant=tenant, weight=float(weight))


def tenant_weights(tx: Tx) -> dict[str, float]:
    """Return the weights that are not 1."""
    return dict(tx.rows("tenant_weights"))
