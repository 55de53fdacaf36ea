"""`EngineQueueWatch`: reads an engine's own figures of its queue while calls are under way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

from batchwright.errors import BatchwrightError, EndpointUnreachable
from batchwright.wire.engine_gauges import Queue, queue_of

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN = 0.5
_MOST_FAILURES = 3
"""Failures in a row after which an endpoint is taken for one that shows no figures."""
_PATIENCE = 5.0
"""Seconds after which metrics are given up: figures so old say nothing."""


class EngineQueueWatch:
    """Asks for metrics twice a second while `is_busy`, and tells `learned` what they say.

    `read` gets the text of the metrics, and raises `BatchwrightError` where there are none.
    """

    def __init__(
        self, read: Callable[[], Awaitable[str]], is_busy: Callable[[], bool], learned: Callable[[Queue], None]
    ) -> None:
        self._read = read
        self._is_busy = is_busy
        self._learned = learned
        self._failures = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def wake(self) -> None:
        """Watch, unless the endpoint is known to show nothing. Costs next to nothing while it watches already."""
        if self._task is None and self._failures < _MOST_FAILURES and not self._closed:
            self._task = asyncio.create_task(self._watch(), context=Context())

    async def close(self) -> None:
        """Stop watching."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        try:
            while self._is_busy() and self._failures < _MOST_FAILURES:
                await self._look()
                await asyncio.sleep(_SECONDS_BETWEEN)
        finally:
            self._task = None

    async def _look(self) -> None:
        queue = None
        try:
            async with asyncio.timeout(_PATIENCE):
                queue = queue_of(await self._read())
        except (BatchwrightError, TimeoutError) as error:
            _log.debug("the endpoint shows no metrics: %s", error)
            if isinstance(error, EndpointUnreachable) and not error.timed_out:
                return  # it shows nothing at all now, and may when it is back
        except Exception:  # whatever it is, calls must go on, and the endpoint is not asked for ever
            _log.exception("the metrics of the endpoint could not be read")
        if queue is None:
            self._failures += 1
        else:
            self._failures = 0
            self._learned(queue)
