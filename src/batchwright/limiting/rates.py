"""Limits on the requests and tokens of online clients per minute, and on their concurrent requests.

A minute is a sliding window: no more is admitted in any minute than a limit allows, except for what other processes
admitted and is not known here yet. Use is counted in slots of a few seconds; a slot counts until all of it is a minute
old.

Several processes share counters: each hands over what it has counted (`take_changes`), and learns what all have counted
(`learn`). A request that was admitted is then checked once more (`confirm`), and withdrawn if it is too much together
with what the others have counted. If exchanges happen one after another, that keeps all processes together within a
limit: when two admit too much at the same time, the later one sees both. While nothing can be shared, each continues
with what it knows.

Times are seconds of a clock that is approximately the same for all processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, get_args

from batchwright.limiting.quotas import Quotas

Kind: TypeAlias = Literal["requests", "tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)

PERIOD = 60
SLOT = 5
_SOON = 1.0
"""Seconds after which to try again if all places are taken, since it is not known when one will be free."""


class Change(NamedTuple):
    """An amount that was used of a rate in one time slot."""

    rate: str
    slot: int
    amount: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A tenant or a key whose use is limited."""

    name: str
    """Name of the form `tenant:…` or `key:…`."""
    quotas: Quotas


@dataclass(frozen=True, slots=True)
class Standing:
    """Limit of a rate, what is left of it, and when all of it is left again."""

    limit: int
    remaining: int
    reset: float
    """Seconds until none of it is used."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a request is not admitted."""

    subject: str
    quota: str
    """Name of the field of `Quotas`."""
    limit: int
    used: int
    asked: int
    wait: float | None
    """Seconds until there is room, if nothing else arrives first; None: there never is."""


@dataclass(slots=True)
class Grant:
    """A request that was admitted."""

    subjects: tuple[str, ...]
    rates: tuple[tuple[Kind, str, int], ...]
    """Rates that count it, with their limits."""
    slot: int
    tokens: int
    """Number of tokens that it counts as."""
    inside: bool = True


@dataclass(slots=True)
class _Window:
    """Use of a rate in the last minute."""

    limit: int | None = None
    """Limit that was last used here; None: the rate is known only from other processes."""
    shared: Mapping[int, int] = field(default_factory=dict)
    """Use in all processes, by slot, as last learned."""
    handed: dict[int, int] = field(default_factory=dict)
    """Use being handed over and not yet in `shared`."""
    own: dict[int, int] = field(default_factory=dict)

    def slots(self, now: float) -> list[tuple[int, int]]:
        """Return the slots that count at `now`, the oldest first."""
        amounts: Counter[int] = Counter()
        for part in (self.shared, self.handed, self.own):
            for slot, amount in part.items():
                if slot >= oldest_slot(now):
                    amounts[slot] += amount
        return sorted(amounts.items())

    def used(self, now: float) -> int:
        return max(0, sum(amount for _, amount in self.slots(now)))

    def wait(self, amount: int, now: float) -> float:
        """Return the seconds until `amount` of what is used now no longer counts."""
        gone = 0
        for slot, used in self.slots(now):
            gone += used
            if gone >= amount:
                return (slot + 1) * SLOT + PERIOD - now
        return 0.0

    def add(self, slot: int, amount: int) -> None:
        self.own[slot] = self.own.get(slot, 0) + amount


def slot_of(now: float) -> int:
    return math.floor(now / SLOT)


def oldest_slot(now: float) -> int:
    """Return the first slot whose end is within the last minute."""
    return slot_of(now - PERIOD)


