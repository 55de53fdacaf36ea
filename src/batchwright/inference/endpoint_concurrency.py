"""The number of concurrent calls to an endpoint elsewhere, and the order of waiting calls."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from batchwright.limiting.turns import Turns
from batchwright.request import Traffic

_SHRINK = 0.5


class AimdLimit:
    """A limit that rises by one for each round of successes and is halved when the endpoint is overloaded.

    Additive increase, multiplicative decrease, as in TCP. Refusals of calls that were under way together are one event:
    a call notes the `round` in which it began, and only refusals of calls of the current round count.
    """

    def __init__(self, most: int) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"max_concurrency={most!r}: must be a whole number, 1 or more")
        self.most = most
        self.round = 0
        self._limit = float(most)

    @property
    def value(self) -> int:
        """Number of calls that may be under way, from 1 to `most`."""
        return int(self._limit)

    def succeeded(self) -> None:
        """Note that a call was answered."""
        self._limit = min(float(self.most), self._limit + 1 / self._limit)

    def overloaded(self, began: int) -> None:
        """Note that a call that began in round `began` was refused because of too many calls."""
        if began == self.round:
            self._limit = max(1.0, self._limit * _SHRINK)
            self.round += 1


@dataclass(slots=True, eq=False)
class _Owner:
    """An owner with calls that are inside or waiting."""

    name: Hashable
    weight: float
    inside: int = 0
    waiting: list[tuple[int, int, asyncio.Future[None]]] = field(default_factory=list)
    """Heap of waiting calls, by priority, then by arrival."""


class Gate:
    """Admits as many calls at once as the limit allows.

    Of the waiting calls, online ones go first; then those of the best priority; then those of the owner with the fewest
    calls inside in proportion to its weight; then in the order of arrival.
    """

    def __init__(self, limit: AimdLimit) -> None:
        self.limit = limit
        self.inside = 0
        self.waiting_online = 0
        """Number of online calls that are waiting."""
        self._came = 0
        self._owners: dict[tuple[Traffic, Hashable], _Owner] = {}
        self._turns: dict[Traffic, Turns[_Owner]] = {"online": Turns(_turn), "batch": Turns(_turn)}

    @asynccontextmanager
    async def enter(
        self, traffic: Traffic, owner: Hashable = None, *, weight: float = 1.0, priority: int = 0
    ) -> AsyncIterator[int]:
        """Wait for admission and hold a place for the duration of the block. Yields the round of the limit."""
        state = self._owners.setdefault((traffic, owner), _Owner(owner, weight))
        state.weight = weight
        await self._let_in(traffic, state, priority)
        try:
            yield self.limit.round
        finally:
            self._leave(traffic, state)

    async def _let_in(self, traffic: Traffic, owner: _Owner, priority: int) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._came += 1
        heapq.heappush(owner.waiting, (priority, self._came, place))
        self._turns[traffic].offer(owner)
        self.waiting_online += traffic == "online"
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                # It was admitted at the moment at which it was cancelled.
                self._leave(traffic, owner)
            else:
                self.waiting_online -= traffic == "online"
                self._settle(traffic, owner)
            raise

    def _leave(self, traffic: Traffic, owner: _Owner) -> None:
        self.inside -= 1
        owner.inside -= 1
        self._settle(traffic, owner)
        self._admit()

    def _settle(self, traffic: Traffic, owner: _Owner) -> None:
        """Update the turn of `owner` after a change, and remove an owner without waiting calls from the turns."""
        while owner.waiting and owner.waiting[0][2].done():
            heapq.heappop(owner.waiting)
        if owner.waiting:
            self._turns[traffic].offer(owner)
            return
        self._turns[traffic].remove(owner)
        # Its name may belong to a successor already, if it was removed before its cancelled call noticed.
        if not owner.inside and self._owners.get((traffic, owner.name)) is owner:
            del self._owners[traffic, owner.name]

    def _admit(self) -> None:
        for traffic, turns in self._turns.items():
            while len(turns) and self.inside < self.limit.value:
                owner = turns.first()
                _, _, place = heapq.heappop(owner.waiting)
                if not place.done():
                    self.waiting_online -= traffic == "online"
                    self.inside += 1
                    owner.inside += 1
                    place.set_result(None)
                self._settle(traffic, owner)


def _turn(owner: _Owner) -> tuple[int, float, int]:
    priority, came, _ = owner.waiting[0]
    return priority, owner.inside / owner.weight, came
