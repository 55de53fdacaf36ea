"""Clients with a `Pacer` each against a provider with limits, on a clock that jumps from event to event."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from benchmarks.provider.amounts import Quantity, Usage
from benchmarks.provider.headers import anthropic_headers, openai_headers
from benchmarks.provider.limits import Limits, Refusal
from benchmarks.provider.plan import Work, best_plan

from batchwright.pacing.attempt import Attempt
from batchwright.pacing.limits import ConfiguredLimit
from batchwright.pacing.pacer import Pacer
from batchwright.wire.rate_limits import (
    StatedLimit,
    cause_of_refusal,
    limits_of_headers,
    limits_of_refusal,
    retry_after_of_refusal,
)

MAX_TOKENS = 400
_UNIX_TIME = 1.7e9
_MISTAKEN = 1.1
"""What the client takes prompts for, in their tokens."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Says:
    """What the provider tells of its limits."""

    headers: Literal["openai", "anthropic"] | None = None
    retry_after: bool = False
    text: bool = False
    """Whether refusals have OpenAI's text."""
    when_ready: bool = False
    """Whether headers hold for the time when an answer is ready, not for that when its request arrived."""


@dataclass(slots=True)
class Measured:
    """What came of a job."""

    sent: int = 0
    refused: int = 0
    refused_at: list[float] = field(default_factory=list)
    admitted: list[tuple[float, Usage]] = field(default_factory=list)
    """When requests were admitted, and what they were charged with."""
    ended: list[tuple[float, Usage]] = field(default_factory=list)
    """When requests were answered, and what they took."""
    most_under_way: int = 0

    @property
    def refused_per_thousand(self) -> float:
        """Refusals for each thousand requests sent."""
        return 1000.0 * self.refused / max(1, self.sent)

    def charged(self, quantity: Quantity) -> float:
        """Return the amount with which admitted requests were charged on arrival."""
        return sum(usage.amount(quantity) for _, usage in self.admitted)

    def used(self, quantity: Quantity) -> float:
        """Return the amount that answers took."""
        return sum(usage.amount(quantity) for _, usage in self.ended)


def works(seed: int, *, seconds: float = 2.0, spread: float = 0.5) -> Callable[[int], Work]:
    """Return requests by their number: prompts and answers of many lengths, answers that take `seconds` on average."""

    @cache
    def work(number: int) -> Work:
        draw = random.Random(f"{seed} {number}")
        prompt = draw.randint(50, 300)
        answer = min(MAX_TOKENS, max(5, round(draw.lognormvariate(4.5, 0.7))))
        mean = math.log(seconds) - spread**2 / 2.0
        estimate = Usage(1, prompt, MAX_TOKENS)
        return Work(estimate, Usage(1, prompt, answer), draw.lognormvariate(mean, spread))

    return work


def simulate(
    limits: Limits,
    work: Callable[[int], Work],
    *,
    seconds: float,
    says: Says,
    told: Sequence[ConfiguredLimit] = (),
    most: int = 1000,
    round_trip: float = 0.05,
    seed: int = 0,
) -> Measured:
    """Send requests without end for so long, as a pacer allows."""
    clock = Clock()
    client = Client(clock, limits, work, Pacer(most, told), says, round_trip, seed)
    client.go()
    clock.run(seconds)
    return client.measured


def allowed(limits: Limits, work: Callable[[int], Work], quantity: Quantity, *, seconds: float, requests: int) -> float:
    """Return the amount that a client gets admitted in so long which knows all; `requests` must be more than that."""
    plan = best_plan(limits, [work(number) for number in range(requests)])
    if plan.admitted[-1] < seconds:
        raise ValueError(f"requests={requests}: all of them are admitted within {seconds:g} s; there must be more")
    pairs = zip(plan.admitted, plan.work, strict=True)
    return sum(each.estimate.amount(quantity) for at, each in pairs if at <= seconds)


class Clock:
    """A clock that jumps from event to event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._serial), event))

    def run(self, until: float) -> None:
        """Let all happen until then."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()


