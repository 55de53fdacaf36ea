"""`ReplicatedInference`: several replicas of a model that share the calls, each of which may die."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import Crashed, DeadlineExceeded, EngineClosed, InvalidRequest
from batchwright.inference.calls import InFlight, closing, time_left
from batchwright.inference.inference import Call, Route, WorkUnderWay
from batchwright.inference.replicas.messages import merged_work
from batchwright.inference.replicas.replica import Replica, ReplicaDied, ReplicaFacts
from batchwright.limiting.estimates import (
    completions_of_request,
    prompt_tokens_of_request,
    sequences_of_request,
)
from batchwright.policies.suspects import MAX_CRASHES
from batchwright.request import SamplingParams
from batchwright.routing.prefixes import prefix_keys
from batchwright.routing.restarts import Restarts
from batchwright.routing.router import Capacity, Router
from batchwright.routing.work import Work
from batchwright.wire.fields import deadline_seconds, priority_or_default, stated_limit
from batchwright.wire.identity import cacheable_prompt
from batchwright.wire.requests import ENCODER_URLS

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

_log = logging.getLogger(__name__)
_WANTED = 2
"""Lines to hold per place, so that no place is empty while the next lines are fetched."""
_TICK = 1.0
"""Seconds between checks of measurements and of waiting lines."""
_MOST_NODES = 10
"""Machines that may be lost while computing a call before the call is suspected."""
_LEAST_MEASURED = 1000
"""Fewest tokens of prompts, and of answers, for a measurement of their seconds."""


@dataclass(slots=True, eq=False)
class _Member:
    """One replica, and its past."""

    number: int
    replica: Replica
    facts: ReplicaFacts | None = None
    """None until it was up for the first time."""
    restarts: Restarts = field(default_factory=Restarts)
    is_up: bool = False
    status: str = ""
    """Its last report about its start, or the reason why it could not be started."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A call that has not ended."""

    call: Call
    until: float | None
    """Event loop time after which its answer is useless."""
    sequences: int
    place: asyncio.Future[_Member]
    """The replica that computes it, once that is decided; another one after that replica died."""
    has_reached: bool = False
    """Whether that replica was up when it was given the call, which may have caused its death."""
    has_begun: bool = False
    """Whether a part of its answer was passed on."""
    nodes_lost: int = 0
    """Number of machines that were lost while they computed it."""


