"""`RiseLimit`: how fast usage may rise, if an endpoint refuses requests because it rose too fast.

Providers describe such a limit as a share by which usage may rise in a time (half in a few minutes, say), and state
neither. So from the first such refusal on, requests are paced at a rate that rises exponentially from what was recently
accepted; the exponent is reduced at each further refusal after an answer, and slowly recovers.
"""

from __future__ import annotations

import math
from collections import deque

from batchwright.pacing.pace import Pace

_LOOKED_BACK = 5.0
"""Seconds over which accepted requests are counted."""
_DOUBLES = 8.5
"""Seconds in which the pace doubles at first: it rises by half in 5 s."""
_SLOWER, _FASTER = 0.85, 0.005
"""Factor of the exponent at each such refusal, and share by which it recovers per second without any."""
_STEEPEST = 2.0
"""Greatest exponent, as a multiple of the first."""
_AHEAD = 1.25
"""Multiple of the accepted rate at which it resumes: that rate is, on average, half of the time looked back old."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_LONGER = 1.3
"""Factor by which each pause is longer than the previous one while nothing is accepted: little is lost at its end."""
_LESS = 0.9
"""Factor of the level at each further refusal while nothing is accepted, which shows little of the level."""
_BIN = 0.25
_LEAST = 0.2
"""Lowest initial pace in requests per second."""


class RiseLimit:
    """Pace at which usage may rise, once requests were refused because it rose too fast."""

    def __init__(self) -> None:
        self._bins: deque[tuple[float, int]] = deque()
        """Requests sent and not refused, by the start of the quarter second in which they were sent."""
        self._level: float | None = None
        """Requests per second at `until`; None: nothing was refused."""
        self._exponent = math.log(2.0) / _DOUBLES
        self.until = float("-inf")
        """End of the pause after a refusal."""
        self._refusals = 0
        """Refusals in a row with nothing accepted between them."""
        self._pace = Pace()

    def wait(self, now: float) -> float:
        """Return the seconds until the next request may go."""
        if self._level is None:
            return 0.0
        return max(self.until - now, self._pace.wait(self._rate(now), now))

    def begin(self, now: float) -> None:
        """Count a request that is sent."""
        at = math.floor(now / _BIN) * _BIN
        if self._bins and self._bins[-1][0] >= at:
            start, count = self._bins[-1]
            self._bins[-1] = (start, count + 1)
        else:
            self._bins.append((at, 1))
        while self._bins[0][0] < now - 2.0 * _LOOKED_BACK:
            self._bins.popleft()
        if self._level is not None:
            self._pace.take(1.0, self._rate(now), now)

    def accepted(self) -> None:
        """Note that a request sent since the last refusal was answered."""
        self._refusals = 0

    def withdrawn(self, at: float) -> None:
        """Take back a request that was sent at `at` and refused, or was not sent after all."""
        for index, (start, count) in enumerate(self._bins):
            if start <= at < start + _BIN and count:
                self._bins[index] = (start, count - 1)

    def refused(self, now: float, retry_after: float | None) -> None:
        """Learn that a request sent after the last refusal was known was refused because usage rose too fast."""
        since = now - _LOOKED_BACK
        accepted = sum(count for at, count in self._bins if at >= since)
        if self._level is not None and not self._refusals:
            quiet = max(0.0, now - self.until)
            steepest = _STEEPEST * math.log(2.0) / _DOUBLES
            self._exponent = min(steepest, self._exponent * (1.0 + _FASTER) ** min(quiet, 600.0)) * _SLOWER
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * _LONGER ** min(self._refusals, 30))
        self._refusals += 1
        self.until = now + max(pause, retry_after or 0.0)
        last = 0.0 if self._level is None or (accepted and self._refusals == 1) else _LESS * self._level
        self._level = max(_AHEAD * accepted / _LOOKED_BACK, last, _LEAST)

    def _rate(self, now: float) -> float:
        assert self._level is not None
        return self._level * math.exp(min(self._exponent * max(0.0, now - self.until), 50.0))
