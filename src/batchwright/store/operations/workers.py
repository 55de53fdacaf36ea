"""Operations on workers and their leases, and on suspects: lines that were in work when a worker's process died."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from batchwright.errors import LeaseLost
from batchwright.policies.suspects import MAX_CRASHES, REST, Suspects, at_once, first, worth_draining
from batchwright.store.operations.fair_claims import claim_shared, claimed_lines
from batchwright.store.records import ClaimedLine, Peer
from batchwright.store.transaction import Tx


def register_worker(tx: Tx, name: str, lease: float, process: str | None = None, *, former: str | None = None) -> str:
    """Add a worker, whose lease runs out `lease` seconds from now, and return its id. `name` is for people to read.

    `process`, for `processes`: a text from which others can tell whether its process has ended. `former`: the
    worker that this process was until its lease ran out; its lines are no longer suspects for that reason.
    """
    if former is not None:
        retire_worker(tx, former)
        # It was taken for dead, and is not.
        for (crash,) in tx.rows("crashes_of_worker", worker=former):
            tx.run("clear_suspects", crash=crash)
            tx.run("try_again", crash=crash)
    worker = f"wrk_{secrets.token_hex(12)}"
    tx.run("add_worker", id=worker, name=name, expires_at=tx.now + lease, process=process)
    return worker


def processes(tx: Tx) -> dict[str, str]:
    """The `process` of each worker that was registered with one, by the id of the worker."""
    return dict(tx.rows("processes"))


def renew_lease(tx: Tx, worker: str, lease: float) -> bool:
    """Renew a lease; False if it ran out: then the worker has lost its claims, and must register again."""
    return tx.run("renew_lease", worker=worker, expires_at=tx.now + lease, now=tx.now) == 1


def require_lease(tx: Tx, worker: str) -> int | None:
    """Lock a worker that holds a lease, so that it keeps its claims until the transaction ends. Raises `LeaseLost`.

    The key of the crash whose suspects it is trying; None: it is trying none.
    """
    row = tx.row("lease", worker=worker)
    if row is None or row[0] <= tx.now:
        raise LeaseLost(f"the lease of worker {worker} has run out: register again")
    return None if row[1] is None else int(row[1])


def publish(tx: Tx, worker: str, snapshot: str) -> list[Peer]:
    """Publish a snapshot of a process, which holds for as long as its worker has a lease, and return all `peers`.

    Of two processes that publish at once only the later one sees both.
    """
    tx.rows("lock_exchange")
    tx.run("publish", worker=worker, snapshot=snapshot, now=tx.now)
    return peers(tx)


def peers(tx: Tx) -> list[Peer]:
    """All processes whose leases hold, by name."""
    return [Peer(*row) for row in tx.rows("snapshots", now=tx.now)]


def retire_worker(tx: Tx, worker: str) -> int:
    """Remove a worker and give back all that it holds. Returns the number of lines."""
    tx.run("remove_worker", worker=worker)
    tx.run("free_batches_of_worker", worker=worker)
    tx.run("free_deliveries_of_worker", worker=worker)
    tx.run("leave_suspects", worker=worker)
    return tx.run("free_lines_of_worker", worker=worker)


def worker_died(tx: Tx, worker: str, *, max_crashes: int = MAX_CRASHES) -> int:
    """Remove a worker whose process has ended, and make its lines suspects. Returns the number of lines.

    A line that was in work alone, and was in work at `max_crashes` such deaths, is to fail.
    """
    if tx.row("lock_worker", worker=worker) is None:
        return 0
    return _suspect_lines_of(tx, worker, max_crashes) + retire_worker(tx, worker)


def reap(tx: Tx, *, max_crashes: int = MAX_CRASHES) -> int:
    """Do as `worker_died` for all workers whose leases ran out. Returns the number of lines."""
    lines = sum(worker_died(tx, worker, max_crashes=max_crashes) for (worker,) in tx.rows("dead_workers", now=tx.now))
    tx.run("forget_crashes")
    return lines


def check(tx: Tx) -> None:
    tx.run("check", now=tx.now)


def _suspect_lines_of(tx: Tx, worker: str, max_crashes: int) -> int:
    """Put the lines that a dead worker held under suspicion, and return their number."""
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


def claim_beside_suspects(tx: Tx, worker: str, trying: int | None, limit: int) -> list[ClaimedLine]:
    """Claim lines while there are suspects, only a few of which may be in work at once."""
    groups = [Suspects(*row) for row in tx.rows("suspects", now=tx.now)]
    claimed: list[ClaimedLine] = []
    for group in groups:
        if not group.at_once:
            claimed += _claim_of_group(tx, worker, group, limit - len(claimed))
    limit -= len(claimed)
    # Counted no further than matters for what may be in work.
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
    """Claim lines for a worker that has lines in work, none of them suspects."""
    group = worth_draining(groups, worker, tx.now)
    if group is None:
        return claim_shared(tx, worker, limit)
    tx.run("take_suspects", worker=worker, crash=group.key)
    return []


def _claim_free(tx: Tx, worker: str, groups: Sequence[Suspects], limit: int) -> list[ClaimedLine]:
    """Claim lines for a worker that has none in work."""
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
