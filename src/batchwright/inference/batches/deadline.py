"""`Deadline`: decides which batches are given up to finish a job in time, and what happens to their lines."""

from __future__ import annotations

from collections.abc import Callable, Collection

from batchwright.errors import DeadlineExceeded
from batchwright.inference.batches.held import HeldLine, OpenBatch
from batchwright.inference.batches.outcomes import Outcomes
from batchwright.submitting.moving import BatchSoFar, Mover

_LONGEST_END = 600.0
"""Seconds after the deadline for which to wait for the end of a batch whose lines are all computed."""


class Deadline:
    """The deadline of a job, `seconds` after its beginning.

    - `moves`: whether lines become live requests in time, as `mover` says; otherwise unfinished lines fail.
    - `keeps_cancelled`: see `BatchProvider`.
    - `lines_left`: lines of the job that are neither in a batch nor gathered yet.
    - `live_rate`: lines per second that live requests compute.
    """

    def __init__(
        self,
        seconds: float,
        outcomes: Outcomes,
        *,
        moves: bool,
        keeps_cancelled: bool,
        mover: Mover,
        lines_left: Callable[[], int],
        live_rate: Callable[[], float],
    ) -> None:
        self.seconds = seconds
        self._outcomes = outcomes
        self._moves = moves
        self._keeps_cancelled = keeps_cancelled
        self._mover = mover
        self._lines_left = lines_left
        self._live_rate = live_rate
        self.live_only = False
        """Whether the deadline is too near for further batches."""

    def given_up(
        self, left: float, batches: Collection[OpenBatch], age_of: Callable[[OpenBatch], float], waiting: int
    ) -> list[OpenBatch]:
        """Return the batches to cancel, and those not to submit, with `left` seconds to go; also sets `live_only`.

        `batches`: all batches sealed but not collected; `waiting`: lines that are gathered, or live requests now.
        """
        if not self._moves:
            if left > 0:
                return []
            self.live_only = True
            # A batch whose lines are all computed will soon end by itself; if it were cancelled, its results might be
            # lost.
            return [batch for batch in batches if not batch.is_computed or left < -_LONGEST_END]
        there = [batch for batch in batches if batch.entry.stage == "created" and not batch.has_ended]
        so_far = {
            batch: BatchSoFar(batch, age_of(batch), *batch.counts, keeps=self._keeps_cancelled) for batch in there
        }
        leaving = sum(each.left for batch, each in so_far.items() if batch.entry.leaving)
        unsent = [batch for batch in batches if not batch.may_exist]
        lines = waiting + sum(batch.entry.lines for batch in unsent) + leaving + self._lines_left()
        staying = [each for batch, each in so_far.items() if not batch.entry.leaving]
        plan = self._mover.plan(left, staying, lines, self._live_rate())
        self.live_only = not plan.gather
        chosen = {*plan.give_up}
        return [batch for batch in there if batch in chosen or batch.entry.leaving] + (unsent if self.live_only else [])

    def leave(self, line: HeldLine, *, may_be_paid: bool = False) -> None:
        """Release a line that no batch computes any more because of the deadline.

        `may_be_paid`: its batch may have computed it, and lost the result.
        """
        late = DeadlineExceeded("the deadline of the run passed before the line was computed")
        if self._moves:
            self._outcomes.live(line, may_be_paid=may_be_paid)
        elif may_be_paid:
            self._outcomes.lost(line, late)
        else:
            self._outcomes.error(line, late)