class ReplicatedInference(Route):
    """Gives each call to one of `replicas`, chosen by `Router`; calls of a replica that died are given to others.

    A replica that dies is restarted after a pause, which grows each time until it answers something. Created by
    `opened` or `opened_by_first`.
    """

    def __init__(
        self,
        members: Sequence[_Member],
        most_deaths: int,
        clock: Clock,
        progress: Callable[[str], None] = lambda text: None,
        closed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._closed = closed
        self._members = list(members)
        self._router = Router[int](most_deaths=most_deaths)
        self._most_deaths = most_deaths
        self._clock = clock
        self._entries: dict[int, _Entry] = {}
        self._keys = count()
        self._held = InFlight()
        self._gone: list[EngineStats] = []
        """Statistics of processes that have ended, merged into one."""
        self._why_down = "none was started"
        self._is_closed = False
        self._progress = progress
        self._first_up: asyncio.Future[ReplicaFacts] = asyncio.get_running_loop().create_future()
        self._first_deaths = 0
        """Deaths of replicas before any was up."""
        for member in self._members:
            if member.facts is not None:
                self._join(member, member.facts)
        tasks = [self._tick(), *(self._keep_up(member) for member in self._members)]
        self._tasks = [asyncio.create_task(task) for task in tasks]

    @classmethod
    async def opened(
        cls,
        replicas: Sequence[Replica],
        progress: Callable[[str], None] = lambda text: None,
        *,
        most_deaths: int = MAX_CRASHES,
        clock: Clock | None = None,
        closed: Callable[[], Awaitable[None]] | None = None,
    ) -> ReplicatedInference:
        """Start `replicas` and return an inference that uses and closes them.

        `most_deaths`: a call fails after this many deaths of replicas that were computing it. `closed` is called when
        all are closed. Raises what loading the model raises, and `EngineClosed` if a replica dies while loading.
        """
        try:
            # The first replica compiles and converts what is not in the cache yet.
            facts = [await replicas[0].start(progress)]
            progress(f"starting {len(replicas)} replicas")
            facts += await asyncio.gather(*(each.start(lambda text: None) for each in replicas[1:]))
        except BaseException as error:
            await asyncio.gather(*(each.close() for each in replicas))
            if closed is not None:
                await closed()
            if isinstance(error, ReplicaDied):
                raise EngineClosed(f"a replica died while it loaded the model: {error}") from None
            raise
        members = [_Member(number, each, fact) for number, (each, fact) in enumerate(zip(replicas, facts, strict=True))]
        return cls(members, most_deaths, clock or MonotonicClock(), closed=closed)

    @classmethod
    async def opened_by_first(
        cls,
        replicas: Sequence[Replica],
        progress: Callable[[str], None] = lambda text: None,
        *,
        most_deaths: int = MAX_CRASHES,
        clock: Clock | None = None,
        closed: Callable[[], Awaitable[None]] | None = None,
    ) -> ReplicatedInference:
        """Start `replicas` and return an inference as soon as one is up; the others join when they are up.

        For replicas that may have to wait for a machine. `closed` is called when all are closed. Raises what loading
        the model raises, and `EngineClosed` if `most_deaths` replicas die while loading before one is up.
        """
        members = [_Member(number, each) for number, each in enumerate(replicas)]
        inference = cls(members, most_deaths, clock or MonotonicClock(), progress, closed)
        try:
            await inference._first_up
        except BaseException:
            await inference.close()
            raise
        return inference

    @property
    def models(self) -> Sequence[str]:
        return self._facts.models

    @property
    def endpoints(self) -> Collection[str]:
        return self._facts.endpoints

    @property
    def _facts(self) -> ReplicaFacts:
        return self._first_up.result()

    @property
    def room(self) -> int:
        # As with an engine in this process, online requests leave batches at least one line per place.
        places = sum(member.facts.places for member in self._members if member.is_up and member.facts is not None)
        return max(_WANTED * places - self._held.total(), places - self._held["batch"])

    @property
    def why_not_ready(self) -> str | None:
        """Reason why no replica can compute a call now; None if one can."""
        return None if any(member.is_up for member in self._members) else f"no replica is up: {self._why_down}"

    @property
    def standing(self) -> str | None:
        """Why some replicas do not compute; None if all do."""
        down = [member for member in self._members if not member.is_up]
        reasons = "; ".join(sorted({member.status for member in down if member.status})) or "being started"
        return f"{len(down)} of {len(self._members)} replicas are not up: {reasons}" if down else None

    @property
    def engine_stats(self) -> EngineStats | None:
        """Statistics of all engines since the first start, including those of processes that have ended."""
        reported = [stats for member in self._members if member.is_up and (stats := member.replica.stats)]
        if not reported and not self._gone:
            return None
        from batchwright.engine.engine_stats import EngineStats

        return EngineStats.merged(reported, self._gone)

    async def answer(self, call: Call) -> dict[str, Any]:
        key, entry = self._enter(call)
        try:
            while True:
                member, place = await self._placed(entry), entry.place
                try:
                    entry.has_reached = member.replica.is_up
                    body = await member.replica.answer(self._with_time_left(entry))
                except ReplicaDied:
                    await self._displaced(entry, place, member)
                    continue
                self._finish(key, member, body.get("usage"))
                return body
        finally:
            self._leave(key)

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        key, entry = self._enter(call)
        usage: Any = None
        try:
            while True:
                member, place = await self._placed(entry), entry.place
                try:
                    entry.has_reached = member.replica.is_up
                    async with closing(member.replica.stream(self._with_time_left(entry))) as bodies:
                        async for body in bodies:
                            entry.has_begun = True
                            usage = body.get("usage") or usage
                            yield body
                except ReplicaDied:
                    if not entry.has_begun:
                        await self._displaced(entry, place, member)
                        continue
                    # Its reader may be slow: the replica may be up again by now.
                    self._require_open()
                    raise EngineClosed(
                        "the replica that computed this request died after a part of the answer was sent: ask again"
                    ) from None
                self._finish(key, member, usage)
                return
        finally:
            self._leave(key)

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        found = []
        for member in [member for member in self._members if member.is_up]:
            with suppress(ReplicaDied):
                if (work := await member.replica.work_of(prefix)) is not None:
                    found.append(work)
        return merged_work(found)

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for entry in self._entries.values():
            _fail(entry, EngineClosed("the replicas were closed before the request was finished"))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.replica.close() for member in self._members))
        if self._closed is not None:
            await self._closed()

    def _enter(self, call: Call) -> tuple[int, _Entry]:
        if self._is_closed:
            raise EngineClosed("the replicas are closed")
        try:
            deadline = deadline_seconds(call.body)
        except InvalidRequest:
            deadline = None  # the replica says what is wrong with it
        left, loop = time_left(call, deadline), asyncio.get_running_loop()
        key, work = next(self._keys), self._work_of(call)
        entry = _Entry(call, None if left is None else loop.time() + left, work.sequences, loop.create_future())
        self._entries[key] = entry
        self._router.submit(key, work)
        self._held[call.traffic] += work.sequences
        self._assign()
        return key, entry

    def _work_of(self, call: Call) -> Work:
        defaults, longest = call.defaults, self._facts.longest
        if isinstance(defaults, SamplingParams):
            limit, completions = defaults.max_tokens, defaults.n
        else:
            given = defaults or {}
            limit, completions = given.get("max_tokens") or longest, given.get("n") or 1
        stated = stated_limit(call.body)
        limit = limit if stated is None else max(1, stated)
        sequences = sequences_of_request(call.endpoint, call.body)
        if completions_of_request(call.endpoint, call.body) == 1 and call.body.get("n") is None:
            sequences *= completions
        is_encoded = call.endpoint in ENCODER_URLS
        return Work(
            prompt_tokens=prompt_tokens_of_request(call.endpoint, call.body),
            limit=0 if is_encoded else min(limit, longest),
            sequences=1 if is_encoded else sequences,
            prefixes=prefix_keys(*cacheable_prompt(call.endpoint, call.body)),
            traffic=call.traffic,
            priority=priority_or_default(call.body),
        )

    async def _placed(self, entry: _Entry) -> _Member:
        """Wait until a replica has a place for the call, and return the replica."""
        try:
            async with asyncio.timeout_at(entry.until):
                while True:
                    place = entry.place
                    member = await asyncio.shield(place)
                    if place is entry.place:  # otherwise that replica has died since
                        return member
        except TimeoutError:
            raise DeadlineExceeded("the time for this request was over before a replica had a place for it") from None

    async def _displaced(self, entry: _Entry, place: asyncio.Future[_Member], member: _Member) -> None:
        """Wait until the call has lost its place at a replica that died, which is when it is known why it died.

        Raises `DeadlineExceeded` if the call has no time for that.
        """
        if entry.place is place:
            try:
                async with asyncio.timeout_at(entry.until):
                    death = await member.replica.ended()
            except TimeoutError:
                raise DeadlineExceeded("the time for this request was over while its replica was ending") from None
            self._lose(member, death)
        self._require_open()

    def _with_time_left(self, entry: _Entry) -> Call:
        if entry.until is None:
            return entry.call
        return replace(entry.call, timeout=entry.until - asyncio.get_running_loop().time())

    def _require_open(self) -> None:
        """Raise `EngineClosed` once these are closed: a call whose replica has ended finds no other one."""
        if self._is_closed:
            raise EngineClosed("the replicas were closed before the request was finished")

    def _finish(self, key: int, member: _Member, usage: Any) -> None:
        member.restarts.answered()
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        # Its replica may have died after it had sent all of the answer.
        with suppress(KeyError, ValueError):
            self._router.finish(key, tokens if isinstance(tokens, int) else None)

    def _leave(self, key: int) -> None:
        entry = self._entries.pop(key)
        self._held[entry.call.traffic] -= entry.sequences
        self._router.withdraw(key)
        if not entry.place.done():
            entry.place.cancel()
        self._assign()

    def _assign(self) -> None:
        if self._is_closed:
            return
        for key, number in self._router.assign(self._clock.now()):
            self._entries[key].place.set_result(self._members[number])

    def _join(self, member: _Member, facts: ReplicaFacts) -> None:
        member.facts, member.is_up, member.status = facts, True, ""
        self._router.join(member.number, Capacity(facts.places, facts.kv_tokens))
        if not self._first_up.done():
            self._first_up.set_result(facts)

    def _lose(self, member: _Member, death: ReplicaDied) -> None:
        """Take out a replica that died, unless that was done already. Its calls are given to others, or fail."""
        if not member.is_up or self._is_closed:
            return
        reason = str(death)
        member.is_up, member.status, self._why_down = False, reason, reason
        lost = [
            (key, entry)
            for key, entry in self._entries.items()
            if entry.place.done() and not entry.place.exception() and entry.place.result() is member
        ]
        for key, entry in lost:
            if entry.has_begun:
                self._router.withdraw(key)
                continue
            # The loss of a machine is no one's fault, unless it happens to one call again and again.
            is_innocent = death.by_node and entry.nodes_lost < _MOST_NODES
            entry.nodes_lost += death.by_node
            if is_innocent or not entry.has_reached:
                self._router.recall(key)
            entry.has_reached, entry.place = False, asyncio.get_running_loop().create_future()
        failed = self._router.leave(member.number, self._clock.now())
        for key in failed:
            message = f"{self._most_deaths} replicas died while they computed this request; the last one: {reason}"
            _fail(self._entries[key], Crashed(message))
        moved = len(lost) - len(failed)
        _log.warning("replica %d died: %s; %d requests go to others", member.number + 1, reason, moved)
        self._assign()

    async def _keep_up(self, member: _Member) -> None:
        """Start a replica whenever it is not up."""
        while True:
            if member.is_up:
                death = await member.replica.ended()
                self._lose(member, death)
                self._why_down = str(death)
                await self._pause(member)
            try:
                facts = await member.replica.start(partial(self._report, member))
            except Exception as error:  # whatever it is: nobody else would start the replica again
                self._why_down = member.status = str(error)
                if not self._ends_opening(error):
                    _log.warning("replica %d cannot be started: %s", member.number + 1, error)
                await self._pause(member)
                continue
            self._join(member, facts)
            _log.info("replica %d is up", member.number + 1)
            self._assign()

    async def _pause(self, member: _Member) -> None:
        self._keep_figures(member)
        due = member.restarts.died(self._clock.now(), random.random())
        await asyncio.sleep(due - self._clock.now())

    def _report(self, member: _Member, text: str) -> None:
        member.status = text
        if not self._first_up.done():
            self._progress(text)

    def _ends_opening(self, error: Exception) -> bool:
        """Return whether no replica will ever be up: after an error of loading, or too many deaths."""
        if self._first_up.done():
            return False
        if isinstance(error, ReplicaDied):
            self._first_deaths += not error.by_node
            if self._first_deaths < self._most_deaths:
                return False
            message = f"{self._first_deaths} replicas died while they loaded the model; the last one: {error}"
            error = EngineClosed(message)
        self._first_up.set_exception(error)
        return True

    def _keep_figures(self, member: _Member) -> None:
        if (stats := member.replica.stats) is not None:
            from batchwright.engine.engine_stats import EngineStats

            self._gone = [EngineStats.merged([], [*self._gone, stats])]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            for member in self._members:
                stats = member.replica.stats
                if stats is None or not member.is_up:
                    continue
                decoded = stats.decode_tokens + stats.accepted_tokens
                if min(stats.prefill_tokens, decoded) >= _LEAST_MEASURED:
                    prefill, decode = stats.prefill_seconds / stats.prefill_tokens, stats.decode_seconds / decoded
                    if prefill > 0 and decode > 0:
                        self._router.learn(member.number, prefill, decode)
            self._assign()


def _fail(entry: _Entry, error: Exception) -> None:
    if entry.place.done():
        return
    entry.place.set_exception(error)
    entry.place.exception()  # perhaps no one waits for it any more
