"""Claims shared between tenants, and what results cost each tenant."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchwright.limiting.shares import Claimant, place, turns, virtual_time
from batchwright.store.records import ClaimedLine, LineResult
from batchwright.store.transaction import Row, Tx

_MEMORY = 100
"""Number of lines over which the tokens of a tenant's lines are averaged."""


@dataclass(frozen=True, slots=True)
class _Tenant:
    claimant: Claimant
    active: bool
    """Whether it was working when this was last recorded."""
    rests: bool
    """Whether its turns come after those of others, because its lines repeatedly crashed processes."""
    working: bool
    """Whether it has a running batch, and so lines that wait or are in flight."""
    claimable: bool


def claim_shared(tx: Tx, worker: str, limit: int, *, resting: bool | None = None) -> list[ClaimedLine]:
    """Claim pending lines, shared between tenants; tenants that rest come last.

    `resting`: claim only from tenants that rest (True) or that do not (False); None: from both.
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
    # Another transaction may be doing the same: the row is the lock.
    tx.run("add_virtual_time")
    [(before,)] = tx.rows("lock_virtual_time")
    tenants, held = _read_tenants(tx), _lines_in_flight(tx)
    active = {each.claimant.tenant: place(_holding(each.claimant, held)) for each in tenants if each.active}
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
        _Tenant(Claimant(*claimant), bool(active), rests_until > tx.now, bool(working), bool(claimable))
        for *claimant, active, rests_until, working, claimable in tx.rows("claimants", now=tx.now)
    ]


def _lines_in_flight(tx: Tx) -> Counter[str]:
    return Counter({tenant: int(lines) for tenant, lines in tx.rows("lines_in_flight")})


def _holding(claimant: Claimant, held: Counter[str]) -> Claimant:
    return replace(claimant, in_flight=held[claimant.tenant])


def _claim_in_turn(tx: Tx, worker: str, claimants: Sequence[Claimant], limit: int) -> list[ClaimedLine]:
    """Claim lines in the order of the tenants' turns. Those that run out leave their turns to the others."""
    if len(claimants) == 1:
        return _claim_of_tenant(tx, worker, claimants[0].tenant, limit)
    held = _lines_in_flight(tx)
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
    """Claim lines of the batches that expire first, by position within a batch."""
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
    """The lines, by position and number, that a row of `claimable_batches` and the rows of `claim_lines` describe.

    The first column of a line is its position. The others are in the order of the fields of `ClaimedLine`; the last
    one, `crashes`, may be missing.
    """
    _, batch_id, *of_batch = batch
    fields = ((batch_id, *row[1:6], *of_batch, row[6] if len(row) > 6 else 0, given_up) for row in sorted(rows))
    return [ClaimedLine(*line) for line in fields]


def charge(tx: Tx, results: Mapping[str, Sequence[LineResult]]) -> None:
    """Charge each tenant for the tokens that its results took to compute, at least one for each result."""
    for tenant, taken in sorted(results.items()):
        usages = [result.usage for result in taken]
        tokens = sum(max(1, each.input_tokens - each.cached_tokens + each.output_tokens) for each in usages)
        tx.run("charge_tenant", tenant=tenant, tokens=float(tokens), lines=len(taken), memory=_MEMORY)
