"""What happens to sequences as time passes: deadlines expire, and long waits end in promotion."""

from __future__ import annotations

import heapq
import math
from collections import deque

from batchwright.limiting.turns import ENDED_KEPT
from batchwright.scheduling.sequence import Sequence, Status


class Timetable:
    """Deadlines and arrivals of sequences. Ended sequences in it are ignored.

    `promote_after` is in the unit of `now`; None turns promotion off. Raises ValueError unless it is more than 0.
    """

    def __init__(self, promote_after: float | None) -> None:
        if promote_after is not None and not promote_after > 0.0:
            raise ValueError(f"promote_after={promote_after}: must be more than 0, or None for no promotion")
        self._promote_after = promote_after
        self._arrivals: deque[Sequence] = deque()
        self._deadlines: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        """Return the number of entries, including those of ended sequences."""
        return len(self._arrivals) + len(self._deadlines)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence; sequences are added in the order of their arrival."""
        if self._promote_after is not None:
            self._arrivals.append(sequence)
        if sequence.deadline < math.inf:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.ordinal, sequence))

    def next_expired(self, now: float) -> Sequence | None:
        """Remove and return a sequence whose deadline has passed, the earliest first; None if there is none left."""
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.status is not Status.FINISHED:
                return sequence
        return None

    def next_of_age(self, now: float) -> Sequence | None:
        """Remove and return a sequence that arrived `promote_after` ago, the oldest first; None if there is none."""
        if self._promote_after is None:
            return None
        while self._arrivals:
            oldest = self._arrivals[0]
            ended = oldest.status is Status.FINISHED
            if not ended and now - oldest.arrived_at < self._promote_after:
                return None
            self._arrivals.popleft()
            if not ended:
                return oldest
        return None

    def next_event(self) -> float:
        """Return a time before which no deadline passes and no sequence is due for promotion."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._arrivals and self._promote_after is not None:
            times.append(self._arrivals[0].arrived_at + self._promote_after)
        return min(times, default=math.inf)

    def sweep(self, needed: int) -> None:
        """Remove ended sequences once they are most of the entries; `needed` sequences have not ended."""
        if len(self._deadlines) > 2 * needed + ENDED_KEPT:
            self._deadlines = [entry for entry in self._deadlines if entry[2].status is not Status.FINISHED]
            heapq.heapify(self._deadlines)
        if len(self._arrivals) > 2 * needed + ENDED_KEPT:
            self._arrivals = deque(each for each in self._arrivals if each.status is not Status.FINISHED)
