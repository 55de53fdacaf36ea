"""Operations on the lines of running batches: claims, results, and reading them back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchwright.jobs.store.operations import pages
from batchwright.jobs.store.operations.workers import require_lease
from batchwright.jobs.store.records import ClaimedLine, LineResult, StoredLine
from batchwright.jobs.store.transaction import Row, Tx


def claim(tx: Tx, worker: str, limit: int) -> list[ClaimedLine]:
    require_lease(tx, worker)
    claimed: list[ClaimedLine] = []
    after = (-math.inf, 0)
    while len(claimed) < limit:
        page = tx.rows("claimable_batches", now=tx.now, after_time=after[0], after_key=after[1], limit=limit)
        for batch in page:
            claimed += _claim_of(tx, worker, batch, limit - len(claimed))
            if len(claimed) == limit:
                break
            after = (batch[4], batch[0])
        if not page:
            break
    return claimed


def _claim_of(tx: Tx, worker: str, batch: Row, limit: int) -> list[ClaimedLine]:
    key, batch_id, input_file_id, endpoint, expires_at, best_priority = batch
    rows = tx.rows("claim_lines", worker=worker, batch=key, limit=limit)
    return [
        ClaimedLine(
            batch_id, number, attempt, custom_id, offset, length, input_file_id, endpoint, expires_at, best_priority
        )
        for number, attempt, custom_id, offset, length in sorted(rows)
    ]


def release(tx: Tx, worker: str, lines: Sequence[ClaimedLine]) -> None:
    tx.many(
        "release_lines",
        [
            {"worker": worker, "batch_id": line.batch_id, "number": line.number, "attempt": line.attempt}
            for line in lines
        ],
    )


@dataclass(slots=True)
class _Intake:
    """What one `commit` adds to one batch."""

    key: int
    open: bool
    finished: int
    """Lines of the batch that have a result: the sequence of the last one."""
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    """For each line what its row and that of its result get."""

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
    require_lease(tx, worker)
    places: dict[str, list[int]] = {}
    for place, result in enumerate(results):
        places.setdefault(result.batch_id, []).append(place)
    taken = [False] * len(results)
    # The rows of the batches stay locked, so the sequences of a batch are committed in their order.
    for batch_id, key, status, ending, total, completed, failed in tx.rows("lock_batches", ids=json.dumps([*places])):
        intake = _Intake(key, status == "in_progress" and ending is None, completed + failed)
        _take(tx, intake, results, places[batch_id], taken)
        if intake.rows:
            intake.write(tx)
            if intake.finished == total:
                tx.run("finalize_batch", key=key, now=tx.now)
    return taken


def _take(tx: Tx, intake: _Intake, results: Sequence[LineResult], places: list[int], taken: list[bool]) -> None:
    numbers = json.dumps([results[place].number for place in places])
    rows = tx.rows("lock_lines", batch=intake.key, numbers=numbers)
    held = {number: (attempt, state) for number, attempt, state in rows}
    for place in places:
        result = results[place]
        attempt, state = held.get(result.number, (0, "pending"))
        if attempt != result.attempt or state == "pending":
            continue
        if state == "claimed":
            if not intake.open:
                continue
            intake.take(result)
            held[result.number] = (attempt, "finished")
        taken[place] = True


def lines(tx: Tx, batch_id: str, *, after: int, limit: int) -> list[StoredLine]:
    row = tx.row("batch_key", id=batch_id)
    if row is None:
        return []
    found = pages.page(tx, "lines", "line_sizes", batch=row[0], after=after, limit=limit)
    [(removed_at, _)] = tx.rows("lines_removed_at", key=row[0])
    return found if removed_at is None else []


def count_lines(tx: Tx) -> dict[str, int]:
    [(unfinished,)] = tx.rows("count_unfinished_lines")
    [(claimed,)] = tx.rows("count_claimed_lines")
    return {"pending": int(unfinished) - claimed, "claimed": claimed}
