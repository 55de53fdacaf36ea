"""`Pace`: requests spread evenly below the second, so that no burst follows a pause."""

from __future__ import annotations

_BURST = 0.05
"""Seconds of work that may go at once: about what the timers of an event loop may be late."""


class Pace:
    """Spreads amounts over time at a rate that may change, by a token bucket that holds almost nothing.

    An amount goes when the bucket is not empty, and may take it below 0, so that an amount larger than what the bucket
    holds needs no exception; the next one waits until it has been filled again.
    """

    def __init__(self) -> None:
        self._credit = 0.0
        self._at = float("-inf")

    def wait(self, rate: float, now: float) -> float:
        """Return the seconds until the next amount may go at `rate` a second; infinite at no rate."""
        self._fill(rate, now)
        if self._credit >= 0.0:
            return 0.0
        return -self._credit / rate if rate > 0.0 else float("inf")

    def take(self, amount: float, rate: float, now: float) -> None:
        """Note that an amount went."""
        self._fill(rate, now)
        self._credit -= amount

    def give_back(self, amount: float) -> None:
        """Note that an amount that went was less than it had seemed, or more if `amount` is negative."""
        self._credit += amount

    def _fill(self, rate: float, now: float) -> None:
        if now > self._at:
            most = max(0.0, rate * _BURST)
            # It is full before the first amount.
            self._credit = most if self._at == float("-inf") else min(self._credit + rate * (now - self._at), most)
            self._at = now
