"""`WindowEnd`: when a window of a stated limit ends.

An answer states the seconds until then, but not from which moment: some endpoints fill in their headers when a request
arrives, others when its answer is ready, seconds later. Answers that take different times show which: counted from the
right moment, they all give the same end.
"""

from __future__ import annotations

import math

_WEIGHT = 0.1
"""Weight of the latest answer."""
_CLEARLY = 0.5
"""Largest deviation of ends counted from answers, as a multiple of that counted from arrivals, to be believed."""


class WindowEnd:
    """End of the present window, on the clock of this process."""

    def __init__(self) -> None:
        self.value = math.inf
        """Time last learned; infinite: nothing was learned."""
        self._from_arrival = self._from_answer = math.inf
        self._spread_of_arrival = self._spread_of_answer = 0.0
        """Mean deviations, in seconds, of each end from the one before."""
        self.is_of_answer = False
        """Whether answers state the limit as it is when they are ready, not when their requests arrived."""

    def learn(self, sent_at: float, now: float, reset: float, window: float) -> None:
        """Learn that an answer at `now` to a request sent at `sent_at` states an end in `reset` seconds."""
        from_arrival, from_answer = sent_at + reset, now + reset
        if self._from_arrival < math.inf:
            moved = abs(_nearest(from_arrival - self._from_arrival, window))
            self._spread_of_arrival += _WEIGHT * (moved - self._spread_of_arrival)
            moved = abs(_nearest(from_answer - self._from_answer, window))
            self._spread_of_answer += _WEIGHT * (moved - self._spread_of_answer)
        self._from_arrival, self._from_answer = from_arrival, from_answer
        self.is_of_answer = self._spread_of_answer < _CLEARLY * self._spread_of_arrival
        self.value = from_answer if self.is_of_answer else from_arrival

    def pass_by(self, windows: int, window: float) -> None:
        """Go on to a later window."""
        self.value += windows * window


def _nearest(seconds: float, window: float) -> float:
    """Return a difference of times without whole windows."""
    return math.remainder(seconds, window)
