"""What open dashboards are sent: computed once a second for each key, however many of them look."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context

from batchwright.server.dashboard.dashboard_state import DashboardState
from batchwright.server.http.error_answers import RETRY_AFTER, HttpError, as_http, log_failure
from batchwright.server.http.sse import event

PERIOD = 1.0
_PART_OF_ONE_TENANT = 4

Compute = Callable[[], Awaitable[DashboardState]]


class Feeds:
    """One feed for each key with which somebody looks, and how many may look."""

    def __init__(self, most: int, stopping: asyncio.Event) -> None:
        """`most` watchers, a quarter of them of one tenant. Feeds end when `stopping` is set."""
        self._most = most
        self._most_of_one = max(1, most // _PART_OF_ONE_TENANT)
        self._stopping = stopping
        self._watchers: Counter[str] = Counter()
        self._feeds: dict[tuple[str, str], _Feed] = {}

    @contextmanager
    def watched(self, tenant: str, presented: str, compute: Compute) -> Iterator[AsyncGenerator[bytes]]:
        """The events of a tenant, as whoever presents a key (empty: none) sees them, whose states `compute` makes.

        Raises `HttpError` (429, 503) when too many look.
        """
        self._check(tenant)
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

    def _check(self, tenant: str) -> None:
        headers = {"retry-after": str(RETRY_AFTER)}
        if self._watchers[tenant] >= self._most_of_one:
            message = f"{self._most_of_one} dashboards of this tenant are open, which is the most: close some"
            raise HttpError(429, message, kind="rate_limit_error", code="too_many_page_streams", headers=headers)
        if self._watchers.total() >= self._most:
            message = f"{self._most} dashboards are open, which is the most: try again later"
            raise HttpError(503, message, kind="server_error", code="too_many_page_streams", headers=headers)


class _Feed:
    """The states for one key as events, until `close`, an error, or the end of the service."""

    def __init__(self, compute: Compute, stopping: asyncio.Event) -> None:
        self.watchers = 0
        self.over = False
        """No further state will come."""
        self._compute = compute
        self._stopping = stopping
        self._latest = b""
        self._number = 0
        self._changed = asyncio.Event()
        # In a context of its own: what it logs belongs to no request.
        self._task = asyncio.create_task(self._run(), context=Context())

    def close(self) -> None:
        """Compute no more."""
        self.over = True
        self._task.cancel()

    async def events(self) -> AsyncGenerator[bytes]:
        """The latest state, then each further one; a watcher that is slow misses some."""
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
