"""Models of the limits that providers of models apply to a key, from their published descriptions.

Nothing here has a clock: `now` is the number of seconds since the provider began, and only grows. The descriptions:

- Anthropic, <https://platform.claude.com/docs/en/api/rate-limits>: requests, input tokens and output tokens per minute,
  each a token bucket that is "continuously replenished up to your maximum limit, rather than being reset at fixed
  intervals"; shorter intervals may be enforced, as 1 request per second for 60 a minute; input tokens are estimated on
  arrival and adjusted, those read from the cache do not count; output tokens count as they are produced; a sharp
  increase in usage is refused too (acceleration limits).
- OpenAI, <https://developers.openai.com/api/docs/guides/rate-limits> and
  <https://help.openai.com/en/articles/5955604>: requests and tokens per minute or per day; a request counts on arrival
  as the larger of `max_tokens` and an estimate from its characters; requests that are refused count too; 60 a minute
  may be enforced as 1 per second; <https://developers.openai.com/api/docs/guides/error-codes>: `slow_down` for a rate
  that increases faster than about a half in a quarter of an hour.
- Azure, <https://learn.microsoft.com/azure/ai-services/openai/how-to/quota>: the estimate with `max_tokens` is added to
  a count of tokens "that resets each minute"; requests are evaluated "over a small period of time, typically 1 or 10
  seconds"; some deployments limit the requests under way.
- Groq, <https://console.groq.com/docs/rate-limits>: requests per day beside tokens per minute, and the headers' form.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.provider.amounts import Charge, Quantity, Schedule, Usage, duration

MINUTE = 60.0
DAY = 86_400.0
AT_RANDOM = "capacity"
"""Name of the limit that refuses requests at random."""
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not admitted."""

    limit: str
    """The name of the limit that it meets."""
    retry_after: float | None
    """Seconds until the same request would be admitted if no other came; None: when another ends; infinite: never."""
    status: int
    """429, or 529 of a provider that is overloaded."""
    code: str
    """The error's code in OpenAI's form."""
    message: str


def _schedule(value: float | Schedule) -> Schedule:
    return value if isinstance(value, Schedule) else Schedule(value)


class Limit(ABC):
    """One limit on one quantity."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, name: str, quantity: Quantity, *, charge: Charge = Charge.ESTIMATE, stated: bool = True) -> None:
        self.name = name
        self.quantity = quantity
        self.charge = charge
        self.stated = stated
        """Whether headers state it."""

    def wait(self, now: float, estimate: Usage) -> float | None:
        """Seconds until a request is within this limit: 0: now; infinite: never; None: when another one ends."""
        least = _SLACK if self.charge is Charge.ACTUAL else estimate.amount(self.quantity)
        return self.seconds_until(now, least)

    def admitted(self, now: float, estimate: Usage) -> None:
        """Book a request's arrival."""
        if self.charge is not Charge.ACTUAL:
            self.take(now, estimate.amount(self.quantity))

    def ended(self, now: float, estimate: Usage, actual: Usage) -> None:
        """Book a request's end."""
        if self.charge is Charge.ACTUAL:
            self.take(now, actual.amount(self.quantity))
        elif self.charge is Charge.ADJUSTED:
            self.take(now, actual.amount(self.quantity) - estimate.amount(self.quantity))

    @abstractmethod
    def seconds_until(self, now: float, amount: float) -> float | None:
        """Seconds until `amount` is left: 0: now; infinite: never; None: when a request ends."""

    @abstractmethod
    def take(self, now: float, amount: float) -> None:
        """Take an amount, or give it back if it is negative."""

    @abstractmethod
    def limit(self, now: float) -> float:
        """The most that can be left."""

    @abstractmethod
    def remaining(self, now: float) -> float:
        """What is left."""

    @abstractmethod
    def reset(self, now: float) -> float:
        """Seconds until nothing counts anymore."""

    @abstractmethod
    def most(self, until: float) -> float:
        """The most that a client that knows this limit could have got admitted from 0 to a time, inclusive."""


