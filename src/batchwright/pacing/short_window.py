"""`ShortWindow`: requests in step with a window of a few seconds, whose end an endpoint states.

What is not used by the end of a window is lost. Requests that are spread evenly, without regard to where windows begin,
come now and then on the wrong side of one: the window before refuses them, and the next has too few.
"""

from __future__ import annotations

import math

_MARGIN = 0.1
"""Share of the window at its beginning and end in which no request goes, since not each takes as long to arrive."""
_FEWEST = 5
"""Answers that must have told where a window ends."""
_WEIGHT = 0.05
"""Weight of the latest one, at least."""


class ShortWindow:
    """Windows that follow one another; where they begin is known on the clock of requests that are sent."""

    def __init__(self, length: float) -> None:
        self.length = length
        """Seconds of a window."""
        self._start = 0.0
        """When some window began."""
        self._told = 0
        self._window = -math.inf
        """Number of the present window since then."""
        self._used = 0
        """Requests sent in the present window."""

    @property
    def is_known(self) -> bool:
        """Whether enough answers have told where windows begin."""
        return self._told >= _FEWEST

    def tell(self, ends: float) -> None:
        """Learn that a window ends at `ends`, for a request that takes as long to arrive as most do."""
        self._told += 1
        offset = math.remainder(ends - self._start, self.length)
        self._start += offset * max(_WEIGHT, 1.0 / self._told)

    def wait(self, limit: int, now: float) -> float:
        """Return the seconds until the next request may go, of `limit` in each window."""
        self._advance(now)
        window, number = (self._window, self._used) if self._used < limit else (self._window + 1, 0)
        # Each has its place in the middle of its part of the window.
        share = _MARGIN + (1.0 - 2.0 * _MARGIN) * (number + 0.5) / limit
        return max(0.0, self._start + (window + share) * self.length - now)

    def begin(self, now: float) -> None:
        """Count a request that is sent."""
        self._advance(now)
        self._used += 1

    def _advance(self, now: float) -> None:
        window = (now - self._start) // self.length
        if window > self._window:
            self._window, self._used = window, 0
