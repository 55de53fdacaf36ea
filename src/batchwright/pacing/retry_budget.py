"""`RetryBudget`: how many tries a job may spend on calls that failed."""

from __future__ import annotations

_WEIGHT = 0.05
"""Weight of the latest call in the share of calls that were answered."""


class RetryBudget:
    """Lets a call be tried again as long as tries of the whole job mostly lead somewhere.

    Each answer allows `by_success` more retries, up to `most`, which a job also begins with. So an endpoint that fails
    one call in three gets all its retries, and one that fails nearly everything does not get many times the intended
    calls. Refusals for a rate limit are not counted: they are paced.
    """

    def __init__(self, by_success: float = 2.0, most: float = 200.0) -> None:
        self._by_success = by_success
        self._most = most
        self._left = most
        self._answered = 0.0
        """Share of recent calls that were answered; 0 at first."""

    @property
    def failing(self) -> float:
        """Share of recent calls that were not answered; 1 at first."""
        return 1.0 - self._answered

    def succeeded(self) -> None:
        """Note that a call was answered."""
        self._left = min(self._most, self._left + self._by_success)
        self._answered += _WEIGHT * (1.0 - self._answered)

    def spend(self) -> bool:
        """Return whether a call that failed may be tried again, and count that retry."""
        self._answered -= _WEIGHT * self._answered
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