class TokenBucket(Limit):
    """A store that is refilled continuously up to what `burst` seconds bring, and is full at the beginning."""

    def __init__(
        self,
        name: str,
        quantity: Quantity,
        per_minute: float | Schedule,
        *,
        burst: float = MINUTE,
        charge: Charge = Charge.ESTIMATE,
        stated: bool = True,
    ) -> None:
        super().__init__(name, quantity, charge=charge, stated=stated)
        self._per_minute = _schedule(per_minute)
        self._rate = self._per_minute.scaled(1 / MINUTE)
        self._burst = burst
        self._level = self._capacity(0.0)
        self._then = 0.0

    def _capacity(self, now: float) -> float:
        # A bucket that holds less than one request would admit none.
        return max(self._rate.at(now) * self._burst, 1.0)

    def _refill(self, now: float) -> None:
        refilled = self._level + self._rate.sum(self._then, now)
        self._level = min(refilled, self._capacity(now))
        self._then = now

    def seconds_until(self, now: float, amount: float) -> float:
        self._refill(now)
        if amount > self._capacity(now) + _SLACK:
            return math.inf
        lacking = amount - self._level
        return self._rate.reaches(now, lacking) if lacking > _SLACK * max(amount, 1.0) else 0.0

    def take(self, now: float, amount: float) -> None:
        self._refill(now)
        self._level = min(self._level - amount, self._capacity(now))

    def limit(self, now: float) -> float:
        return self._per_minute.at(now)

    def remaining(self, now: float) -> float:
        self._refill(now)
        return max(self._level, 0.0)

    def reset(self, now: float) -> float:
        self._refill(now)
        return self._rate.reaches(now, self._capacity(now) - self._level)

    def most(self, until: float) -> float:
        return self._capacity(0.0) + self._rate.sum(0.0, until)


class FixedWindow(Limit):
    """A count that begins again at each multiple of the window's length."""

    def __init__(
        self,
        name: str,
        quantity: Quantity,
        per_window: float | Schedule,
        *,
        seconds: float = MINUTE,
        charge: Charge = Charge.ESTIMATE,
        stated: bool = True,
    ) -> None:
        super().__init__(name, quantity, charge=charge, stated=stated)
        self._per_window = _schedule(per_window)
        self._seconds = seconds
        self._window = 0
        self._used = 0.0

    def _begin(self, now: float) -> None:
        # Without the slack, a request at the very end of a window would be told to wait for nothing.
        window = math.floor(now / self._seconds + _SLACK)
        if window != self._window:
            self._window, self._used = window, 0.0

    def seconds_until(self, now: float, amount: float) -> float:
        self._begin(now)
        allowed = self._per_window.at(now) + _SLACK
        if self._used + amount <= allowed:
            return 0.0
        end = (self._window + 1) * self._seconds
        return end - now if amount <= self._per_window.at(end) + _SLACK else math.inf

    def take(self, now: float, amount: float) -> None:
        self._begin(now)
        self._used = max(self._used + amount, 0.0)

    def limit(self, now: float) -> float:
        return self._per_window.at(now)

    def remaining(self, now: float) -> float:
        self._begin(now)
        return max(self._per_window.at(now) - self._used, 0.0)

    def reset(self, now: float) -> float:
        self._begin(now)
        return (self._window + 1) * self._seconds - now if self._used else 0.0

    def most(self, until: float) -> float:
        total = 0.0
        for window in range(math.floor(until / self._seconds + _SLACK) + 1):
            begin = window * self._seconds
            edges = [time for time in self._per_window.changes(begin, begin + self._seconds) if time <= until]
            total += max(self._per_window.at(time) for time in (begin, *edges))
        return total


class SlidingWindow(Limit):
    """What was admitted within the last seconds, at every moment."""

    def __init__(
        self,
        name: str,
        quantity: Quantity,
        per_window: float | Schedule,
        *,
        seconds: float = MINUTE,
        charge: Charge = Charge.ESTIMATE,
        stated: bool = True,
    ) -> None:
        super().__init__(name, quantity, charge=charge, stated=stated)
        self._per_window = _schedule(per_window)
        self._seconds = seconds
        self._taken: deque[tuple[float, float]] = deque()
        self._used = 0.0

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0][0] + self._seconds <= now + _SLACK:
            self._used -= self._taken.popleft()[1]
        if not self._taken:
            self._used = 0.0

    def seconds_until(self, now: float, amount: float) -> float:
        self._forget(now)
        excess = self._used + amount - self._per_window.at(now)
        if excess <= _SLACK * max(amount, 1.0):
            return 0.0
        for time, taken in self._taken:
            excess -= taken
            if excess <= _SLACK * max(amount, 1.0):
                return time + self._seconds - now
        return math.inf

    def take(self, now: float, amount: float) -> None:
        self._forget(now)
        self._taken.append((now, amount))
        self._used += amount

    def limit(self, now: float) -> float:
        return self._per_window.at(now)

    def remaining(self, now: float) -> float:
        self._forget(now)
        return max(self._per_window.at(now) - self._used, 0.0)

    def reset(self, now: float) -> float:
        self._forget(now)
        return self._taken[-1][0] + self._seconds - now if self._taken else 0.0

    def most(self, until: float) -> float:
        windows = math.floor(until / self._seconds + _SLACK) + 1
        return sum(self._highest(number * self._seconds, (number + 1) * self._seconds) for number in range(windows))

    def _highest(self, start: float, end: float) -> float:
        return max(self._per_window.at(time) for time in (start, *self._per_window.changes(start, end)))


