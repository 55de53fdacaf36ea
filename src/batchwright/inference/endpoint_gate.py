"""`Gate`: lets calls to an endpoint elsewhere go, in order, when its `Pacer` allows it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from batchwright.errors import EndpointError, EndpointUnreachable
from batchwright.limiting.turns import Turns
from batchwright.pacing.limits import Use
from batchwright.pacing.pacer import Attempt, Pacer
from batchwright.request import Traffic
from batchwright.wire.rate_limits import StatedLimit, limits_of_refusal

_REFUSED = 429
_OVERLOADED = frozenset({408, 503, 529})
"""Statuses, besides 429, with which an endpoint says that it has too much to do."""
_LONGEST_PAUSE = 600.0
"""Seconds after which an endpoint is asked again, however long a pause it names."""
_MOST_TOKENS = 10**9
_ROUNDING = 1e-4
"""Seconds by which a timer of the event loop may ring early."""


class Turn:
    """One try that was let in: what is learned from its outcome goes to the pacer."""

    def __init__(self, pacer: Pacer, attempt: Attempt) -> None:
        self._pacer = pacer
        self._attempt = attempt
        self._stated: Sequence[StatedLimit] = ()

    def heard(self, stated: Sequence[StatedLimit]) -> None:
        """Note the limits that the head of an answer states."""
        self._stated = stated

    def answered(self, usage: Mapping[str, int] | None) -> None:
        """Learn from an answer; `usage` are its tokens by `input` and `output`, where it has any."""
        if not self._attempt.ended:
            told = usage or {}
            self._pacer.succeeded(
                self._attempt,
                _now(),
                input_tokens=told.get("input"),
                output_tokens=told.get("output"),
                stated=self._stated,
            )

    def failed(self, error: EndpointError) -> None:
        """Learn from an error."""
        if self._attempt.ended:
            return
        pause = None if error.retry_after is None else min(error.retry_after, _LONGEST_PAUSE)
        if error.status == _REFUSED:
            stated = self._stated or limits_of_refusal(str((error.body or {}).get("message") or ""))
            self._pacer.refused(self._attempt, _now(), retry_after=pause, stated=stated)
        elif error.status in _OVERLOADED or (isinstance(error, EndpointUnreachable) and error.timed_out):
            self._pacer.overloaded(self._attempt, _now(), pause)
        else:
            self._pacer.failed(self._attempt, _now())

    def leave(self) -> None:
        """End the try, if nothing was learned from it."""
        if not self._attempt.ended:
            self._pacer.failed(self._attempt, _now())


@dataclass(slots=True, eq=False)
class _Owner:
    """An owner with calls that are inside or waiting."""

    name: Hashable
    weight: float
    inside: int = 0
    waiting: list[tuple[int, int, asyncio.Future[Turn], Use]] = field(default_factory=list)
    """Heap of waiting calls, by priority, then by arrival."""


class Gate:
    """Lets calls in as its pacer allows.

    Of the waiting calls, online ones go first; then those of the best priority; then those of the owner with the fewest
    calls inside in proportion to its weight; then in the order of arrival.
    """

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.inside = 0
        self.waiting_online = 0
        """Number of online calls that are waiting."""
        self._came = 0
        self._owners: dict[tuple[Traffic, Hashable], _Owner] = {}
        self._turns: dict[Traffic, Turns[_Owner]] = {"online": Turns(_turn), "batch": Turns(_turn)}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def enter(
        self, use: Use, traffic: Traffic, owner: Hashable = None, *, weight: float = 1.0, priority: int = 0
    ) -> AsyncIterator[Turn]:
        """Wait for admission of a call that is expected to use `use`, and hold its place for the block."""
        state = self._owners.setdefault((traffic, owner), _Owner(owner, weight))
        state.weight = weight
        turn = await self._let_in(use, traffic, state, priority)
        try:
            yield turn
        finally:
            turn.leave()
            self._leave(traffic, state)

    @property
    def waiting(self) -> int:
        """Number of calls that wait, at most."""
        return sum(len(owner.waiting) for owner in self._owners.values())

    def refuse_waiting(self, error: Exception) -> None:
        """Raise `error` in all batch calls that wait."""
        for (traffic, _), owner in [*self._owners.items()]:
            if traffic == "batch":
                for _, _, place, _ in owner.waiting:
                    if not place.done():
                        place.set_exception(error)
                self._settle(traffic, owner)
        self._admit()

    def close(self) -> None:
        """Keep no timer."""
        self._set_timer(None)

    async def _let_in(self, use: Use, traffic: Traffic, owner: _Owner, priority: int) -> Turn:
        place: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._came += 1
        heapq.heappush(owner.waiting, (priority, self._came, place, use))
        self._turns[traffic].offer(owner)
        self.waiting_online += traffic == "online"
        self._admit()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                # It was admitted at the moment at which it was cancelled.
                place.result().leave()
                self._leave(traffic, owner)
            else:
                self.waiting_online -= traffic == "online"
                self._settle(traffic, owner)
                self._admit()  # the next one may need less
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
        """Let in the next calls that may go now, and look again when the pacer says so."""
        now, wait = _now(), None
        for traffic, turns in self._turns.items():
            while len(turns) and wait is None:
                owner = turns.first()
                _, _, place, use = owner.waiting[0]
                if not place.done():
                    seconds = self.pacer.wait(use, now, is_urgent=traffic == "online")
                    if seconds > _ROUNDING:
                        wait = seconds
                        break
                    self.waiting_online -= traffic == "online"
                    self.inside += 1
                    owner.inside += 1
                    place.set_result(Turn(self.pacer, self.pacer.begin(use, now)))
                heapq.heappop(owner.waiting)
                self._settle(traffic, owner)
        self._set_timer(wait)

    def _set_timer(self, wait: float | None) -> None:
        """Look again in `wait` seconds; without any, or with infinitely many, only when a call comes or leaves."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if wait is not None and wait != float("inf"):
            self._timer = asyncio.get_running_loop().call_later(wait, self._admit)


def usage_of(answer: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the tokens of the prompt and of the answer, by `input` and `output`; None where there is no usage."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    first = _number(usage.get("prompt_tokens", usage.get("input_tokens")))
    second = _number(usage.get("completion_tokens", usage.get("output_tokens", 0)))
    if first is None or second is None:
        return None
    return {"input": first, "output": second}


def _number(value: object) -> int | None:
    """Return a number of tokens; None where `value` cannot be one."""
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _turn(owner: _Owner) -> tuple[int, float, int]:
    priority, came, _, _ = owner.waiting[0]
    return priority, owner.inside / owner.weight, came
