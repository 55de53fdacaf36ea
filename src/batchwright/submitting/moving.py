"""Which batches to give up, and compute by live requests, so that all lines are done by a deadline."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from batchwright.submitting.looking import seconds_left


@dataclass(frozen=True, slots=True)
class BatchSoFar:
    """What is known of a batch at the provider."""

    key: Hashable
    age: float
    """Seconds since it was created."""
    done: int
    total: int
    keeps: bool = True
    """Whether what is done is kept when it is cancelled."""

    @property
    def left(self) -> int:
        """Lines that are still to be computed if it is cancelled."""
        return max(0, self.total - self.done) if self.keeps else self.total


@dataclass(frozen=True, slots=True)
class MovePlan:
    """What to do now to meet the deadline."""

    give_up: tuple[Hashable, ...] = ()
    """Batches to cancel, whose lines without a result become live requests."""
    gather: bool = True
    """Whether further lines go into batches; otherwise they become live requests."""


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves lines from batches to live requests as late as possible, since they cost half in a batch.

    - `cancelling`: seconds that a provider may take to end a batch that is cancelled.
    - `shortest`: least seconds that a new batch is assumed to take.
    - `margin`: factor by which the live requests may take longer than they should.
    """

    cancelling: float = 600.0
    shortest: float = 900.0
    margin: float = 1.25

    def plan(self, time_left: float, batches: Sequence[BatchSoFar], waiting: int, live_rate: float) -> MovePlan:
        """Return what to do with `time_left` seconds to the deadline.

        `waiting`: lines that are in no batch at the provider, those not read yet included; `live_rate`: lines a second
        that live requests compute.

        A batch is late if, judging by its progress, it will end after the deadline, or if it has made none. While live
        requests have time enough for the lines of all late batches, these are left alone: they may yet be quicker.
        After that, all of them are given up, starting with those that would end last.
        """
        gather = time_left > self.shortest + self._live(waiting, live_rate)
        late = sorted(
            (each for each in batches if not seconds_left(each.age, each.done, each.total) < time_left),
            key=lambda each: -min(seconds_left(each.age, each.done, each.total), 1e12),
        )
        lines = waiting if not gather else 0
        if not late or time_left > self._live(lines + sum(each.left for each in late), live_rate):
            return MovePlan(gather=gather)
        return MovePlan(tuple(each.key for each in late), gather=gather)

    def _live(self, lines: int, live_rate: float) -> float:
        """Seconds that live requests would need for `lines` that are in batches now."""
        if not lines:
            return 0.0
        return self.cancelling + self.margin * (lines / live_rate if live_rate > 0 else math.inf)