class RateLimiter:
    """Decides which requests are admitted."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}
        self._inside: Counter[str] = Counter()
        self._elsewhere: Mapping[str, int] = {}
        self._most_inside: dict[str, int] = {}
        """Limits of subjects that have a limit on concurrent requests and some in this process."""

    # Requests.

    def admit(self, subjects: Sequence[Subject], tokens: int, now: float) -> Grant | Refusal:
        """Admit a request that may use `tokens`, or return the refusal that lasts longest."""
        refusals = [refusal for subject in subjects for refusal in self._refusals(subject, tokens, now)]
        if refusals:
            return max(refusals, key=_wait)
        slot = slot_of(now)
        rates: list[tuple[Kind, str, int]] = []
        for subject in subjects:
            self._inside[subject.name] += 1
            if subject.quotas.concurrent_requests is not None:
                self._most_inside[subject.name] = subject.quotas.concurrent_requests
            for kind, limit in _rates(subject.quotas):
                rate = f"{subject.name}/{kind}"
                self._window(rate, limit).add(slot, 1 if kind == "requests" else tokens)
                rates.append((kind, rate, limit))
        return Grant(tuple(subject.name for subject in subjects), tuple(rates), slot, tokens)

    def confirm(self, grant: Grant, subjects: Sequence[Subject], now: float) -> Grant | Refusal:
        """Decide again on an admitted request, after `learn`: it is withdrawn and admitted again."""
        self.withdraw(grant)
        return self.admit(subjects, grant.tokens, now)

    def withdraw(self, grant: Grant) -> None:
        """Undo the admission of a request."""
        for kind, rate, limit in grant.rates:
            self._window(rate, limit).add(grant.slot, -1 if kind == "requests" else -grant.tokens)
        self.leave(grant)

    def settle(self, grant: Grant, tokens: int, now: float) -> None:
        """Note the tokens that a request used. Those not counted before are counted now."""
        more = tokens - grant.tokens
        for kind, rate, limit in grant.rates:
            if kind == "tokens":
                # For a request that took minutes, the window may be gone.
                self._window(rate, limit).add(slot_of(now) if more > 0 else grant.slot, more)
        grant.tokens = tokens

    def leave(self, grant: Grant) -> None:
        """Note that the request has ended. May be called more than once."""
        if not grant.inside:
            return
        grant.inside = False
        self._inside -= Counter(grant.subjects)
        for subject in grant.subjects:
            if not self._inside[subject]:
                self._most_inside.pop(subject, None)

    def standing(self, subjects: Iterable[Subject], kind: Kind, now: float) -> Standing | None:
        """Return the standing of the scarcest rate of this kind; None: none of them is limited."""
        found = []
        for subject in subjects:
            for each, limit in _rates(subject.quotas):
                if each == kind:
                    window = self._window(f"{subject.name}/{kind}", limit)
                    used = window.used(now)
                    found.append(Standing(limit, max(0, limit - used), window.wait(used, now) if used else 0.0))
        return min(found, key=lambda standing: standing.remaining, default=None)

    def inside(self, subject: str) -> int:
        """Return the number of its requests that were admitted and have not ended, in all processes."""
        return self._inside[subject] + self._elsewhere.get(subject, 0)

    # Other processes.

    def take_changes(self, now: float) -> tuple[list[Change], list[str]]:
        """Return what was counted here since the last call, and the rates for which all news matters.

        For other rates, what other processes count matters only once the rate is used here. Call `learn` or `put_back`
        next.
        """
        oldest, changes = oldest_slot(now), []
        for rate, window in [*self._windows.items()]:
            if not window.slots(now):
                del self._windows[rate]
                continue
            window.shared = {slot: amount for slot, amount in window.shared.items() if slot >= oldest}
            window.handed = {slot: amount for slot, amount in window.own.items() if slot >= oldest and amount}
            window.own = {}
            changes += [Change(rate, slot, amount) for slot, amount in window.handed.items()]
        return changes, [rate for rate, window in self._windows.items() if window.limit is not None]

    def learn(self, counted: Iterable[Change], rates: Collection[str]) -> None:
        """Learn what all processes counted, including this one: all of `rates`, and news of others."""
        shared: dict[str, dict[int, int]] = {}
        for rate, slot, amount in counted:
            shared.setdefault(rate, {})[slot] = amount
        for rate in rates:
            if (window := self._windows.get(rate)) is not None:
                window.shared, window.handed = shared.pop(rate, {}), {}
        for rate, amounts in shared.items():
            window = self._windows.setdefault(rate, _Window())
            window.shared = {**window.shared, **amounts}

    def put_back(self) -> None:
        """Restore changes that could not be handed over."""
        for window in self._windows.values():
            for slot, amount in window.handed.items():
                window.add(slot, amount)
            window.handed = {}

    @property
    def inside_here(self) -> dict[str, int]:
        """Number of this process's concurrent requests by subject, for the other processes."""
        return dict(self._inside)

    def standings(self, now: float) -> Iterator[tuple[str, int, int]]:
        """Return each quota recently used here, such as `tenant:a/tokens_per_minute`, with its limit and its use."""
        for rate, window in self._windows.items():
            if window.limit is not None:
                yield f"{rate}_per_minute", window.limit, window.used(now)
        for subject, most in self._most_inside.items():
            yield f"{subject}/concurrent_requests", most, self.inside(subject)

    def learn_inside(self, elsewhere: Mapping[str, int]) -> None:
        """Learn the number of the other processes' concurrent requests, by subject."""
        self._elsewhere = elsewhere

    # What they share.

    def _window(self, rate: str, limit: int) -> _Window:
        window = self._windows.setdefault(rate, _Window())
        window.limit = limit
        return window

    def _refusals(self, subject: Subject, tokens: int, now: float) -> Iterator[Refusal]:
        most = subject.quotas.concurrent_requests
        if most is not None and (inside := self.inside(subject.name)) >= most:
            yield Refusal(subject.name, "concurrent_requests", most, inside, 1, _SOON)
        for kind, limit in _rates(subject.quotas):
            asked = 1 if kind == "requests" else tokens
            window = self._window(f"{subject.name}/{kind}", limit)
            used = window.used(now)
            if used + asked > limit:
                wait = None if asked > limit else window.wait(used + asked - limit, now)
                yield Refusal(subject.name, f"{kind}_per_minute", limit, used, asked, wait)


def _wait(refusal: Refusal) -> float:
    return math.inf if refusal.wait is None else refusal.wait


def _rates(quotas: Quotas) -> Iterator[tuple[Kind, int]]:
    if quotas.requests_per_minute is not None:
        yield "requests", quotas.requests_per_minute
    if quotas.tokens_per_minute is not None:
        yield "tokens", quotas.tokens_per_minute
