"""When a replica that died is started again."""

from __future__ import annotations

from batchwright.backoff import Backoff

_BACKOFF = Backoff(0.5, 60.0, jitter=(0.75, 1.0))


class Restarts:
    """The pauses of one replica before it is started again, each longer than the one before until it answers."""

    def __init__(self, backoff: Backoff = _BACKOFF) -> None:
        self._backoff = backoff
        self.deaths = 0
        """Since it was made."""
        self._in_a_row = 0

    def died(self, now: float, luck: float = 0.0) -> float:
        """Return the time at which to start it again; `luck`, 0 to 1, chooses within the jitter."""
        self.deaths += 1
        self._in_a_row += 1
        return now + self._backoff.pause(self._in_a_row, luck)

    def answered(self) -> None:
        """Note that it computed something: its next death is another matter."""
        self._in_a_row = 0
