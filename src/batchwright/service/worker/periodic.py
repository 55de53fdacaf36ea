"""A loop that repeats a step: at once while there is work, otherwise when woken or after a pause."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from batchwright.backoff import Backoff
from batchwright.errors import LeaseLost, StoreUnavailable

_log = logging.getLogger(__name__)
BACKOFF = Backoff(first=0.1, longest=5.0)
"""Backoff of failed steps; short, because everything in the process depends on them."""


class PeriodicTask:
    """Loop of a worker. It continues whatever its step raises, except cancellation."""

    def __init__(self, name: str, step: Callable[[], Awaitable[bool]], pause: Callable[[], float | None]) -> None:
        """`step` returns whether to repeat it at once; else `pause` gives the seconds to wait (None: until woken)."""
        self._name = name
        self._step = step
        self._pause = pause
        self._woken = asyncio.Event()
        self._failures = 0
        self.idle = False
        """Whether the last step found nothing to do, and the loop was not woken since."""

    def wake(self) -> None:
        """Run the step soon, because there is something to do."""
        self.idle = False
        self._woken.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                busy = await self._step()
                self._failures = 0
                # The step may have missed what it was woken for while it ran.
                self.idle = not busy and not self._woken.is_set()
            except LeaseLost:
                busy = True
            except Exception as error:
                busy = True
                self._failures += 1
                delay = BACKOFF.pause(self._failures)
                unexpected = not isinstance(error, StoreUnavailable)
                _log.warning("%s: %s; trying again in %.1f s", self._name, error, delay, exc_info=unexpected)
                await asyncio.sleep(delay)
            if not busy:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause()):
                        await self._woken.wait()
            self._woken.clear()
