"""Operations of workers: their leases, the lines that they claim, and the results that they commit.

Suspects are lines that were in progress when the process of a worker died.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Sequence

from batchwright.errors import LeaseLost
from batchwright.policies.suspects import MAX_CRASHES, REST, Suspects, at_once, first, worth_draining
from batchwright.store.operations.fair_claims import charge, claim_shared, claimed_lines
from batchwright.store.records import ClaimedLine, LineResult, Peer, TokenUsage
from batchwright.store.transaction import Tx


def register_worker(tx: Tx, name: str, lease: float, process: str | None = None, *, former: str | None = None) -> str:
    """Add a worker, whose lease runs out `lease` seconds from now, and return its id. `name` is for people to read.

    `process`, for `processes`: a text from which others can tell whether its process has ended. `former`: the
    worker that this process was until its lease ran out; its lines are no longer suspects because of that.
    """
    if former is not None:
        retire_worker(tx, former)
        # It was presumed dead, but is not.
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

    Returns the key of the crash whose suspects it is trying; None: it is trying none.
    """
    row = tx.row("lease", worker=worker)
    if row is None or row[0] <= tx.now:
        raise LeaseLost(f"the lease of worker {worker} has run out: register again")
    return None if row[1] is None else int(row[1])


def publish(tx: Tx, worker: str, snapshot: str) -> list[Peer]:
    """Publish a snapshot of a process, which holds for as long as its worker has a lease, and return all `peers`.

    If two processes publish at once, only the later one sees both.
    """
    tx.rows("lock_exchange")
    tx.run("publish", worker=worker, snapshot=snapshot, now=tx.now)
    return peers(tx)


def peers(tx: Tx) -> list[Peer]:
    """All processes with a valid lease, by name."""
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

    A line that was in progress alone, and was in progress at `max_crashes` such deaths, will fail.
    """
    if tx.row("lock_worker", worker=worker) is None:
        return 0
    row = tx.row("tried_at_once", worker=worker)
    alone = row is not None and row[0] == 1
    suspects = 0
    for tenant, lines, crashes in tx.rows("lines_in_progress_by_tenant", worker=worker):
        allowed = at_once(crashes + 1, lines, alone=alone, most=max_crashes)
        [(crash,)] = tx.rows("add_crash", worker=worker, tenant=tenant, now=tx.now, at_once=allowed)
        suspects += tx.run("suspect_lines", worker=worker, tenant=tenant, crash=crash)
        if crashes:
            tx.run("tenant_rests", tenant=tenant, until=tx.now + REST)
    return suspects + retire_worker(tx, worker)


def reap(tx: Tx, *, max_crashes: int = MAX_CRASHES) -> int:
    """Do as `worker_died` for all workers whose leases ran out. Returns the number of lines."""
    lines = sum(worker_died(tx, worker, max_crashes=max_crashes) for (worker,) in tx.rows("dead_workers", now=tx.now))
    tx.run("forget_crashes")
    return lines


def check(tx: Tx) -> None:
    tx.run("check", now=tx.now)


def claim(tx: Tx, worker: str, limit: int) -> list[ClaimedLine]:
    """Claim at most `limit` lines; tenants that have any take turns (`limiting/shares.py`). Lines of one
    tenant come from the batches that expire first, by position within a batch.

    Suspects go to a worker that holds nothing else, as many at once as `policies/suspects.py` says, and it gets no
    other lines until they are done. A worker may get nothing although there are lines, so that it can take suspects
    once it holds nothing. Lines that are `given_up` are returned along with any others. Raises `LeaseLost`.
    """
    trying = require_lease(tx, worker)
    if limit <= 0:
        return []
    if trying is None and tx.row("any_crash") is None:
        return claim_shared(tx, worker, limit)
    return _claim_beside_suspects(tx, worker, trying, limit)


def release(tx: Tx, worker: str, lines: Sequence[ClaimedLine]) -> None:
    """Give claimed lines back uncomputed. Lines that are no longer this worker's do not change."""
    rows = [
        {"worker": worker, "batch_id": line.batch_id, "number": line.number, "attempt": line.attempt} for line in lines
    ]
    tx.many("release_lines", rows)


