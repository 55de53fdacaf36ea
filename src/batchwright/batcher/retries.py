"""The searches in batches that failed, and the time that may be spent on them."""

from __future__ import annotations

from collections import deque

from batchwright.batcher.computation import RunningBatch
from batchwright.batcher.entry import Entry
from batchwright.policies.search import Search

RETRY_SHARE = 0.1


class RetryBudget:
    """Searches for requests that make batches fail, the next first; without those being computed."""

    def __init__(self) -> None:
        self.searches: deque[Search[Entry]] = deque()
        self._seconds = 0.0

    @property
    def has_time(self) -> bool:
        """Whether parts may be computed although other requests wait."""
        return self._seconds > 0.0

    def account(self, group: RunningBatch, seconds: float) -> None:
        """Account for `seconds` that `group` took: `RETRY_SHARE` of what other batches take may be spent on parts."""
        if group.search is None:
            self._seconds = min(self._seconds + RETRY_SHARE * seconds, seconds)
        elif group.is_charged:
            self._seconds -= seconds

    def go_on(self, group: RunningBatch, suspects: list[Entry]) -> None:
        """Go on with the search that `group` was a part of, or begin one for its suspects."""
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
