"""`RetryBudget`: how many tries the calls to an endpoint may spend on those that failed."""

from __future__ import annotations

_BY_SUCCESS = 2.0
"""Retries that each answer allows."""
_MOST = 200.0
"""Most retries that are allowed at any time, and at the beginning."""
_WEIGHT = 0.05
"""Weight of the latest call in the share of calls that were answered."""


class RetryBudget:
    """Lets a call be tried again as long as tries of all calls mostly lead somewhere.

    An endpoint that fails one call in three gets all its retries, and one that fails nearly everything does not get
    many times the intended calls. Refusals for a rate limit are not counted: they are paced.
    """

    def __init__(self) -> None:
        self._left = _MOST
        self._answered = 0.0
        """Share of recent calls that were answered, of those that were or could be tried again; 0 at first."""

    @property
    def failing(self) -> float:
        """Share of recent calls that were not answered; 1 at first."""
        return 1.0 - self._answered

    def succeeded(self) -> None:
        """Note that a call was answered."""
        self._left = min(_MOST, self._left + _BY_SUCCESS)
        self._answered += _WEIGHT * (1.0 - self._answered)

    def spend(self) -> bool:
        """Return whether a call that failed may be tried again, and count that retry."""
        self._answered -= _WEIGHT * self._answered
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