class Concurrency(Limit):
    """The number of requests under way."""

    def __init__(self, name: str, most_under_way: float | Schedule, *, stated: bool = False) -> None:
        super().__init__(name, Quantity.REQUESTS, stated=stated)
        self._most = _schedule(most_under_way)
        self.under_way = 0

    def wait(self, now: float, estimate: Usage) -> float | None:
        return self.seconds_until(now, estimate.requests)

    def ended(self, now: float, estimate: Usage, actual: Usage) -> None:
        self.under_way -= estimate.requests

    def seconds_until(self, now: float, amount: float) -> float | None:
        return 0.0 if self.under_way + amount <= self._most.at(now) else None

    def take(self, now: float, amount: float) -> None:
        self.under_way += int(amount)

    def limit(self, now: float) -> float:
        return self._most.at(now)

    def remaining(self, now: float) -> float:
        return max(self._most.at(now) - self.under_way, 0.0)

    def reset(self, now: float) -> float:
        return 0.0

    def most(self, until: float) -> float:
        """Infinite: it depends on how long requests take. `best_plan` shows it."""
        return math.inf


class AtRandom(Limit):
    """A share of requests that is refused for lack of capacity, whatever their rate, as others use it up."""

    code = "engine_overloaded"

    def __init__(self, share: float, *, seconds: float = 0.5, seed: int = 1) -> None:
        """`seconds`: after which a refused request is told to come again."""
        super().__init__(AT_RANDOM, Quantity.REQUESTS, stated=False)
        self._share, self._seconds = share, seconds
        self._draw = random.Random(seed)

    def seconds_until(self, now: float, amount: float) -> float:
        return self._seconds if self._draw.random() < self._share else 0.0

    def take(self, now: float, amount: float) -> None:
        pass

    def limit(self, now: float) -> float:
        return math.inf

    def remaining(self, now: float) -> float:
        return math.inf

    def reset(self, now: float) -> float:
        return 0.0

    def most(self, until: float) -> float:
        return math.inf


class Slope(Limit):
    """How fast usage rises: a window admits at most `growth` times what the largest of those before it did.

    Windows that admitted nothing are forgotten after `memory` of them, so that a client that pauses has to rise again.
    """

    code = "slow_down"

    def __init__(
        self,
        name: str,
        quantity: Quantity,
        floor: float,
        *,
        growth: float = 1.5,
        seconds: float = 5.0,
        memory: int = 3,
        status: int = 429,
    ) -> None:
        """`floor` is what a window admits regardless of what came before it."""
        super().__init__(name, quantity, stated=False)
        self.status = status
        self._floor, self._growth, self._seconds = floor, growth, seconds
        self._before: deque[float] = deque(maxlen=memory)
        self._window = 0
        self._used = 0.0

    def _begin(self, now: float) -> None:
        window = math.floor(now / self._seconds + _SLACK)
        for _ in range(min(window - self._window, (self._before.maxlen or 0) + 1)):
            self._before.append(self._used)
            self._used = 0.0
        self._window = window

    def seconds_until(self, now: float, amount: float) -> float:
        self._begin(now)
        return 0.0 if self._used + amount <= self.limit(now) + _SLACK else (self._window + 1) * self._seconds - now

    def take(self, now: float, amount: float) -> None:
        self._begin(now)
        self._used += amount

    def limit(self, now: float) -> float:
        self._begin(now)
        return max(self._floor, self._growth * max(self._before, default=0.0))

    def remaining(self, now: float) -> float:
        return max(self.limit(now) - self._used, 0.0)

    def reset(self, now: float) -> float:
        self._begin(now)
        return (self._window + 1) * self._seconds - now

    def most(self, until: float) -> float:
        """The sum over the windows if each is used up. With another limit it is less: `best_plan` shows it."""
        total, ceiling = 0.0, self._floor
        for _ in range(math.floor(until / self._seconds + _SLACK) + 1):
            total, ceiling = total + ceiling, ceiling * self._growth
            if total > 1e18:
                break
        return total


def per_second(name: str, per_minute: float | Schedule, *, seconds: float = 1.0, stated: bool = False) -> FixedWindow:
    """A limit on requests per minute that is enforced in shorter windows: 60,000 a minute as 1,000 per second."""
    limit = _schedule(per_minute).scaled(seconds / MINUTE)
    return FixedWindow(name, Quantity.REQUESTS, limit, seconds=seconds, stated=stated)


