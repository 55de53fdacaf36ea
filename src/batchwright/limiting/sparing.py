"""Suppression of log records and the like that strangers can cause as often as they like."""

from __future__ import annotations

from collections import Counter


class Sparing:
    """Lets the first few of a kind through in each period, and counts the rest. Times are seconds of any clock."""

    def __init__(self, most: int, period: float) -> None:
        self._most = most
        self._period = period
        self._seen: Counter[str] = Counter()
        self._until = float("-inf")
        self._suppressed = 0

    def take(self, kind: str, now: float) -> tuple[bool, int]:
        """Return whether this one is let through, and how many were not in the period that has just ended."""
        suppressed = 0
        if now >= self._until:
            suppressed, self._suppressed = self._suppressed, 0
            self._seen.clear()
            self._until = now + self._period
        # Each kind is a stranger's invention, so they are bounded, too.
        if self._seen[kind] >= self._most or len(self._seen) > 1000 * self._most:
            self._suppressed += 1
            return False, suppressed
        self._seen[kind] += 1
        return True, suppressed
