"""The requests of a batcher that must be computed again, and when.

Three kinds wait here, apart from the policy's queue. *Suspects* of a failed batch are searched for the one to blame
(`policies/search.py`). A single request that failed is retried after a pause, if the batcher has `retries`. And while
the model may be down (`policies/breaker.py`), one request of each batch is tried, and the rest wait here for the
outcome.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence

from batchwright.backoff import Backoff
from batchwright.batcher.computation import RunningBatch
from batchwright.batcher.entry import Entry
from batchwright.policies.breaker import Breaker
from batchwright.policies.search import Search

RETRY_SHARE = 0.1
"""Share of the time of other batches that may be spent on searches although other requests wait."""
PAUSES = Backoff(first=0.1, longest=10.0, jitter=(0.5, 1.0))
"""Pauses before a single request that failed is tried again."""


class Retries:
    """Searches, the next one first, without the parts being computed; and single requests that wait for a retry."""

    def __init__(self, *, isolate: bool, luck: Callable[[], float] = random.random) -> None:
        self._isolate = isolate
        self.breaker = Breaker()
        self.waiting: set[Entry] = set()
        """Requests that are not in a part being computed now."""
        self._searches: deque[Search[Entry]] = deque()
        self._paused: list[tuple[float, int, Entry]] = []
        """Heap of single requests that failed, by the time of their next try."""
        self._pauses = 0
        self._seconds = 0.0
        """Time that may be spent on searches."""
        self._luck = luck

    def __len__(self) -> int:
        """Return the number of requests that wait here."""
        return len(self.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing needs to be computed again."""
        return not (self._searches or self.waiting)

    @property
    def is_due(self) -> bool:
        """Whether a part may be computed although other requests wait."""
        if not self._searches or self.breaker.is_doubtful:
            return False
        return self._seconds > 0.0 or self._searches[0].error is None

    @property
    def next_try(self) -> float:
        """When the next pause of a single request ends; infinite if there is none."""
        while self._paused and self._paused[0][2] not in self.waiting:
            heapq.heappop(self._paused)
        return self._paused[0][0] if self._paused else math.inf

    def pause(self, entry: Entry, now: float) -> None:
        """Have a single request that has failed wait for its next try."""
        entry.tries += 1
        self._pauses += 1
        heapq.heappush(self._paused, (now + PAUSES.pause(entry.tries, self._luck()), self._pauses, entry))
        self.waiting.add(entry)

    def begin_due(self, now: float, *, early: bool) -> None:
        """Start the next try of single requests whose pause has ended, or with `early` of all."""
        while (at := self.next_try) <= now or (early and at < math.inf):
            self._searches.append(Search([heapq.heappop(self._paused)[2]]))

    def divided(self, entries: Sequence[Entry]) -> tuple[list[Entry], Search[Entry]]:
        """Return the request of a new batch that shows whether the model is down, and a search with the others."""
        self.waiting.update(entries)
        search = Search(entries)
        return self.next_part(search), search

    def next_search(self) -> Search[Entry] | None:
        """Remove and return the next search."""
        return self._searches.popleft() if self._searches else None

    def next_part(self, search: Search[Entry]) -> list[Entry]:
        """Return the requests of `search` to compute next, which no longer wait here; none if it is over."""
        choose = search.single if self.breaker.is_doubtful else search.part
        part = choose(lambda entry: entry.waits_for_answer)
        self.waiting.difference_update(part)
        return part

    def remove_all(self) -> list[Entry]:
        """Remove and return all requests that wait here."""
        removed = list(self.waiting)
        self.waiting.clear()
        self._searches.clear()
        self._paused.clear()
        return removed

    def account(self, group: RunningBatch, seconds: float) -> None:
        """Account for `seconds` that `group` took: `RETRY_SHARE` of the time of other batches may be spent on parts."""
        if group.search is None:
            self._seconds = min(self._seconds + RETRY_SHARE * seconds, seconds)
        elif group.is_charged:
            self._seconds -= seconds

    def ended(self, group: RunningBatch, suspects: list[Entry], now: float) -> list[Entry]:
        """Record how a batch ended, and continue its search or begin one for `suspects`.

        Returns the requests that are given up because the model is down.
        """
        search, error = group.search, group.error
        if self._isolate:
            self._inform_breaker(group, now)
        self.waiting.update(suspects)
        if search is not None:
            if error is None:
                search.succeeded()
            else:
                if len(group.entries) > 1:
                    search.error = search.error or error
                search.failed()
            self._searches.appendleft(search)
        elif suspects and error is not None:
            self._searches.append(Search(suspects, error))
        return self._give_up() if self.breaker.is_open else []

    def _inform_breaker(self, group: RunningBatch, now: float) -> None:
        if group.fitted:
            self.breaker.succeeded(len(group.entries))
        elif group.error is not None:
            was_suspected = group.search is not None and group.search.was_suspected
            self.breaker.failed(len(group.entries), group.error, now, was_suspected=was_suspected)

    def _give_up(self) -> list[Entry]:
        given_up = [entry for search in self._searches for entry in search.left() if entry.waits_for_answer]
        self._searches.clear()
        self.waiting.difference_update(given_up)
        return given_up
