"""`Gate`: lets calls to a remote endpoint through, in order, when its `Pacer` allows it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from batchwright.errors import EndpointError, EndpointUnreachable
from batchwright.limiting.turns import Turns
from batchwright.pacing.attempt import Attempt
from batchwright.pacing.figures import PacerFigures
from batchwright.pacing.limits import Use
from batchwright.pacing.pacer import Pacer
from batchwright.request import Traffic
from batchwright.wire.rate_limits import StatedLimit, cause_of_refusal, limits_of_refusal

_REFUSED = 429
_OVERLOADED = frozenset({408, 503, 529})
"""Statuses, besides 429, with which an endpoint says that it is overloaded."""
_LONGEST_PAUSE = 600.0
"""Seconds after which an endpoint is tried again, however long a pause it names."""
_LONGEST_NAMED = 366 * 86400.0
"""Longest pause that is shown, in seconds."""
_MOST_TOKENS = 10**9
_SHOWN = 200
"""Most characters of an endpoint's message that are shown."""
_ROUNDING = 1e-4
"""Seconds by which a timer of the event loop may ring early."""


@dataclass(frozen=True, slots=True)
class EndpointFigures(PacerFigures):
    """What is known of the limits of an endpoint, in its own words if available."""

    reason: str | None = None
    """What it says about the pause for which it wants no request; None if there is none, or it says nothing."""


@dataclass(slots=True)
class Pause:
    """The pause that an endpoint last named in a refusal, however long."""

    until: float = float("-inf")
    reason: str | None = None

    def name(self, error: EndpointError, now: float) -> None:
        """Record the pause that a refusal names."""
        seconds = min(error.retry_after or 0.0, _LONGEST_NAMED)
        if now + seconds >= self.until:
            self.until, self.reason = now + seconds, str((error.body or {}).get("message") or "") or None

    def end(self) -> None:
        """Record that a request was accepted."""
        self.until, self.reason = float("-inf"), None


class Turn:
    """One try that was let in: it reports its outcome to the pacer."""

    def __init__(self, pacer: Pacer, attempt: Attempt, pause: Pause) -> None:
        self._pacer = pacer
        self._attempt = attempt
        self._pause = pause
        self._stated: Sequence[StatedLimit] = ()

    def heard(self, stated: Sequence[StatedLimit]) -> None:
        """Record the limits that the head of an answer states."""
        self._stated = stated

    def answered(self, usage: Mapping[str, int] | None) -> None:
        """Learn from an answer; `usage` has its tokens by `input` and `output`, if known."""
        if not self._attempt.ended:
            self._pause.end()
            used = usage or {}
            self._pacer.succeeded(
                self._attempt,
                _now(),
                input_tokens=used.get("input"),
                output_tokens=used.get("output"),
                stated=self._stated,
            )

    def failed(self, error: EndpointError) -> None:
        """Learn from an error."""
        if self._attempt.ended:
            return
        if isinstance(error, EndpointUnreachable) and not error.sent:
            self.withdraw()
            return
        pause = None if error.retry_after is None else min(error.retry_after, _LONGEST_PAUSE)
        body = error.body or {}
        message = str(body.get("message") or "")
        cause = cause_of_refusal(body.get("code"), message)
        is_refused = error.status == _REFUSED or (error.status in _OVERLOADED and cause == "rise")
        if is_refused and error.may_pass:
            self._pause.name(error, _now())
            named = limits_of_refusal(message)
            error.waits_alone = not self._pacer.refused(
                self._attempt, _now(), retry_after=pause, stated=self._stated, cause=cause, named=named
            )
        elif is_refused:
            self._pacer.rejected(self._attempt, _now())
        elif error.status in _OVERLOADED or (isinstance(error, EndpointUnreachable) and error.timed_out):
            self._pacer.overloaded(self._attempt, _now(), pause)
        else:
            self._pacer.failed(self._attempt)

    def withdraw(self) -> None:
        """Withdraw the try, since nothing was sent."""
        if not self._attempt.ended:
            self._pacer.withdraw(self._attempt, _now())

    def leave(self) -> None:
        """End the try, if nothing was learned from it because its answer was not awaited."""
        if not self._attempt.ended:
            self._pacer.gave_up(self._attempt)


