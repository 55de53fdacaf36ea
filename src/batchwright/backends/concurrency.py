"""How many calls an endpoint elsewhere is given at once, and who goes first."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

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
    """Lets in as many calls as the limit allows.

    Of those that wait, online ones go first; then those of the owner with the fewest calls inside; then as they came.
    """

    def __init__(self, limit: AimdLimit) -> None:
        self.limit = limit
        self.inside = 0
        self.waiting_online = 0
        """Online calls that are not let in yet."""
        self._inside_of: Counter[Hashable] = Counter()
        self._waiting: dict[Traffic, dict[Hashable, deque[asyncio.Future[None]]]] = {"online": {}, "batch": {}}

    @asynccontextmanager
    async def enter(self, traffic: Traffic, owner: Hashable = None) -> AsyncIterator[int]:
        """Inside for as long as the block lasts; gives the round in which it was let in."""
        await self._let_in(traffic, owner)
        try:
            yield self.limit.round
        finally:
            self._leave(owner)

    async def _let_in(self, traffic: Traffic, owner: Hashable) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[traffic].setdefault(owner, deque()).append(place)
        self.waiting_online += traffic == "online"
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                # Let in at the moment at which it was cancelled.
                self._leave(owner)
            else:
                self._forget(traffic, owner, place)
            raise

    def _leave(self, owner: Hashable) -> None:
        self.inside -= 1
        self._inside_of[owner] -= 1
        if not self._inside_of[owner]:
            del self._inside_of[owner]
        self._admit()

    def _forget(self, traffic: Traffic, owner: Hashable, place: asyncio.Future[None]) -> None:
        owners = self._waiting[traffic]
        if place not in owners.get(owner, ()):
            return  # passed over already
        owners[owner].remove(place)
        self.waiting_online -= traffic == "online"
        if not owners[owner]:
            del owners[owner]

    def _admit(self) -> None:
        for traffic, owners in self._waiting.items():
            while owners and self.inside < self.limit.value:
                # Of equal ones the first in the dictionary, which is the one that has waited longest.
                owner = min(owners, key=self._inside_of.__getitem__)
                queue = owners.pop(owner)
                place = queue.popleft()
                if queue:
                    owners[owner] = queue
                self.waiting_online -= traffic == "online"
                if not place.done():
                    self.inside += 1
                    self._inside_of[owner] += 1
                    place.set_result(None)
