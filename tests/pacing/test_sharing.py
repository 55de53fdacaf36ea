"""Processes that tell each other once a second what they use keep limits together: with providers, in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from benchmarks.provider.amounts import Quantity
from benchmarks.provider.limits import Concurrency, Limits, TokenBucket
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.pacing.limits import ToldLimit, told_limits
from batchwright.pacing.pacer import Pacer
from batchwright.pacing.sharing import fair_part

from .simulation import Client, Clock, Measured, Says, simulate, works

REQUESTS = Quantity.REQUESTS
MANY = 1000
"""Requests that wait where there is no end of them."""
FAIR = 0.95
"""Least of Jain's index."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process, and when it has something to send."""

    starts: float = 0.0
    ends: float = math.inf
    wanted: float = math.inf
    """Requests a second."""


@dataclass(slots=True)
class Together:
    """What came of several processes."""

    each: list[Measured]
    told: Sequence[ToldLimit] = field(default_factory=tuple)

    def admitted(self, member: int, start: float, end: float) -> int:
        return sum(start <= at < end for at, _ in self.each[member].admitted)

    def shares(self, start: float, end: float) -> list[int]:
        return [self.admitted(member, start, end) for member in range(len(self.each))]

    def most_in(self, window: float) -> int:
        times = sorted(at for measured in self.each for at, _ in measured.admitted)
        first, most = 0, 0
        for last, at in enumerate(times):
            while times[first] <= at - window:
                first += 1
            most = max(most, last - first + 1)
        return most

    @property
    def refused_per_thousand(self) -> float:
        return 1000.0 * sum(each.refused for each in self.each) / max(1, sum(each.sent for each in self.each))


def together(
    limits: Limits, members: Sequence[Member], *, seconds: float, told: Sequence[ToldLimit] = (), seed: int = 0
) -> Together:
    """Let processes send to one provider, that exchange what they publish about once a second."""
    clock, draw = Clock(), random.Random(seed)
    clients: dict[int, Client] = {}
    published: dict[int, dict[str, float]] = {}
    results = [Measured() for _ in members]
    since: dict[int, float] = {}

    def exchange(number: int) -> None:
        if number not in published:
            return
        client = clients.get(number)
        others = [note for other, note in published.items() if other != number]
        if others:
            since.setdefault(number, clock.now)
        else:
            since.pop(number, None)
        if client is not None:
            waiting = len(client.waiting) if client.wanted < math.inf else MANY
            published[number] = client.pacer.note(clock.now, waiting)
            client.pacer.share([each for each in others if each], clock.now, since=since.get(number))
            client.go()
        clock.at(1.0 + 0.1 * draw.random(), lambda: exchange(number))

    def begin(number: int) -> None:
        member = members[number]
        published[number] = {}
        pacer = Pacer(1000, told, rank=number + 1.0)
        client = Client(clock, limits, works(number), pacer, Says(), 0.05, number, member.wanted)
        clients[number], client.measured = client, results[number]
        exchange(number)
        client.go()

    def end(number: int) -> None:
        clients[number].end()
        del published[number]

    for number, member in enumerate(members):
        clock.at(member.starts + draw.random(), lambda number=number: begin(number))  # type: ignore[misc]
        if member.ends < math.inf:
            clock.at(member.ends, lambda number=number: end(number))  # type: ignore[misc]
    clock.run(seconds)
    return Together(results, told)


def jain(shares: Sequence[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def bucket(rpm: float, burst: float = 5.0) -> Limits:
    return Limits(TokenBucket("requests", REQUESTS, rpm, burst=burst))


def unlimited() -> Limits:
    return bucket(1e9)