@dataclass(slots=True, eq=False)
class _Owner:
    """An owner with calls that are inside or waiting."""

    name: Hashable
    weight: float
    inside: int = 0
    waiting: list[tuple[int, int, asyncio.Future[Turn], Use]] = field(default_factory=list)
    """Heap of waiting calls, by priority, then by arrival."""


class Places:
    """Places shared by the calls of several gates, which share the connections to one endpoint."""

    def __init__(self, most: float = float("inf")) -> None:
        self._most = most
        self._taken = 0
        self._gates: list[Gate] = []

    @property
    def are_full(self) -> bool:
        """Whether no call may be let in by any gate."""
        return self._taken >= self._most

    def share_with(self, gate: Gate) -> None:
        """Notify a gate when places are free again."""
        self._gates.append(gate)

    def take(self) -> None:
        """Take a place."""
        self._taken += 1

    def free(self, gate: Gate) -> None:
        """Free the place of a call of `gate`, and let in the next call.

        Gates with waiting online calls go first, then those with the fewest calls inside.
        """
        were_full = self.are_full
        self._taken -= 1
        if were_full and len(self._gates) > 1:
            for each in sorted(self._gates, key=lambda each: (not each.waiting_online, each.inside)):
                each.look()
        else:
            gate.look()


class Gate:
    """Lets calls in as its pacer allows.

    Waiting calls are ordered as follows: online calls first; then by priority; then by owner, the one with the fewest
    calls inside in proportion to its weight first; then by arrival.

    `patience`: seconds for which online calls may wait because the endpoint wants no requests; if the wait is longer,
    they are refused as the endpoint would refuse them. `places`: those that it shares with other gates.
    """

    def __init__(self, pacer: Pacer, *, patience: float = float("inf"), places: Places | None = None) -> None:
        self.pacer = pacer
        self._patience = patience
        self._places = places or Places()
        self._places.share_with(self)
        self.inside = 0
        self.waiting_online = 0
        """Number of online calls that are waiting."""
        self._arriving = 0
        """Number of calls that were let in, but whose tasks have not gone on yet."""
        self._pause = Pause()
        self._came = 0
        self._owners: dict[tuple[Traffic, Hashable], _Owner] = {}
        self._turns: dict[Traffic, Turns[_Owner]] = {"online": Turns(_turn), "batch": Turns(_turn)}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def enter(
        self, use: Use, traffic: Traffic, owner: Hashable = None, *, weight: float = 1.0, priority: int = 0
    ) -> AsyncIterator[Turn]:
        """Wait until a call that is expected to use `use` is admitted, and hold its place for the block."""
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
        """Upper bound of the number of waiting calls."""
        return sum(len(owner.waiting) for owner in self._owners.values())

    def figures(self, now: float, unsent: int = 0) -> EndpointFigures:
        """Return what the pacer has learned, and for how long the next call has to wait for a limit.

        That is the time that the endpoint names, though it is tried again before a long one is over. `unsent`: calls
        that were let in but wait for something else.
        """
        turns = next((turns for turns in self._turns.values() if len(turns)), None)
        use = None if turns is None else turns.first().waiting[0][3]
        found = self.pacer.figures_with(self.waiting, use, now)
        figures = EndpointFigures(*(getattr(found, each.name) for each in fields(PacerFigures)))
        unsent += self._arriving
        figures = replace(figures, sent=max(0, found.sent - unsent), under_way=max(0, found.under_way - unsent))
        left = self._pause.until - now
        if found.blocked_seconds <= 0.0 or left <= 0.0:
            return figures
        figures = replace(figures, blocked_seconds=max(left, found.blocked_seconds), reason=self._pause.reason)
        if use is None or figures.blocked_seconds < found.next_in:
            return figures
        return replace(figures, next_in=figures.blocked_seconds, waits_for=None)

    def refuse_waiting(self, error: Exception) -> None:
        """Raise `error` in all waiting batch calls."""
        self._refuse("batch", error)
        self.look()

    def close(self, error: Exception) -> None:
        """Raise `error` in all waiting calls, and cancel the timer."""
        self._refuse("online", error)
        self._refuse("batch", error)
        self._set_timer(None)

    def _refuse(self, traffic: Traffic, error: Exception) -> None:
        for (kind, _), owner in [*self._owners.items()]:
            if kind == traffic:
                for _, _, place, _ in owner.waiting:
                    if not place.done():
                        place.set_exception(error)
                        self.waiting_online -= traffic == "online"
                self._settle(traffic, owner)

    async def _let_in(self, use: Use, traffic: Traffic, owner: _Owner, priority: int) -> Turn:
        place: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._came += 1
        heapq.heappush(owner.waiting, (priority, self._came, place, use))
        self._turns[traffic].offer(owner)
        self.waiting_online += traffic == "online"
        self.look()
        try:
            turn = await place
        except asyncio.CancelledError:
            if place.cancelled() or not place.done():
                self.waiting_online -= traffic == "online"
                self._settle(traffic, owner)
                self.look()  # the next one may need less
            elif place.exception() is None:
                # It was admitted at the moment when it was cancelled.
                self._arriving -= 1
                place.result().withdraw()
                self._leave(traffic, owner)
            raise
        self._arriving -= 1
        return turn

    def _leave(self, traffic: Traffic, owner: _Owner) -> None:
        self.inside -= 1
        owner.inside -= 1
        self._settle(traffic, owner)
        self._places.free(self)

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

    def look(self) -> None:
        """Let in the next calls that may go now, and check again when the pacer says so."""
        now, wait = _now(), None
        if self.waiting_online and (blocked := self.pacer.blocked(now)) > self._patience:
            message = f"the endpoint takes no requests for another {blocked:,.0f} s, as it has said"
            self._refuse("online", EndpointError(message, status=_REFUSED, retry_after=blocked))
        for traffic, turns in self._turns.items():
            while len(turns) and wait is None:
                owner = turns.first()
                _, _, place, use = owner.waiting[0]
                if not place.done():
                    is_urgent = traffic == "online"
                    seconds = float("inf") if self._places.are_full else self.pacer.wait(use, now, is_urgent=is_urgent)
                    if seconds > _ROUNDING:
                        wait = seconds
                        break
                    self.waiting_online -= is_urgent
                    self._places.take()
                    self.inside += 1
                    owner.inside += 1
                    self._arriving += 1
                    place.set_result(Turn(self.pacer, self.pacer.begin(use, now), self._pause))
                heapq.heappop(owner.waiting)
                self._settle(traffic, owner)
        self._set_timer(wait)

    def _set_timer(self, wait: float | None) -> None:
        """Check again in `wait` seconds; if None or infinite, only when a call comes or leaves."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if wait is not None and wait != float("inf"):
            self._timer = asyncio.get_running_loop().call_later(wait, self.look)


def words_of_pause(pacing: Iterable[PacerFigures]) -> str:
    """Return what endpoints say about the longest pause for which they want no request, as the end of a sentence."""
    paused = [each for each in pacing if isinstance(each, EndpointFigures) and each.reason and each.waits_for is None]
    if not paused:
        return ""
    longest = max(paused, key=lambda each: each.blocked_seconds)
    again = f"; tried again every {_LONGEST_PAUSE / 60:.0f} min" if longest.blocked_seconds > _LONGEST_PAUSE else ""
    return f" ({' '.join((longest.reason or '').split())[:_SHOWN]!r}){again}"


def usage_of(answer: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the tokens of the prompt and of the answer, by `input` and `output`; None if there is no usage."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    # If answers are scores, `total_tokens` may be all that is stated.
    first = _number(usage.get("prompt_tokens", usage.get("input_tokens", usage.get("total_tokens"))))
    second = _number(usage.get("completion_tokens", usage.get("output_tokens", 0)))
    if first is None or second is None:
        return None
    return {"input": first, "output": second}


def _number(value: object) -> int | None:
    """Return a number of tokens; None if `value` cannot be one."""
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _turn(owner: _Owner) -> tuple[int, float, int]:
    priority, came, _, _ = owner.waiting[0]
    return priority, owner.inside / owner.weight, came
