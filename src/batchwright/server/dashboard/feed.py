"""Streams of states to open dashboards, computed once a second for each key, however many watch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context

from batchwright.server.dashboard.dashboard_state import DashboardState
from batchwright.server.http.error_answers import RETRY_AFTER, HttpError, as_http, log_failure, unavailable
from batchwright.server.http.sse import event

PERIOD = 1.0
_PART_OF_ONE_TENANT = 4

Compute = Callable[[], Awaitable[DashboardState]]


class Feeds:
    """The feeds of all keys with open dashboards, and the limits on their number."""

    def __init__(self, most: int, stopping: asyncio.Event) -> None:
        """Allow `most` watchers, and a quarter of that per tenant. Feeds end when `stopping` is set."""
        self._most = most
        self._most_of_one = max(1, most // _PART_OF_ONE_TENANT)
        self._stopping = stopping
        self._watchers: Counter[str] = Counter()
        self._feeds: dict[tuple[str, str], _Feed] = {}

    @contextmanager
    def watched(self, tenant: str, presented: str, compute: Compute) -> Iterator[AsyncGenerator[bytes]]:
        """Watch the events of a tenant as seen with the key `presented` (empty: none). `compute` makes their states.

        Raises `HttpError` (429, 503) when there are too many watchers.
        """
        if self._watchers[tenant] >= self._most_of_one:
            message = f"{self._most_of_one} dashboards of this tenant are open, which is the most: close some"
            headers = {"retry-after": str(RETRY_AFTER)}
            raise HttpError(429, message, kind="rate_limit_error", code="too_many_page_streams", headers=headers)
        if self._watchers.total() >= self._most:
            message = f"{self._most} dashboards are open, which is the most: try again later"
            raise unavailable(message, "too_many_page_streams")
        whose = tenant, presented
        feed = self._feeds.get(whose)
        if feed is None or feed.over:
            feed = self._feeds[whose] = _Feed(compute, self._stopping)
        self._watchers[tenant] += 1
        feed.watchers += 1
        try:
            yield feed.events()
        finally:
            feed.watchers -= 1
            self._watchers[tenant] -= 1
            if not self._watchers[tenant]:
                del self._watchers[tenant]
            if not feed.watchers:
                feed.close()
                if self._feeds.get(whose) is feed:
                    del self._feeds[whose]


class _Feed:
    """The states for one key as events, until `close`, an error, or the service stops."""

    def __init__(self, compute: Compute, stopping: asyncio.Event) -> None:
        self.watchers = 0
        self.over = False
        """Whether no further state will come."""
        self._compute = compute
        self._stopping = stopping
        self._latest = b""
        self._number = 0
        self._changed = asyncio.Event()
        # In a context of its own, since its log lines belong to no request.
        self._task = asyncio.create_task(self._run(), context=Context())

    def close(self) -> None:
        """Stop computing states."""
        self.over = True
        self._task.cancel()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the latest state, then each new one; a slow watcher misses some."""
        seen = 0
        while True:
            changed = self._changed
            if self._number > seen:
                seen = self._number
                yield self._latest
            elif self.over:
                return
            else:
                await changed.wait()

    async def _run(self) -> None:
        while not self.over:
            try:
                state = await self._compute()
                self._latest = event(state.model_dump(mode="json"))
            except Exception as error:
                answer = as_http(error)
                log_failure(error, answer)
                self._latest = event(answer.body)
                self.over = True
            self._number += 1
            self.over = self.over or self._stopping.is_set()
            self._wake()
            if not self.over:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), PERIOD)
                self.over = self.over or self._stopping.is_set()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
