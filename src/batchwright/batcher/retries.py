"""What is left of batches that failed, and how much time may be spent on it."""

from __future__ import annotations

from collections import deque

from batchwright.batcher.computation import RunningBatch
from batchwright.batcher.entry import Entry
from batchwright.policies.search import Search

RETRY_SHARE = 0.1


class RetryBudget:
    """The searches for the requests that are to blame: those of which no part is computed now, the next one first."""

    def __init__(self) -> None:
        self.searches: deque[Search[Entry]] = deque()
        self._seconds = 0.0

    @property
    def has_time(self) -> bool:
        """Whether parts may be computed although others wait."""
        return self._seconds > 0.0

    def account(self, group: RunningBatch, seconds: float) -> None:
        """`group` has taken so long: `RETRY_SHARE` of what others take is for parts."""
        if group.search is None:
            self._seconds = min(self._seconds + RETRY_SHARE * seconds, seconds)
        elif group.is_charged:
            self._seconds -= seconds

    def go_on(self, group: RunningBatch, suspects: list[Entry]) -> None:
        """With the search of which `group` was a part, or begin one for its suspects."""
        search = group.search
        if search is not None:
            if group.is_to_blame:
                search.failed()
                suspects = []
            else:
                search.succeeded()
            self.searches.appendleft(search)
        if suspects:
            self.searches.append(Search(suspects))