def _claim_beside_suspects(tx: Tx, worker: str, trying: int | None, limit: int) -> list[ClaimedLine]:
    """Claim lines while there are suspects, only a few of which may be in progress at once."""
    groups = [Suspects(*row) for row in tx.rows("suspects", now=tx.now)]
    claimed: list[ClaimedLine] = []
    for group in groups:
        if not group.at_once:
            claimed += _claim_of_group(tx, worker, group, limit - len(claimed))
    limit -= len(claimed)
    # Counted only up to the most that may be in progress.
    most = max([1, *(group.at_once for group in groups)])
    [(held,)] = tx.rows("lines_in_progress", worker=worker, limit=most)
    if trying is not None:
        tried = next((each for each in groups if each.key == trying and each.at_once), None)
        if tried is not None:
            return claimed + _claim_of_group(tx, worker, tried, min(limit, tried.at_once - held))
        if held:
            return claimed
        tx.run("try_suspects", worker=worker, crash=None)
        tx.run("leave_suspects", worker=worker)
        tx.run("forget_crashes")
    if not held:
        return claimed + _claim_free(tx, worker, groups, limit)
    waited_for = worth_draining(groups, worker, tx.now)
    if waited_for is None:
        return claimed + claim_shared(tx, worker, limit)
    tx.run("take_suspects", worker=worker, crash=waited_for.key)
    return claimed


def _claim_free(tx: Tx, worker: str, groups: Sequence[Suspects], limit: int) -> list[ClaimedLine]:
    """Claim lines for a worker that has none in progress."""
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


def commit(tx: Tx, worker: str, results: Sequence[LineResult]) -> list[bool]:
    """Store results whose lines are still at the same attempt, in batches without an ending.

    Returns for each result whether it was taken. A result that was taken before is taken again, but not counted
    again, so a call may be repeated. The same transaction updates the counts and the usage of the batch, and moves a
    batch whose lines are all finished to `finalizing`. Raises `LeaseLost`, and then no result is taken.
    """
    require_lease(tx, worker)
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, result in enumerate(results):
        places[result.batch_id].append(place)
    taken = [False] * len(results)
    counted: defaultdict[str, list[LineResult]] = defaultdict(list)
    # The rows of the batches stay locked, so the sequences of a batch are committed in their order.
    rows = tx.rows("lock_batches", ids=json.dumps([*places]))
    for batch_id, key, tenant, status, ending, total, completed, failed in rows:
        is_open = status == "in_progress" and ending is None
        new = _take(tx, key, is_open, results, places[batch_id], taken)
        if new:
            _write(tx, key, completed + failed, new)
            counted[tenant] += new
            if completed + failed + len(new) == total:
                tx.run("finalize_batch", key=key, now=tx.now)
    charge(tx, counted)
    return taken


def _take(
    tx: Tx, key: int, is_open: bool, results: Sequence[LineResult], places: list[int], taken: list[bool]
) -> list[LineResult]:
    """Mark in `taken` which of the results at `places`, all of one batch, are taken; return those not taken before."""
    rows = tx.rows("lock_lines", batch=key, numbers=json.dumps([results[place].number for place in places]))
    held = {number: (attempt, state) for number, attempt, state in rows}
    new = []
    for place in places:
        result = results[place]
        attempt, state = held.get(result.number, (0, "pending"))
        if attempt != result.attempt or state in ("pending", "suspect"):
            continue
        if state == "claimed":
            if not is_open:
                continue
            new.append(result)
            held[result.number] = (attempt, "finished")
        taken[place] = True
    return new


def _write(tx: Tx, key: int, finished: int, results: Sequence[LineResult]) -> None:
    """Write results of the batch `key`, of which `finished` lines have results already, and count them."""
    rows = [
        {
            "batch": key,
            "number": result.number,
            "sequence": sequence,
            "state": "succeeded" if result.succeeded else "failed",
            "output": result.output,
        }
        for sequence, result in enumerate(results, finished + 1)
    ]
    tx.many("finish_lines", rows)
    tx.many("add_results", rows)
    completed = sum(result.succeeded for result in results)
    tokens = {name: sum(getattr(result.usage, name) for result in results) for name in TokenUsage.__slots__}
    tx.run("count_results", key=key, completed=completed, failed=len(results) - completed, **tokens)


def count_lines(tx: Tx) -> dict[str, int]:
    """Numbers of `pending`, `suspect` and `claimed` lines of all batches in progress, paused or not."""
    counts = ("count_unfinished_lines", "count_claimed_lines", "count_suspects")
    unfinished, claimed, suspects = (int(tx.rows(statement)[0][0]) for statement in counts)
    return {"pending": unfinished - claimed - suspects, "claimed": claimed, "suspect": suspects}
