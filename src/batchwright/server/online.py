"""The door for online requests: how many are let in at once, and none once the service is stopping."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from batchwright.backends.inference import Call
from batchwright.clock import Clock
from batchwright.errors import Overloaded
from batchwright.server.errors import shutting_down
from batchwright.server.observability.measured import MeasuredInference
from batchwright.server.streams import closing

_RATE_SECONDS = 60.0


class OnlineDoor:
    """Lets at most `limit` requests be computed or wait to be; refuses more instead of letting all of them be late."""

    def __init__(self, inference: MeasuredInference, limit: int, clock: Clock) -> None:
        self.closed = False
        """Set when the service stops: who is inside gets an answer, who comes is sent away."""
        self.inside = 0
        self._inference = inference
        self._limit = limit
        self._clock = clock
        self._left = 0.0
        """Requests that left, and in how many seconds; older ones fade out over `_RATE_SECONDS`."""
        self._seconds = 0.0
        self._last = clock.now()

    async def answer(self, call: Call) -> dict[str, Any]:
        """As `Inference.answer`. Raises `Overloaded`, and `HttpError` (503) when the service is stopping."""
        with self.entered():
            return await self._inference.answer(call)

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """As `Inference.stream`; raises as `answer`."""
        with self.entered():
            async with closing(self._inference.stream(call)) as bodies:
                async for body in bodies:
                    yield body

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside for as long as the block lasts. Raises as `answer`."""
        if self.closed:
            raise shutting_down()
        if self.inside >= self._limit:
            raise Overloaded(
                f"{self.inside} requests are waiting or running, which is the most: try again later",
                retry_after=self._seconds_for(self.inside),
            )
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self._fade()
            self._left += 1.0

    def _seconds_for(self, requests: int) -> float | None:
        """How long so many took of late; None while nothing is known."""
        self._fade()
        if self._left < 1.0:
            return None
        return requests * self._seconds / self._left

    def _fade(self) -> None:
        now = self._clock.now()
        elapsed, self._last = now - self._last, now
        keep = math.exp(-elapsed / _RATE_SECONDS)
        self._left *= keep
        self._seconds = self._seconds * keep + elapsed
