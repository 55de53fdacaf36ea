"""Whether an endpoint elsewhere answers, and when to look at it again. Pure: time comes in as an argument."""

from __future__ import annotations

from batchwright.backoff import Backoff


class Availability:
    """What is known of an endpoint, which is taken to answer until a probe finds that it does not.

    While it does not, each pause before the next probe is twice as long as the one before, up to `longest_pause`. All
    times are in seconds.
    """

    def __init__(self, *, first_pause: float = 1.0, longest_pause: float = 5.0) -> None:
        self.down = False
        self._backoff = Backoff(first_pause, longest_pause)
        self._silences = 0
        """In a row."""
        self._probe_at = float("-inf")

    def answered(self, now: float) -> None:
        """A probe, or a call, was answered."""
        self.down = False
        self._silences = 0
        self._probe_at = now + self._backoff.first

    def silent(self, now: float) -> None:
        """A probe was not answered."""
        self.down = True
        self._silences += 1
        self._probe_at = now + self._backoff.pause(self._silences)

    def until_probe(self, now: float) -> float:
        """In how many seconds it may be probed again."""
        return max(0.0, self._probe_at - now)