def per_day(name: str, requests: float | Schedule, *, stated: bool = False) -> TokenBucket:
    """A limit on requests per day, which is refilled continuously."""
    per_minute = _schedule(requests).scaled(MINUTE / DAY)
    return TokenBucket(name, Quantity.REQUESTS, per_minute, burst=DAY, stated=stated)


class Limits:
    """All limits of a key together: a request is admitted if each of them admits it."""

    def __init__(self, *limits: Limit, count_refused: bool = False) -> None:
        """`count_refused`: a request that is refused counts as a request nevertheless, as it does with OpenAI."""
        self.limits = limits
        self._count_refused = count_refused

    def foreseen(self) -> Limits:
        """These limits for who knows all answers: what counts as it comes is counted on arrival, so none runs up debt.

        The estimates must then hold what the answers take. Nor is anything refused at random.
        """
        self.limits = tuple(limit for limit in self.limits if not isinstance(limit, AtRandom))
        for limit in self.limits:
            if limit.charge is Charge.ACTUAL:
                limit.charge = Charge.ESTIMATE
        return self

    @property
    def is_charged_late(self) -> bool:
        """Whether one of them counts the use of answers as they come."""
        return any(limit.charge is Charge.ACTUAL for limit in self.limits)

    def admit(self, now: float, estimate: Usage) -> Refusal | None:
        """Admit a request that may take `estimate`, or say why not. An admitted one must be settled at its end."""
        refusal = self.refusal(now, estimate)
        if refusal is None:
            for limit in self.limits:
                limit.admitted(now, estimate)
        elif self._count_refused:
            self._count(now, estimate)
            # What the refusal took has to be waited for too.
            return self.refusal(now, estimate) or refusal
        return refusal

    def refusal(self, now: float, estimate: Usage) -> Refusal | None:
        """What a request that came now would be answered, of the limit for which it had to wait longest."""
        worst: tuple[float, Limit, float | None] | None = None
        for limit in self.limits:
            seconds = limit.wait(now, estimate)
            weight = 0.5 * _SLACK if seconds is None else seconds
            if weight > 0 and (worst is None or weight > worst[0]):
                worst = weight, limit, seconds
        if worst is None:
            return None
        _, limit, seconds = worst
        return Refusal(limit.name, seconds, limit.status, limit.code, _message(limit, now, estimate, seconds))

    def _count(self, now: float, estimate: Usage) -> None:
        for limit in self.limits:
            if limit.quantity is Quantity.REQUESTS and not isinstance(limit, AtRandom | Concurrency | Slope):
                limit.take(now, min(estimate.requests, limit.remaining(now)))

    def settle(self, now: float, estimate: Usage, actual: Usage) -> None:
        """Book the end of an admitted request."""
        for limit in self.limits:
            limit.ended(now, estimate, actual)

    def drift(self, now: float) -> Mapping[str, float]:
        """The value of each limit at a time, by its name."""
        return {limit.name: limit.limit(now) for limit in self.limits}

    def most(self, until: float, each: Usage) -> float:
        """An upper bound on the requests that any client can have got by a time, if all take the same.

        `each` is what a request is charged with. What this cannot know (how long requests take, how limits interact)
        makes it larger than the number of `best_plan`, never smaller.
        """
        bounds = [
            (limit.most(until) / each.amount(limit.quantity))
            for limit in self.limits
            if each.amount(limit.quantity) > 0 and limit.charge is not Charge.ACTUAL
        ]
        return min(bounds, default=math.inf)


def _message(limit: Limit, now: float, estimate: Usage, seconds: float | None) -> str:
    """A sentence in the form of OpenAI's."""
    if isinstance(limit, Concurrency):
        return f"Too many requests under way ({limit.name})."
    if isinstance(limit, Slope):
        return "Your rate of requests rises too fast. Slow down."
    if isinstance(limit, AtRandom):
        return "The engine is currently overloaded, please try again later."
    asked, allowed = estimate.amount(limit.quantity), limit.limit(now)
    if seconds is not None and math.isinf(seconds):
        return f"Request too large on {limit.name}: Limit {allowed:.0f}, Requested {asked:.0f}."
    used = allowed - limit.remaining(now)
    again = "" if seconds is None else f" Please try again in {duration(seconds)}."
    return f"Rate limit reached on {limit.name}: Limit {allowed:.0f}, Used {used:.0f}, Requested {asked:.0f}.{again}"
