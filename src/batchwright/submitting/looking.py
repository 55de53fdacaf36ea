"""When batches at a provider are looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LookPauses:
    """Pauses between looks at the batches of a provider, in seconds.

    A tenth of the age of the youngest batch, within `shortest` and `longest`, so that the end of a batch is noticed at
    most a tenth of its duration late; up to `standstill` while nothing progresses. A batch that will soon end, judging
    by its progress, is looked at about when it does.
    """

    shortest: float = 5.0
    longest: float = 60.0
    standstill: float = 120.0
    share: float = 0.1

    def pause(self, ages: list[float], left: list[float], still_for: float) -> float:
        """Return the seconds until the next look.

        `ages`: seconds since each batch was created; `left`: seconds that each needs by its progress, infinite where
        that is unknown; `still_for`: seconds since a look last showed any progress.
        """
        if not ages:
            return math.inf
        pause = self._within(self.share * min(ages), self.longest)
        if still_for > 10 * self.longest:
            pause = max(pause, self._within(self.share * still_for, self.standstill))
        return min(pause, self._within(min(left, default=math.inf), math.inf))

    def _within(self, pause: float, longest: float) -> float:
        return max(self.shortest, min(pause, longest))


def seconds_left(age: float, done: int, total: int) -> float:
    """Return the seconds that a batch still needs at its rate so far; infinite while nothing of it is done."""
    if done <= 0:
        return math.inf
    return age * max(0, total - done) / done