class Client:
    """Sends requests as a pacer allows, without end or as many a second as `wanted` says."""

    def __init__(
        self,
        clock: Clock,
        limits: Limits,
        work: Callable[[int], Work],
        pacer: Pacer,
        says: Says,
        round_trip: float,
        seed: int,
        wanted: float = math.inf,
    ) -> None:
        self.clock = clock
        self.limits, self.work, self.pacer, self.says = limits, work, pacer, says
        self.round_trip = round_trip
        self.draw = random.Random(seed)
        self.measured = Measured()
        self.fresh = itertools.count()
        self.waiting: list[int] = []
        """Numbers of requests that were refused; the last goes first."""
        self.rings_at = math.inf
        self.wanted = wanted
        self.has_ended = False
        if wanted < math.inf:
            self.arrival()

    @property
    def now(self) -> float:
        return self.clock.now

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        def whole() -> None:
            event()
            self.go()

        self.clock.at(seconds, whole)

    def arrival(self) -> None:
        if not self.has_ended:
            self.waiting.insert(0, next(self.fresh))
            self.at(1.0 / self.wanted, self.arrival)

    def end(self) -> None:
        """Send no more."""
        self.has_ended = True

    def go(self) -> None:
        """Send what may go now, and set a timer for what may go later."""
        while not self.has_ended:
            if not self.waiting:
                if self.wanted < math.inf:
                    return
                self.waiting.append(next(self.fresh))
            each = self.work(self.waiting[-1])
            use = self.pacer.expected.of(each.estimate.input_tokens * _MISTAKEN, each.estimate.output_tokens)
            wait = self.pacer.wait(use, self.now)
            if wait > _ROUNDING:
                if self.now + wait < self.rings_at - _ROUNDING:
                    self.rings_at = self.now + wait
                    self.at(wait, self.ring)
                return
            attempt = self.pacer.begin(use, self.now)
            self.measured.sent += 1
            self.measured.most_under_way = max(self.measured.most_under_way, self.pacer.under_way)
            number = self.waiting.pop()
            self.at(self.half_trip(), lambda number=number, attempt=attempt: self.arrive(number, attempt))  # type: ignore[misc]

    def ring(self) -> None:
        if self.now >= self.rings_at - _ROUNDING:
            self.rings_at = math.inf

    def half_trip(self) -> float:
        return self.round_trip * (0.25 + 0.5 * self.draw.random())

    def arrive(self, number: int, attempt: Attempt) -> None:
        each = self.work(number)
        refusal = self.limits.admit(self.now, each.estimate)
        stated = self.stated(refusal)
        if refusal is not None:
            self.at(self.half_trip(), lambda: self.refused(number, attempt, refusal, stated))
            return
        self.measured.admitted.append((self.now, each.estimate))
        self.at(each.seconds, lambda: self.computed(number, attempt, stated))

    def computed(self, number: int, attempt: Attempt, stated: Sequence[StatedLimit]) -> None:
        each = self.work(number)
        self.limits.settle(self.now, each.estimate, each.actual)
        if self.says.when_ready:
            stated = self.stated(None)
        self.at(self.half_trip(), lambda: self.answered(number, attempt, stated))

    def answered(self, number: int, attempt: Attempt, stated: Sequence[StatedLimit]) -> None:
        usage = self.work(number).actual
        self.measured.ended.append((self.now, usage))
        self.pacer.succeeded(
            attempt, self.now, input_tokens=usage.input_tokens, output_tokens=usage.output_tokens, stated=stated
        )

    def refused(self, number: int, attempt: Attempt, refusal: Refusal, stated: Sequence[StatedLimit]) -> None:
        self.measured.refused += 1
        self.measured.refused_at.append(self.now)
        self.waiting.append(number)
        after = None
        if self.says.retry_after and refusal.retry_after is not None:
            after = float(max(1, math.ceil(refusal.retry_after)))
        cause, named = None, list[StatedLimit]()
        if self.says.text:
            after = after or retry_after_of_refusal(refusal.message)
            cause, named = cause_of_refusal(refusal.code, refusal.message), limits_of_refusal(refusal.message)
        self.pacer.refused(attempt, self.now, retry_after=after, stated=stated, cause=cause, named=named)

    def stated(self, refusal: Refusal | None) -> Sequence[StatedLimit]:
        if self.says.headers is None:
            return ()
        unix_time = _UNIX_TIME + self.now
        if self.says.headers == "openai":
            return limits_of_headers(openai_headers(self.limits, self.now), unix_time)
        return limits_of_headers(anthropic_headers(self.limits, self.now, unix_time), unix_time)
