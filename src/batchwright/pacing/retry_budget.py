"""`RetryBudget`: how many tries a job may spend on calls that failed."""

from __future__ import annotations


class RetryBudget:
    """Lets a call be tried again as long as tries of the whole job mostly lead somewhere.

    Each answer allows `by_success` more retries, up to `most`, with which a job also begins. So an endpoint of which
    one call in three fails gets all its retries, and one that fails nearly everything does not get many times the
    calls that it was meant to have. Refusals for a rate limit are not counted: they are paced.
    """

    def __init__(self, by_success: float = 2.0, most: float = 200.0) -> None:
        self._by_success = by_success
        self._most = most
        self._left = most

    def succeeded(self) -> None:
        """Note that a call was answered."""
        self._left = min(self._most, self._left + self._by_success)

    def spend(self) -> bool:
        """Return whether a call that failed may be tried again, and count that retry."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
