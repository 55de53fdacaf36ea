"""A step done again and again: at once while there is work, otherwise when woken or after a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from batchwright.backoff import Backoff
from batchwright.errors import LeaseLost, StoreUnavailable

_log = logging.getLogger(__name__)
BACKOFF = Backoff(first=0.1, longest=5.0)
"""Backoff of a step that everything here depends on."""


class PeriodicTask:
    """One of the loops of a worker. It outlives whatever its step raises, except cancellation."""

    def __init__(self, name: str, step: Callable[[], Awaitable[bool]], pause: Callable[[], float | None]) -> None:
        """`step` returns whether there may be more to do at once; `pause` for how many seconds to wait otherwise (None:
        until woken).
        """
        self._name = name
        self._step = step
        self._pause = pause
        self._woken = asyncio.Event()
        self._failures = 0
        self.idle = False
        """Whether the last step found nothing to do, and nothing woke the loop since."""

    def wake(self) -> None:
        """Note that there is something to do."""
        self.idle = False
        self._woken.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                busy = await self._step()
                self._failures = 0
                # A wake during the step may have come after the step had looked.
                self.idle = not busy and not self._woken.is_set()
            except LeaseLost:
                busy = True
            except StoreUnavailable as error:
                busy = await self._fail(error)
            except Exception as error:
                busy = await self._fail(error, exc_info=True)
            if not busy:
                await self._rest(self._pause())
            self._woken.clear()

    async def _fail(self, error: Exception, *, exc_info: bool = False) -> bool:
        self._failures += 1
        delay = BACKOFF.pause(self._failures)
        _log.warning("%s: %s; trying again in %.1f s", self._name, error, delay, exc_info=exc_info)
        await asyncio.sleep(delay)
        return True

    async def _rest(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
