"""`ShortWindow`: requests in step with windows of a few seconds whose ends an endpoint states.

What is not used by the end of a window is lost. Requests that are spread evenly, without regard to where windows begin,
now and then fall on the wrong side of a boundary: the previous window refuses them, and the next has too few.
"""

from __future__ import annotations

import math

_MARGIN = 0.1
"""Share of the window at its beginning and end in which no request is sent, since the time to arrive varies."""
_MADE_UP = 0.2
"""Share of the window after which an unused place is given up, so that no burst follows a pause."""
_FEWEST = 5
"""Answers that must have shown where a window ends."""
_ALIKE = 0.15
"""Share of the window by which the ends that they show may differ, on average."""
_WEIGHT = 0.05
"""Least weight of the latest answer."""
_FIRST_PATIENCE, _MOST_PATIENCE = 8, 64
"""Windows without a refusal after which a place that was one too many is tried again."""


class ShortWindow:
    """Consecutive windows; their beginnings are known by the times at which requests are sent."""

    def __init__(self, length: float) -> None:
        self.length = length
        """Seconds of a window."""
        self._start = 0.0
        """When some window began."""
        self._learned = 0
        self._spread = 0.0
        """Mean deviation, in seconds, of what was learned about the beginning."""
        self._window = -math.inf
        """Number of the present window since then."""
        self._used = 0
        """Number of places of the present window that were used or given up."""
        self._limit = 1
        """Places of a window, as last told."""
        self._taken = 0
        """Number of requests per window that others seem to send."""
        self._quiet = 0.0
        """Windows since the last refusal."""
        self._patience = _FIRST_PATIENCE
        self._is_trying = False
        """Whether a place was taken back since the last refusal."""
        self._refused_at = -math.inf

    @property
    def is_known(self) -> bool:
        """Whether enough answers have shown where windows begin, and agree."""
        return self._learned >= _FEWEST and self._spread <= _ALIKE * self.length

    def learn(self, ends: float) -> None:
        """Learn that a window ends at `ends`, for a request that takes the usual time to arrive."""
        self._learned += 1
        weight = max(_WEIGHT, 1.0 / self._learned)
        offset = math.remainder(ends - self._start, self.length)
        if self._learned > 1:
            self._spread += (abs(offset) - self._spread) * max(_WEIGHT, 1.0 / (self._learned - 1))
        self._start += offset * weight

    def wait(self, limit: int, now: float) -> float:
        """Return the seconds until the next request may go, of `limit` in each window."""
        window, number, limit = self._next(limit, now)
        share = _MARGIN + (1.0 - 2.0 * _MARGIN) * (number + 0.5) / limit
        return max(0.0, self._start + (window + share) * self.length - now)

    def begin(self, limit: int, now: float) -> None:
        """Count a request that is sent."""
        window, number, _ = self._next(limit, now)
        # An urgent request may go early.
        self._used = number + 1 if window == self._window else self._used + 1

    def refused(self, sent_at: float, now: float) -> None:
        """Learn that a request sent at `sent_at` found its window used up."""
        if sent_at <= self._refused_at:
            return
        if self._is_trying and self._quiet <= _FIRST_PATIENCE:
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)
        self._refused_at, self._quiet, self._is_trying = now, 0.0, False
        self._taken = min(self._taken + 1, max(0, self._limit - 1))

    def _next(self, limit: int, now: float) -> tuple[float, int, int]:
        """Return the window and the place of the next request, and the number of places."""
        self._advance(now)
        self._limit = limit
        places = max(1, limit - self._taken)
        phase = (now - self._start) / self.length - self._window
        # Each place is the middle of its part of the window.
        given_up = math.ceil((phase - _MADE_UP - _MARGIN) / (1.0 - 2.0 * _MARGIN) * places - 0.5)
        number = max(self._used, given_up)
        if number < places and phase <= 1.0 - _MARGIN:
            return self._window, number, places
        return self._window + 1, 0, places

    def _advance(self, now: float) -> None:
        window = (now - self._start) // self.length
        if window <= self._window:
            return
        if self._window > -math.inf:
            self._quiet += window - self._window
        self._window, self._used = window, 0
        if self._taken and self._quiet >= self._patience:
            self._taken -= 1
            self._quiet, self._is_trying = 0.0, True
        elif self._quiet >= _MOST_PATIENCE:
            self._patience = _FIRST_PATIENCE
