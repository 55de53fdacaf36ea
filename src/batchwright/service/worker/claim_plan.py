"""The number of lines to claim. Pure: time comes in as an argument."""

from __future__ import annotations

from batchwright.decayed_rate import DecayedRate

LOOKAHEAD = 1.0
"""Seconds of work that wait in memory, so that no slot is empty while the next claim is under way."""
_MEMORY = 5.0
"""Seconds over which the rate is averaged."""
_TOO_MANY = 2.0 * LOOKAHEAD
"""Seconds of work, and seconds of waiting as much, after which lines are given back."""


class ClaimPlan:
    """Keeps as many lines ready as end in `LOOKAHEAD` seconds at the rate that is seen.

    So a fast model costs the store few transactions, and a slow one holds back nothing that another worker could do.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._ended = DecayedRate(_MEMORY)
        self._ready = 0
        self._too_many_since: float | None = None

    def ended(self) -> None:
        """Note that a line was computed, so there is room for another."""
        self._ended.add()

    def low(self, waiting: int) -> bool:
        """Return whether it is time to ask `wanted`, with `waiting` lines claimed and not started."""
        return waiting <= self._ready // 2

    def wanted(self, now: float, *, room: int, waiting: int) -> int:
        """Return how many to claim, with room for `room` lines and `waiting` of them claimed and not started."""
        elapsed = max(0.0, now - self._since)
        self._since = now
        self._ended.elapse(elapsed)
        # The first second says little: the rate is taken as if it had passed.
        self._ready = int(LOOKAHEAD * self._ended.events / max(1.0, self._ended.seconds))
        return max(0, room + self._ready - waiting) if self.low(waiting) else 0

    def excess(self, now: float, *, waiting: int) -> int:
        """Return how many of `waiting` lines to give back because the model has become slower.

        They would hold up lines that are claimed after them, such as those of another tenant. Asked after `wanted`.
        """
        if waiting * LOOKAHEAD <= self._ready * _TOO_MANY:
            self._too_many_since = None
        elif self._too_many_since is None:
            self._too_many_since = now
        elif now - self._too_many_since >= _TOO_MANY:
            self._too_many_since = None
            return waiting - self._ready
        return 0
