"""`Pace`: requests spread evenly within each second, so that no burst follows a pause."""

from __future__ import annotations

_BURST = 0.05
"""Seconds of work that may go at once: about as much as an event loop's timers may be late."""


class Pace:
    """Spreads amounts over time at a rate that may change, by a token bucket that holds almost nothing.

    An amount goes when the bucket is not empty, and may take it below 0, so that an amount larger than the bucket needs
    no exception; the next one waits until it has been refilled.
    """

    def __init__(self) -> None:
        self._credit = 0.0
        self._at = float("-inf")

    def wait(self, rate: float, now: float) -> float:
        """Return the seconds until the next amount may go at `rate` per second; infinite if the rate is 0."""
        self._fill(rate, now)
        if self._credit >= 0.0:
            return 0.0
        return -self._credit / rate if rate > 0.0 else float("inf")

    def take(self, amount: float, rate: float, now: float) -> None:
        """Note that an amount went."""
        self._fill(rate, now)
        self._credit -= amount

    def give_back(self, amount: float) -> None:
        """Note that a past amount was smaller than assumed, or larger if `amount` is negative."""
        self._credit += amount

    def _fill(self, rate: float, now: float) -> None:
        if now > self._at:
            most = max(0.0, rate * _BURST)
            # It is full before the first amount.
            self._credit = most if self._at == float("-inf") else min(self._credit + rate * (now - self._at), most)
            self._at = now
