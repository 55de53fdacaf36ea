"""How many calls an endpoint elsewhere is given at once, and who goes first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from batchwright.request import Traffic

_SHRINK = 0.5


class AimdLimit:
    """A limit that rises by one for each round of successes and is halved when the other side is overloaded.

    Additive increase, multiplicative decrease, as in TCP. The refusals of calls that were under way together are one
    event: `round` says in which a call began, and only refusals of the present one count.
    """

    def __init__(self, most: int) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"max_concurrency={most!r}: must be a whole number, 1 or more")
        self.most = most
        self.round = 0
        self._limit = float(most)

    @property
    def value(self) -> int:
        """From 1 to `most`."""
        return int(self._limit)

    def succeeded(self) -> None:
        """A call was answered."""
        self._limit = min(float(self.most), self._limit + 1 / self._limit)

    def overloaded(self, began: int) -> None:
        """A call that began in round `began` was refused because of too many calls."""
        if began == self.round:
            self._limit = max(1.0, self._limit * _SHRINK)
            self.round += 1


class Gate:
    """Lets in as many calls as the limit allows; of those that wait, online ones first, then in order."""

    def __init__(self, limit: AimdLimit) -> None:
        self.limit = limit
        self.inside = 0
        self._waiting: dict[Traffic, deque[asyncio.Future[None]]] = {"online": deque(), "batch": deque()}

    @property
    def waiting_online(self) -> int:
        """Online calls that are not let in yet."""
        return len(self._waiting["online"])

    @asynccontextmanager
    async def enter(self, traffic: Traffic) -> AsyncIterator[int]:
        """Inside for as long as the block lasts; gives the round in which it was let in."""
        await self._let_in(traffic)
        try:
            yield self.limit.round
        finally:
            self.inside -= 1
            self._admit()

    async def _let_in(self, traffic: Traffic) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[traffic].append(place)
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                # Let in at the moment at which it was cancelled.
                self.inside -= 1
            else:
                with suppress(ValueError):  # passed over already
                    self._waiting[traffic].remove(place)
            self._admit()
            raise

    def _admit(self) -> None:
        for queue in (self._waiting["online"], self._waiting["batch"]):
            while queue and self.inside < self.limit.value:
                place = queue.popleft()
                if not place.done():
                    self.inside += 1
                    place.set_result(None)
