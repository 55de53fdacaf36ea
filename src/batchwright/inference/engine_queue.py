"""`EngineQueueWatch`: reads an engine's own figures for its queue, or its slots, while calls are in progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

from batchwright.errors import BatchwrightError, EndpointError, EndpointUnreachable
from batchwright.wire.engine_gauges import Queue, queue_of, slots_of

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN = 0.5
_MOST_FAILURES = 3
"""Consecutive failures after which an endpoint is assumed to have no figures."""
_PATIENCE = 5.0
"""Seconds after which a request for metrics is given up: figures that old say nothing."""


class EngineQueueWatch:
    """Asks for metrics twice a second while requests are in progress, and calls `learned` with their contents.

    `read` gets the content at a path beside the API, and raises `BatchwrightError` if there is nothing. An engine
    without metrics that states its slots is asked for them once; requests in progress beyond them are waiting.
    """

    def __init__(
        self, read: Callable[[str], Awaitable[str]], under_way: Callable[[], int], learned: Callable[[Queue], None]
    ) -> None:
        self._read = read
        self._under_way = under_way
        self._learned = learned
        self._failures = 0
        self._slots: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def wake(self) -> None:
        """Watch, unless the endpoint is known to have no figures. Costs next to nothing if already watching."""
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
            while self._under_way() and self._failures < _MOST_FAILURES:
                if self._slots is None:
                    await self._look()
                if self._slots is not None and (under_way := self._under_way()):
                    running = min(under_way, self._slots)
                    self._learned(Queue(running, under_way - running))
                await asyncio.sleep(_SECONDS_BETWEEN)
        finally:
            self._task = None

    async def _look(self) -> None:
        queue = None
        try:
            async with asyncio.timeout(_PATIENCE):
                queue = queue_of(await self._read("/metrics"))
        except EndpointUnreachable as error:
            _log.debug("the endpoint did not show its metrics: %s", error)
            if not error.timed_out:
                return  # it serves nothing at all now, but may when it is back
        except EndpointError as error:
            _log.debug("the endpoint shows no metrics: %s", error)
            self._slots = await self._read_slots()
        except (BatchwrightError, TimeoutError) as error:
            _log.debug("the metrics of the endpoint were not read: %s", error)
        except Exception:  # whatever it is, calls must go on, and the endpoint is not asked forever
            _log.exception("the metrics of the endpoint could not be read")
        if queue is not None:
            self._failures = 0
            self._learned(queue)
        elif self._slots is None:
            self._failures += 1

    async def _read_slots(self) -> int | None:
        try:
            async with asyncio.timeout(_PATIENCE):
                return slots_of(await self._read("/props"))
        except (BatchwrightError, TimeoutError) as error:
            _log.debug("the endpoint does not state its slots: %s", error)
            return None
