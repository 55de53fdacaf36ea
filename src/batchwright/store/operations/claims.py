"""Operations on the lines of running batches: claims, results, and reading them back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchwright.store.operations import result_pages
from batchwright.store.operations.crashed_lines import claim_beside_suspects, count_suspects
from batchwright.store.operations.fair_claims import charge, claim_shared
from batchwright.store.operations.workers import require_lease
from batchwright.store.records import ClaimedLine, LineResult, StoredLine
from batchwright.store.transaction import Tx


def claim(tx: Tx, worker: str, limit: int) -> list[ClaimedLine]:
    """Claim at most `limit` lines, shared between the tenants with lines (`limiting/shares.py`), in turn. Those
    of a tenant are of the batches that expire first; within one by number.

    Suspects go to a worker that holds nothing else, and it gets no others until they are done: as many at once as
    `policies/suspects.py` says. A worker may get nothing although there are lines, so that it can take suspects
    when it holds nothing any more. Lines that are `given_up` come with any others. Raises `LeaseLost`.
    """
    trying = require_lease(tx, worker)
    if limit <= 0:
        return []
    if trying is None and tx.row("any_crash") is None:
        return claim_shared(tx, worker, limit)
    return claim_beside_suspects(tx, worker, trying, limit)


def release(tx: Tx, worker: str, lines: Sequence[ClaimedLine]) -> None:
    """Give claimed lines back uncomputed. Those that are not this worker's any more are left alone."""
    tx.many(
        "release_lines",
        [
            {"worker": worker, "batch_id": line.batch_id, "number": line.number, "attempt": line.attempt}
            for line in lines
        ],
    )


@dataclass(slots=True)
class _BatchResults:
    """Results that one `commit` adds to one batch."""

    key: int
    open: bool
    finished: int
    """Sequence of the last line of the batch that has a result."""
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Values for the row of each line and of its result."""
    results: list[LineResult] = field(default_factory=list)

    def take(self, result: LineResult) -> None:
        usage = result.usage
        self.finished += 1
        if result.succeeded:
            self.completed += 1
        else:
            self.failed += 1
        self.input_tokens += usage.input_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens
        self.reasoning_tokens += usage.reasoning_tokens
        self.results.append(result)
        self.rows.append(
            {
                "batch": self.key,
                "number": result.number,
                "sequence": self.finished,
                "state": "succeeded" if result.succeeded else "failed",
                "output": result.output,
            }
        )

    def write(self, tx: Tx) -> None:
        tx.many("finish_lines", self.rows)
        tx.many("add_results", self.rows)
        tx.run(
            "count_results",
            key=self.key,
            completed=self.completed,
            failed=self.failed,
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )


def commit(tx: Tx, worker: str, results: Sequence[LineResult]) -> list[bool]:
    """Return which results were taken: those whose line is still at that attempt, in a batch without an ending.

    A result that was taken before is taken again, and not counted again: a call may be repeated. In the same
    transaction the counts and the usage of the batch rise, and a batch all of whose lines are finished goes to
    `finalizing`. Raises `LeaseLost`, and then none is taken.
    """
    require_lease(tx, worker)
    places: dict[str, list[int]] = {}
    for place, result in enumerate(results):
        places.setdefault(result.batch_id, []).append(place)
    taken = [False] * len(results)
    counted: dict[str, list[LineResult]] = {}
    # The rows of the batches stay locked, so the sequences of a batch are committed in their order.
    rows = tx.rows("lock_batches", ids=json.dumps([*places]))
    for batch_id, key, tenant, status, ending, total, completed, failed in rows:
        batch = _BatchResults(key, status == "in_progress" and ending is None, completed + failed)
        _take(tx, batch, results, places[batch_id], taken)
        if batch.rows:
            batch.write(tx)
            counted.setdefault(tenant, []).extend(batch.results)
            if batch.finished == total:
                tx.run("finalize_batch", key=key, now=tx.now)
    charge(tx, counted)
    return taken


def _take(tx: Tx, batch: _BatchResults, results: Sequence[LineResult], places: list[int], taken: list[bool]) -> None:
    numbers = json.dumps([results[place].number for place in places])
    rows = tx.rows("lock_lines", batch=batch.key, numbers=numbers)
    held = {number: (attempt, state) for number, attempt, state in rows}
    for place in places:
        result = results[place]
        attempt, state = held.get(result.number, (0, "pending"))
        if attempt != result.attempt or state in ("pending", "suspect"):
            continue
        if state == "claimed":
            if not batch.open:
                continue
            batch.take(result)
            held[result.number] = (attempt, "finished")
        taken[place] = True


def lines(tx: Tx, batch_id: str, *, after: int, limit: int) -> list[StoredLine]:
    """Return lines by number, those with `number` > `after`, to build files from. Removed ones are missing."""
    row = tx.row("batch_key", id=batch_id)
    if row is None:
        return []
    found = result_pages.page(tx, "lines", "line_sizes", batch=row[0], after=after, limit=limit)
    [(removed_at, _)] = tx.rows("lines_removed_at", key=row[0])
    return found if removed_at is None else []


def count_lines(tx: Tx) -> dict[str, int]:
    """Return `pending`, `suspect` and `claimed` lines of all batches in progress, for the metrics; paused ones
    included.
    """
    [(unfinished,)] = tx.rows("count_unfinished_lines")
    [(claimed,)] = tx.rows("count_claimed_lines")
    suspects = count_suspects(tx)
    return {"pending": int(unfinished) - claimed - suspects, "claimed": claimed, "suspect": suspects}
