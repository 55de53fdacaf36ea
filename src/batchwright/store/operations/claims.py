"""Operations on the lines of running batches: claims and results."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from batchwright.store.operations.fair_claims import charge, claim_shared
from batchwright.store.operations.workers import claim_beside_suspects, require_lease
from batchwright.store.records import ClaimedLine, LineResult, TokenUsage
from batchwright.store.transaction import Tx


def claim(tx: Tx, worker: str, limit: int) -> list[ClaimedLine]:
    """Claim at most `limit` lines, in the turns of the tenants that have any (`limiting/shares.py`). Lines of one
    tenant come from the batches that expire first, by number within a batch.

    Suspects go to a worker that holds nothing else, as many at once as `policies/suspects.py` says, and it gets no
    other lines until they are done. A worker may get nothing although there are lines, so that it can take suspects
    once it holds nothing. Lines that are `given_up` come with any others. Raises `LeaseLost`.
    """
    trying = require_lease(tx, worker)
    if limit <= 0:
        return []
    if trying is None and tx.row("any_crash") is None:
        return claim_shared(tx, worker, limit)
    return claim_beside_suspects(tx, worker, trying, limit)


def release(tx: Tx, worker: str, lines: Sequence[ClaimedLine]) -> None:
    """Give claimed lines back uncomputed. Lines that are not this worker's any more do not change."""
    rows = [
        {"worker": worker, "batch_id": line.batch_id, "number": line.number, "attempt": line.attempt} for line in lines
    ]
    tx.many("release_lines", rows)


def commit(tx: Tx, worker: str, results: Sequence[LineResult]) -> list[bool]:
    """Store results whose lines are still at the same attempt, in batches without an ending.

    Returns for each result whether it was taken. A result that was taken before is taken again, but not counted
    again, so a call may be repeated. In the same transaction the counts and the usage of the batch rise, and a
    batch whose lines are all finished goes to `finalizing`. Raises `LeaseLost`, and then no result is taken.
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
    """Mark in `taken` which of the results at `places`, all of one batch, are taken; those not taken before."""
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
