"""Number of lines to claim. Pure: the time is an argument."""

from __future__ import annotations

from batchwright.decayed_rate import DecayedRate

LOOKAHEAD = 1.0
"""Seconds of work kept waiting in memory, so that no slot is empty during the next claim."""
_MEMORY = 5.0
"""Seconds over which the rate of lines is averaged."""
_TOO_MANY = 2.0 * LOOKAHEAD
"""Seconds of waiting work, and seconds for which it has been so much, after which lines are given back."""


class ClaimPlan:
    """Plan that keeps as many lines ready as end in `LOOKAHEAD` seconds at the current rate.

    A fast model then needs few transactions of the store, and a slow one holds no lines that others could compute.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._ended = DecayedRate(_MEMORY)
        self._ready = 0
        self._too_many_since: float | None = None

    def ended(self) -> None:
        """Note that a line was computed."""
        self._ended.add()

    def low(self, waiting: int) -> bool:
        """Return whether to call `wanted`, with `waiting` lines claimed and not started."""
        return waiting <= self._ready // 2

    def wanted(self, now: float, *, room: int, waiting: int) -> int:
        """Return how many lines to claim: `room` more can be started, `waiting` are claimed and not started."""
        elapsed = max(0.0, now - self._since)
        self._since = now
        self._ended.elapse(elapsed)
        # The first second says little, so the rate is computed as if it had passed.
        self._ready = int(LOOKAHEAD * self._ended.events / max(1.0, self._ended.seconds))
        return max(0, room + self._ready - waiting) if self.low(waiting) else 0

    def excess(self, now: float, *, waiting: int) -> int:
        """Return how many of `waiting` lines to give back because the model has become slower. Call after `wanted`.

        They would delay lines that are claimed after them, such as those of another tenant.
        """
        if waiting * LOOKAHEAD <= self._ready * _TOO_MANY:
            self._too_many_since = None
        elif self._too_many_since is None:
            self._too_many_since = now
        elif now - self._too_many_since >= _TOO_MANY:
            self._too_many_since = None
            return waiting - self._ready
        return 0
