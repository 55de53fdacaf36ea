"""A store whose operations are timed, and traced where tracing is enabled."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import Any, cast

from batchwright.clock import Clock
from batchwright.errors import QuotaExceeded, StoreUnavailable
from batchwright.histograms import Histogram
from batchwright.service.observability.traces import Tracing
from batchwright.store.store import Store


class StoreFigures:
    """Times of operations in milliseconds, by name, and numbers of those that failed."""

    def __init__(self) -> None:
        self.latency_ms: dict[str, Histogram] = {}
        self.unavailable = 0
        """Number of operations that failed because the database did not answer."""
        self.refused: Counter[str] = Counter()
        """Numbers of refused operations, by the name of the quota."""


class _Timed:
    """Stand-in for a store whose coroutines are measured; everything else is the store's own."""

    def __init__(self, store: Store, figures: StoreFigures, clock: Clock, tracing: Tracing) -> None:
        self._store = store
        self._figures = figures
        self._clock = clock
        self._tracing = tracing

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not inspect.iscoroutinefunction(method):
            return method

        @functools.wraps(method)
        async def timed(*args: Any, **options: Any) -> Any:
            started = self._clock.now()
            try:
                with self._tracing.span(f"store.{name}"):
                    return await method(*args, **options)
            except StoreUnavailable:
                self._figures.unavailable += 1
                raise
            except QuotaExceeded as error:
                self._figures.refused[error.quota] += 1
                raise
            finally:
                latency = self._figures.latency_ms.setdefault(name, Histogram())
                latency.add((self._clock.now() - started) * 1e3)

        # From now on the attribute is found without this method.
        setattr(self, name, timed)
        return timed


def timed_store(store: Store, figures: StoreFigures, clock: Clock, tracing: Tracing) -> Store:
    """Return `store` with its operations counted in `figures`."""
    return cast("Store", _Timed(store, figures, clock, tracing))
