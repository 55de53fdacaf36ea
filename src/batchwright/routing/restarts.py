"""Times at which a replica that died is restarted."""

from __future__ import annotations

from batchwright.backoff import Backoff

_BACKOFF = Backoff(0.5, 60.0, jitter=(0.75, 1.0))


class Restarts:
    """Pauses of one replica before it is restarted, which grow up to a minute until it answers."""

    def __init__(self, backoff: Backoff = _BACKOFF) -> None:
        self._backoff = backoff
        self._in_a_row = 0

    def died(self, now: float, luck: float = 0.0) -> float:
        """Return the time at which to restart it; `luck`, 0 to 1, selects a point within the jitter."""
        self._in_a_row += 1
        return now + self._backoff.pause(self._in_a_row, luck)

    def answered(self) -> None:
        """Note that it computed something: its next death starts a new series."""
        self._in_a_row = 0
