"""Lines that were in work when a process died: what happens to them, and which worker tries them."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.policies.suspects import REST, Suspects, at_once, first, worth_draining
from batchwright.store.operations.fair_claims import claim_shared, claimed_lines
from batchwright.store.records import ClaimedLine
from batchwright.store.transaction import Tx


def suspect_lines_of(tx: Tx, worker: str, max_crashes: int) -> int:
    """Make the lines that a dead worker held suspects. Returns how many."""
    row = tx.row("tried_at_once", worker=worker)
    alone = row is not None and row[0] == 1
    suspects = 0
    for tenant, lines, crashes in tx.rows("lines_in_work_by_tenant", worker=worker):
        allowed = at_once(crashes + 1, lines, alone=alone, most=max_crashes)
        [(crash,)] = tx.rows("add_crash", worker=worker, tenant=tenant, now=tx.now, at_once=allowed)
        suspects += tx.run("suspect_lines", worker=worker, tenant=tenant, crash=crash)
        if crashes:
            tx.run("tenant_rests", tenant=tenant, until=tx.now + REST)
    return suspects


def clear_suspects_of(tx: Tx, worker: str) -> None:
    """Clear the lines of a worker that was taken for dead, and is not."""
    for (crash,) in tx.rows("crashes_of_worker", worker=worker):
        tx.run("clear_suspects", crash=crash)
        tx.run("try_again", crash=crash)


def claim_beside_suspects(tx: Tx, worker: str, trying: int | None, limit: int) -> list[ClaimedLine]:
    """Claim lines where there are suspects, which are in work only with few of their kind."""
    groups = [Suspects(*row) for row in tx.rows("suspects", now=tx.now)]
    claimed: list[ClaimedLine] = []
    for group in groups:
        if not group.at_once:
            claimed += _claim_of_group(tx, worker, group, limit - len(claimed))
    limit -= len(claimed)
    # How many there are is of interest only up to what may be in work.
    most = max([1, *(group.at_once for group in groups)])
    [(held,)] = tx.rows("lines_in_work", worker=worker, limit=most)
    if trying is not None:
        tried = next((each for each in groups if each.key == trying and each.at_once), None)
        if tried is not None:
            return claimed + _claim_of_group(tx, worker, tried, min(limit, tried.at_once - held))
        if held:
            return claimed
        tx.run("try_suspects", worker=worker, crash=None)
        tx.run("leave_suspects", worker=worker)
        tx.run("forget_crashes")
    return claimed + (_claim_busy if held else _claim_free)(tx, worker, groups, limit)


def _claim_busy(tx: Tx, worker: str, groups: Sequence[Suspects], limit: int) -> list[ClaimedLine]:
    """Claim for a worker that has lines in work that are no suspects."""
    group = worth_draining(groups, worker, tx.now)
    if group is None:
        return claim_shared(tx, worker, limit)
    tx.run("take_suspects", worker=worker, crash=group.key)
    return []


def _claim_free(tx: Tx, worker: str, groups: Sequence[Suspects], limit: int) -> list[ClaimedLine]:
    """Claim for a worker with nothing in work."""
    for resting in (False, True):
        group = first(groups, tx.now, resting=resting)
        if group is not None:
            tx.run("try_suspects", worker=worker, crash=group.key)
            tx.run("take_suspects", worker=worker, crash=group.key)
            return _claim_of_group(tx, worker, group, min(limit, group.at_once))
        if claimed := claim_shared(tx, worker, limit, resting=resting):
            return claimed
    return []


def _claim_of_group(tx: Tx, worker: str, group: Suspects, limit: int) -> list[ClaimedLine]:
    claimed: list[ClaimedLine] = []
    for batch in tx.rows("suspect_batches", tenant=group.tenant, crash=group.key, now=tx.now) if limit > 0 else ():
        rows = tx.rows("claim_suspects", worker=worker, batch=batch[0], crash=group.key, limit=limit - len(claimed))
        claimed += claimed_lines(batch, rows, given_up=not group.at_once)
        if len(claimed) == limit:
            break
    return claimed


def count_suspects(tx: Tx) -> int:
    [(suspects,)] = tx.rows("count_suspects")
    return int(suspects)
