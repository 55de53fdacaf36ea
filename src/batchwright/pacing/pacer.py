"""`Pacer`: when the next request may be sent to an endpoint elsewhere, for one address, key and model.

It obeys, at once: limits that the user states (`SlidingWindow`); limits that answers state (`StatedBudget`); a rate or
a number of requests at once that refusals show (`FoundRate`, `ConcurrencyCap`); how fast usage may rise, as they say
(`RiseLimit`); and the number of requests beyond which no more is delivered (`ConcurrencySearch`). A refusal that a
stated limit explains teaches nothing further. One that blames a rate or a rise is believed. Of the others the first is
taken for one of too many requests at once; if another comes with fewer under way than were accepted before, it was a
rate.

Pure: times are arguments, in seconds of any clock that only goes forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from batchwright.decayed_rate import DecayedRate
from batchwright.pacing.concurrency import FIRST_LEVEL, ConcurrencyCap, ConcurrencySearch, alike
from batchwright.pacing.expected_use import ExpectedUse
from batchwright.pacing.figures import LimitFigures, PacerFigures
from batchwright.pacing.found_rate import FoundRate
from batchwright.pacing.found_sliding_window import FoundSlidingWindow
from batchwright.pacing.found_window import FoundWindow
from batchwright.pacing.limits import MINUTE, ToldLimit, Use
from batchwright.pacing.pace import Pace
from batchwright.pacing.random_refusals import RandomRefusals
from batchwright.pacing.rise_limit import RiseLimit
from batchwright.pacing.sharing import PERIOD, Note, Sharing
from batchwright.pacing.sliding_window import Counted, SlidingWindow
from batchwright.pacing.stated_budget import Sent, StatedBudget
from batchwright.wire.rate_limits import RateKind, RefusalCause, StatedLimit

_EPISODES = 3
"""Refusals with the same number of requests under way that show a limit on that number."""
_DOUBTS = 3
"""Times that they must show it again where others send too, whose number is known with a delay."""
_FEWEST_TO_BLAME = 3
_STRIKES = 4
"""Refusals in a row with ever fewer requests under way that show that not their number is to blame."""
_FORETOLD = 2
"""Refusals in a row after which what was stated is not enough to foretell the next one."""
_PAUSE = 0.25
"""Seconds without a request after a refusal, in which those that are on their way will be refused too."""
_LONGEST_PAUSE = 5.0
_AFTER_REFUSAL = 10.0
"""Requests a second with which it goes on after a pause, twice as many each time that the pause was long."""
_LONG_NAMED = 10.0
"""Seconds of a pause that a refusal names which show that no number at once is to blame."""
_CAP_SPREAD = 0.1
"""Share by which numbers of requests at once that are refused may differ where the number is to blame."""
_FEWER = 2
"""Requests fewer than a known number at once that are surely not too many."""
_RECENT = 10.0
_RAMP = 1.0
"""Seconds in which the number of requests at once may double where a rate limit bounds them anyway."""
_FIRST_SURGE = 16.0
"""Requests a second that may be sent before any was answered."""
_MOST_SURGE = 2.0
"""Requests that may be sent for each answer, so that their number doubles in the time of an answer."""
_WINDOW_SURGE = 2.0
"""Times the most that were answered in a second at which what a window admits is sent."""
_CAPPED_SURGE = 1.5
_SURGE_OVER = 3.0
_FAR_MORE = 4.0
"""Times the rate that the text of a refusal names which show, if accepted, that it is not that rate."""
_DIFFERS = 1.5
"""Times the amount that is expected of a request which the endpoint may count for it."""
_SAME = 1.001
_MEMORY = 0.98

_StatedKey: TypeAlias = tuple[RateKind, float | None]
"""What a stated limit counts, and its window in seconds; None: the endpoint does not name it."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One request on its way."""

    use: Use
    at: float
    """When it was sent."""
    under_way: int
    """Requests under way then, itself included."""
    at_once: int
    """The same of all processes that share the endpoint's limits, as far as is known."""
    amount: float
    """What it counts for a limit of which it is not known what it counts."""
    epoch: int
    cap_epoch: int
    told: Sequence[tuple[SlidingWindow, Counted]]
    is_below: bool
    """Whether it was sent below the limits that refusals have shown."""
    number: int
    """Of all requests, in the order in which they were sent."""
    stated: dict[_StatedKey, Sent] = field(default_factory=dict)
    ended: bool = False


class Pacer:
    """Decides when requests go.

    `most`: requests at once, never exceeded; `told`: limits that the user states; `first`: requests at once to begin
    with, by default a few; `rank`: a number above 0 that no other process has with which limits are shared.
    """

    def __init__(
        self, most: int, told: Sequence[ToldLimit] = (), *, first: int = FIRST_LEVEL, rank: float = 1.0
    ) -> None:
        self.sharing = Sharing(rank)
        self.expected = ExpectedUse()
        self.search = ConcurrencySearch(most, first=first)
        self._first_surge = float(max(_FIRST_SURGE, first))
        self.under_way = 0
        self.sent = 0
        self.refused_count = 0
        """Requests refused for a limit."""
        self.given_up = 0
        """Requests whose answer was not waited for."""
        self._told = [SlidingWindow(each) for each in told]
        self._stated: dict[_StatedKey, StatedBudget] = {}
        self._found = FoundRate()
        self._random = RandomRefusals()
        self._windows = (FoundWindow(), FoundSlidingWindow())
        self._rise = RiseLimit()
        self._cap: ConcurrencyCap | None = None
        self._blocked_until = float("-inf")
        self._refused_at = float("-inf")
        """When the last refusal that taught something was known."""
        self._explained = 0
        """Refusals in a row that stated limits explain."""
        self._refused_under_way: deque[int] = deque(maxlen=_EPISODES)
        self._accepted_under_way = 0
        """Most requests that were under way when one was accepted since the last refusal."""
        self._mean_tokens = self._mean_input = 0.0
        self._sent_amount = 0.0
        self._suspicions = 0
        """Refusals in a row for which a number at once may be to blame rather than a rate."""
        self._verdict = 0
        """Times that refusals have shown that not a number at once but a rate is limited, or the reverse."""
        self._recent: deque[Attempt] = deque()
        self._ramped_at = float("-inf")
        self._surge = Pace()
        self._answers = DecayedRate(_SURGE_OVER)
        self._most_answered = 0.0
        """Most answers a second since usage was last said to rise too fast: after a pause as many may be asked for."""
        self._answered_at = float("inf")

    @property
    def concurrency(self) -> int:
        """Number of requests that may be under way."""
        value = self.search.value
        return value if self._cap is None else min(value, self.sharing.places(self._cap.value))

    @property
    def _known_window(self) -> FoundWindow | FoundSlidingWindow | None:
        return next((each for each in self._windows if each.rate), None)

    @property
    def _is_in_window(self) -> bool:
        is_found = self._known_window is not None or self._found.is_in_window
        return is_found or any(each.is_window or each.slides for each in self._stated.values())

    @property
    def is_rate_known(self) -> bool:
        """Whether a limit on a rate is told, stated or found."""
        return bool(self._told or self._stated or self._known_window) or self._found.rate is not None

    def wait(self, use: Use, now: float, *, is_urgent: bool = False) -> float:
        """Return the seconds until a request that is expected to use `use` may go; infinite: only when one ended.

        One that `is_urgent` is bound by limits, but need not come in turn with others.
        """
        self._ramp(now)
        if self.under_way >= self.concurrency:
            return float("inf")
        found = (self._known_window or self._found).wait(now)
        wait = max(self._blocked_until - now, found, self._rise.wait(now), 0.0)
        if not is_urgent:
            wait = max(wait, self._surge.wait(self._surge_rate(now), now))
        for window in self._told:
            if not self._is_stated(window.told):
                wait = max(wait, window.wait(use, now), self.sharing.hearing(now))
        for budget in self._stated.values():
            wait = max(wait, budget.wait(use, now))
        return wait

    def begin(self, use: Use, now: float) -> Attempt:
        """Count a request that is sent."""
        self.under_way += 1
        self.sent += 1
        tokens = use.input_tokens + use.output_tokens
        keep = 0.0 if self.sent == 1 else _MEMORY
        self._mean_tokens = keep * self._mean_tokens + (1.0 - keep) * tokens
        self._mean_input = keep * self._mean_input + (1.0 - keep) * use.input_tokens
        amount = 0.5 + 0.5 * tokens / max(self.sharing.mean_size(self._mean_tokens), 1.0)
        self._sent_amount += amount
        is_below = self._found.is_below or (self._cap is not None and self._cap.is_below)
        number = self._random.sent(is_below=is_below)
        self._found.begin(amount, now)
        for found in self._windows:
            found.begin(now)
        self._rise.begin(now)
        self._surge.take(1.0, self._surge_rate(now), now)
        attempt = Attempt(
            use,
            now,
            self.under_way,
            self._at_once(),
            amount,
            self.search.epoch,
            0 if self._cap is None else self._cap.epoch,
            [(window, window.begin(use, now)) for window in self._told],
            is_below,
            number,
            {key: budget.begin(use, now) for key, budget in self._stated.items()},
        )
        if self._found.rate is None:
            self._remember(attempt, now)
        return attempt

    def succeeded(
        self,
        attempt: Attempt,
        now: float,
        *,
        input_tokens: int | None,
        output_tokens: int | None,
        stated: Sequence[StatedLimit] = (),
    ) -> None:
        """Learn from an answer, its usage (None: it has none) and the limits that it states."""
        self._end(attempt)
        self._answers.elapse(max(0.0, now - self._answered_at))
        self._answers.add()
        self._answered_at = now
        self._most_answered = max(self._most_answered, min(self._answers.rate, self._answers.events / _SURGE_OVER))
        used = Use(
            attempt.use.input_tokens if input_tokens is None else input_tokens,
            attempt.use.output_tokens if output_tokens is None else output_tokens,
        )
        self.expected.learn(attempt.use.input_tokens, input_tokens, output_tokens)
        for window, entry in attempt.told:
            window.settle(entry, used.of(window.told.kind), now)
        if attempt.at > self._refused_at:
            self._explained = 0
            self._rise.accepted()
        self._accepted_under_way = max(self._accepted_under_way, attempt.at_once)
        tokens = used.output_tokens or used.input_tokens
        self.search.succeeded(attempt.epoch, attempt.under_way, tokens, now - attempt.at)
        if self._cap is not None:
            weight = self._cap.value / self.sharing.places(self._cap.value)
            may_probe = self.sharing.may_probe(self._cap.epoch + 1)
            self._cap.succeeded(attempt.cap_epoch, attempt.at_once, weight=weight, may_probe=may_probe)
        for key, sent in attempt.stated.items():
            self._stated[key].end(sent, used.of(key[0]))
        self._observe(attempt, stated, now, refused=False)

    def refused(
        self,
        attempt: Attempt,
        now: float,
        *,
        retry_after: float | None = None,
        stated: Sequence[StatedLimit] = (),
        cause: RefusalCause | None = None,
        named: Sequence[StatedLimit] = (),
    ) -> None:
        """Learn that a request was refused for a limit, as status 429 says.

        `cause`: what it says is to blame, if it says so; `named`: limits in its text, which are taken for a hint only,
        since they name neither how they are counted nor, always, their window.
        """
        self._end(attempt)
        self.refused_count += 1
        self._forgive(attempt, now)
        self._rise.withdrawn(attempt.at)
        explained = self._observe(attempt, stated, now, refused=True)
        if explained is not None:
            self._withdraw_amount(attempt)
            if attempt.at > self._refused_at:
                self._refused_at = now
                self._explained += 1
                pause = _PAUSE * 2.0 ** min(self._explained - _FORETOLD, 8) if self._explained > _FORETOLD else 0.0
                self._block(now + max(min(explained, pause), retry_after or 0.0))
            return
        if attempt.at <= self._refused_at:
            # It was under way with another one that was refused: one event.
            self._random.withdrawn(is_below=attempt.is_below)
            self._withdraw_amount(attempt)
            return
        if self._cap is not None and self.sharing.has_others and attempt.at <= self._refused_at + PERIOD:
            # The other processes have not heard of the last refusal yet.
            self._withdraw_amount(attempt)
            self._block(now + max(retry_after or 0.0, _PAUSE))
            return
        if cause is None and self._is_random(attempt, now):
            self._withdraw_amount(attempt)
            self.search.overloaded(attempt.epoch)  # as by an endpoint that is too busy
            return
        self._refused_at = now
        if cause == "rise":
            self._most_answered = 0.0
            self._rise.refused(now, retry_after)
            self._withdraw_amount(attempt)
            return
        if not self.sharing.has_others and self._learn_window(attempt, now, retry_after):
            self._found.withdrawn(attempt.amount)
            return
        self._learn_refusal(attempt, now, retry_after, cause, named)
        self._random.found(self._found.rate or 0.0, 0 if self._cap is None else self._cap.value, now)

    def overloaded(self, attempt: Attempt, now: float, retry_after: float | None = None) -> None:
        """Learn that the endpoint was too busy for a request (503, 529), or did not answer it in time."""
        self._end(attempt)
        self._forgive(attempt, now)
        self._withdraw_amount(attempt)
        if self.search.overloaded(attempt.epoch) and retry_after is not None:
            self._block(now + retry_after)

    def failed(self, attempt: Attempt, now: float) -> None:
        """Note that a request failed for a reason that says nothing about limits."""
        self._end(attempt)
        for key, sent in attempt.stated.items():
            self._stated[key].end(sent, attempt.use.of(key[0]))

    def gave_up(self, attempt: Attempt, now: float) -> None:
        """Note that the answer of a request is not waited for any more."""
        self.given_up += 1
        self.failed(attempt, now)

    def rejected(self, attempt: Attempt, now: float) -> None:
        """Note that a request was refused which is never accepted, such as one larger than a limit."""
        self._end(attempt)
        self._forgive(attempt, now)

    def note(self, now: float, waiting: int = 0) -> dict[str, float]:
        """Return what other processes are told, with so many requests waiting; nothing if there is nothing to tell."""
        if not (self.under_way or waiting or any(window.used(now) for window in self._told)):
            return {}
        is_held_back = self.under_way < self.concurrency
        note = self.sharing.note(now, self._sent_amount, self.under_way, waiting, is_held_back=is_held_back)
        note |= {"refused": self.refused_count, "size": self._mean_tokens}
        for window in self._told:
            note |= window.note(now, self.sharing)
        note["verdict"] = self._verdict + 1
        if self._cap is not None:
            note |= {"cap": self._cap.value, "cap epoch": self._cap.epoch + 1}
        elif self._found.rate is not None and self._found.is_measured and self.sharing.is_hungry:
            note |= {"rate": self._found.rate / self.sharing.rate_part, "known": self._found.amounts}
        return note

    def share(self, notes: Sequence[Note], now: float, *, since: float | None = None) -> None:
        """Learn the notes of other processes with the same key; there are others since `since`, if at all."""
        if since is not None and not self.sent:
            self.sharing.hear_until(since)
        if self.sharing.learn(notes, now, keep=max((each.told.window for each in self._told), default=MINUTE)):
            self._found.be_sure(now)
        if self.sharing.has_others:
            # Each process sees a part of the requests only, so they share the rate of the windows instead.
            if (known := self._known_window) is not None:
                self._found.go_on_at(known.rate, float(known.limit), now)
            for found in self._windows:
                found.forget()
        for window in self._told:
            window.share(self.sharing)
        latest, is_cap = self.sharing.verdict
        # Who has found nothing takes over what there is. Of two that differ, a number at once is the one that refusals
        # would soon disprove.
        is_open = self._cap is None and (is_cap or not self._found.is_measured)
        if latest > self._verdict + (0 if is_open else 1):
            self._verdict = latest - 1
            self._refused_under_way.clear()
            if is_cap:
                self._found, self._cap = FoundRate(), ConcurrencyCap(1)
            else:
                self._cap = None
        if self._cap is not None:
            if (cap := self.sharing.latest_cap(self._verdict + 1)) is not None:
                self._cap.take_over(cap[0], cap[1] - 1)
        elif (whole := self.sharing.whole_rate(self._found)) is not None:
            self._found.go_on_at(self.sharing.part_of_rate(whole[0]), whole[1], now)
            self._found.weight = 1.0 / self.sharing.rate_part

    def guide(self, running: float, waiting: float) -> None:
        """Learn from the engine's own figures how many requests it computes, and how many wait in it."""
        self.search.guide(running, waiting, self.under_way)

    def blocked(self, now: float) -> float:
        """Return the seconds for which no request may go, as refusals have shown."""
        return max(0.0, self._blocked_until - now, self._found.until - now, self._rise.until - now)

    def withdraw(self, attempt: Attempt, now: float) -> None:
        """Take back a request that was let in, and was not sent after all."""
        self._end(attempt)
        self.sent -= 1
        self._withdraw_amount(attempt)
        for window, entry in attempt.told:
            window.settle(entry, 0.0, now)
        for key, sent in attempt.stated.items():
            self._stated[key].end(sent, 0.0)

    def figures_with(self, waiting: int, use: Use | None, now: float) -> PacerFigures:
        """Return what is known at `now` while requests are waiting, the next of which is expected to use `use`."""
        figures = self.figures(now)
        if use is None:
            return figures
        waits = [0.0 if self._is_stated(each.told) else each.wait(use, now) for each in self._told]
        waits += [each.wait(use, now) for each in self._stated.values()]
        seconds, limit = max(zip(waits, figures.limits, strict=True), key=lambda each: each[0], default=(0.0, None))
        if seconds <= figures.blocked_seconds:
            seconds, limit = figures.blocked_seconds, None
        return replace(figures, waiting=waiting, next_in=seconds, waits_for=limit)

    def figures(self, now: float) -> PacerFigures:
        """Return what is known at `now`."""
        told = (
            LimitFigures(each.told.kind, each.told.limit, each.told.window, each.told.limit - each.used(now), False)
            for each in self._told
        )
        stated = (
            LimitFigures(each.kind, each.limit, each.window, each.left(now), True) for each in self._stated.values()
        )
        found = self._found.rate if self._found.is_measured else None
        rate = found if self._known_window is None else self._known_window.rate
        return PacerFigures(
            sent=self.sent,
            refused=self.refused_count,
            under_way=self.under_way,
            concurrency=self.concurrency,
            found_concurrency=self._cap is not None,
            found_per_minute=None if rate is None else rate * MINUTE,
            limits=[*told, *stated],
            blocked_seconds=self.blocked(now),
            given_up=self.given_up,
        )

    def _learn_refusal(
        self,
        attempt: Attempt,
        now: float,
        retry_after: float | None,
        cause: RefusalCause | None,
        named: Sequence[StatedLimit],
    ) -> None:
        """Decide whether it was the number of requests at once or a rate that refused a request, and learn which."""
        if cause == "rate" or (cause is None and (retry_after or 0.0) >= _LONG_NAMED):
            # Nobody knows for how long a number at once will be used up.
            if self._cap is not None:
                self._cap = None
                self._overturn()
            self._refused_under_way.clear()
            self._suspicions = 0
            self._find_rate(attempt, now, retry_after, named)
            return
        if self._cap is None and self._found.rate is None and attempt.at_once > self.sharing.count:
            self._cap = ConcurrencyCap(attempt.at_once - 1)
            self._block(now + max(retry_after or 0.0, _PAUSE))
            self._refused_under_way.clear()
            self._accepted_under_way = 0
            return
        if self._cap is not None:
            self._cap.refused(attempt.at_once)
        if self._cap is None or not self._cap.strikes:
            self._refused_under_way.append(attempt.at_once)
        if self._cap is not None:
            # How many of other processes are under way is known with a delay.
            spread = 2.0 * _CAP_SPREAD if self.sharing.has_others else _CAP_SPREAD
            is_likely = self._cap.strikes < _STRIKES and alike(self._refused_under_way, spread)
            if is_likely and self._cap.value >= self.sharing.count:
                self._block(now + max(retry_after or 0.0, _PAUSE * (1 + self._cap.strikes)))
                return
            self._cap = None
            self._overturn()
            self._refused_under_way.clear()
        self._suspicions = self._suspicions + 1 if self._is_number_to_blame() else 0
        if self._suspicions > (_DOUBTS if self.sharing.has_others else 0):
            self._suspicions = 0
            self._cap = ConcurrencyCap(max(1, min(self._refused_under_way) - 1))
            self._found = FoundRate()
            self._overturn()
            self._refused_under_way.clear()
        else:
            self._find_rate(attempt, now, retry_after, named)
        if len(self._refused_under_way) <= 1:
            self._accepted_under_way = 0

    def _find_rate(self, attempt: Attempt, now: float, retry_after: float | None, named: Sequence[StatedLimit]) -> None:
        self._found.refused(attempt.amount, attempt.at, now, self._guess(named, now), retry_after)
        self.sharing.measured_rate()

    def _is_random(self, attempt: Attempt, now: float) -> bool:
        """Learn whether a refusal for which nothing is to blame came at random."""
        is_below = attempt.is_below and not self.sharing.has_others
        is_beside = bool(attempt.stated) and self._cap is None
        if self._random.refused(attempt.number, now, is_below=is_below, is_beside=is_beside):
            self._search_again(now)
        if not self._random.share:
            return False
        is_accepted = self._cap is not None and attempt.at_once < self._cap.value - _FEWER
        return is_accepted or self._random.absorbs()

    def _search_again(self, now: float) -> None:
        """Forget the limits that refusals showed which may come at random, and search for them anew."""
        rate = self._found.rate or self._recent_rate(now)
        self._found = FoundRate(self._random.begin_trial(rate, 0 if self._cap is None else self._cap.value))
        self._cap = None
        self._refused_under_way.clear()
        self._suspicions = 0

    def _learn_window(self, attempt: Attempt, now: float, retry_after: float | None) -> bool:
        """Return whether a window was known, or now is, that explains a refusal."""
        rates = [(each.rate, each.limit) for each in self._windows if each.rate]
        known = self._known_window
        for found in self._windows:
            found.withdrawn(attempt.at)
            # What one of them explains is no evidence for another.
            if known is None or found is known:
                found.refused(attempt.at, retry_after)
        if self._known_window is None:
            for rate, limit in rates:
                self._found.go_on_at(rate, float(limit), now)
            return False
        if self._cap is not None:
            self._cap = None
            self._overturn()
        self._refused_under_way.clear()
        self._suspicions = 0
        self._block(attempt.at + (retry_after or _PAUSE))
        return True

    def _withdraw_amount(self, attempt: Attempt) -> None:
        """Take a request that was refused, or not sent after all, out of what counts for limits that nothing states."""
        self._found.withdrawn(attempt.amount)
        for found in self._windows:
            found.withdrawn(attempt.at)

    def _overturn(self) -> None:
        """Note that not what was blamed so far is limited, a number at once or a rate, but the other."""
        self._verdict = max(self._verdict, self.sharing.verdict[0] - 1) + 1

    def _is_number_to_blame(self) -> bool:
        """Return whether all of the last refusals came with as many under way, and never so many were accepted."""
        refused = self._refused_under_way
        if (
            len(refused) < _EPISODES
            or min(refused) < max(_FEWEST_TO_BLAME, self.sharing.count + 1)
            or not alike(refused)
        ):
            return False
        return self._accepted_under_way <= min(refused) + 1

    def _is_stated(self, told: ToldLimit) -> bool:
        """Return whether the endpoint itself states a limit as low as this one: its own account is the better one."""
        rates = (each.limit / each.window for each in self._stated.values() if each.kind == told.kind)
        return any(0.0 < rate <= told.limit / told.window * _SAME for rate in rates)

    def _observe(self, attempt: Attempt, stated: Sequence[StatedLimit], now: float, *, refused: bool) -> float | None:
        """Learn stated limits. If one of them has too little left for the request, return how long a pause may be."""
        longest = None
        for limit in stated:
            key = (limit.kind, limit.window)
            budget = self._stated.get(key)
            if budget is None:
                budget = self._stated[key] = StatedBudget(limit.kind)
            sent = attempt.stated.get(key)
            if sent is None:
                # Sent before the limit was known: what was sent since then is not known either.
                sent = budget.earlier(attempt.use, attempt.at)
            budget.observe(sent, limit, now, refused=refused)
            if limit.remaining is not None and limit.remaining < max(
                1.0, _DIFFERS * attempt.use.at_most(limit.kind) * budget.ratio
            ):
                longest = min(_LONGEST_PAUSE, budget.window / 2.0)
        return longest

    def _forgive(self, attempt: Attempt, now: float) -> None:
        """Count no tokens of a request that was not computed; as a request it may count all the same."""
        for key, sent in attempt.stated.items():
            self._stated[key].end(sent, 0.0)
        for window, entry in attempt.told:
            if window.told.kind != "requests":
                window.settle(entry, 0.0, now)

    def _surge_rate(self, now: float) -> float:
        """Return the requests a second above which none go: more at once come with more answers, not in one burst."""
        if self._cap is not None:
            since = max(0.0, min(now - self._blocked_until, 10.0))
            # Beside other processes, what this one sends more they send less.
            least = self._first_surge if self.sharing.has_others else 1.0
            return min(least + _CAPPED_SURGE * self._answers.rate, float(_AFTER_REFUSAL * 2.0 ** (since / _PAUSE)))
        # What a window admits may go faster than what was left of the one before it.
        again = _WINDOW_SURGE if self._is_in_window else 1.0
        return max(self._first_surge + _MOST_SURGE * self._answers.rate, again * self._most_answered)

    def _at_once(self) -> int:
        """Return how many requests are under way of all processes: the others have their parts, if parts are known."""
        if self._cap is None:
            return self.under_way + self.sharing.under_way
        return self.under_way + self._cap.value - self.sharing.places(self._cap.value)

    def _end(self, attempt: Attempt) -> None:
        if attempt.ended:
            raise RuntimeError("the outcome of a request is told twice")
        attempt.ended = True
        self.under_way -= 1

    def _block(self, until: float) -> None:
        self._blocked_until = max(self._blocked_until, until)

    def _ramp(self, now: float) -> None:
        """Let more requests be under way where their number is not what bounds them."""
        if self.is_rate_known and self.under_way >= self.search.value and now - self._ramped_at >= _RAMP:
            self._ramped_at = now
            self.search.raise_to(self.search.level * 2.0)

    def _remember(self, attempt: Attempt, now: float) -> None:
        self._recent.append(attempt)
        while self._recent[0].at < now - _RECENT:
            self._recent.popleft()

    def _guess(self, named: Sequence[StatedLimit], now: float) -> float:
        """Return the rate from which to begin: that of the text of a refusal, unless far more was accepted of late."""
        mean = Use(self._mean_input, self._mean_tokens - self._mean_input)
        rates = [each.limit / (each.window or MINUTE) / max(mean.of(each.kind), 1.0) for each in named]
        recent = self._recent_rate(now)
        return max(min(rates, default=0.0), recent / (_FAR_MORE if rates else 2.0))

    def _recent_rate(self, now: float) -> float:
        if not self._recent:
            return 1.0
        seconds = max(now - self._recent[0].at, 0.5)
        return max(sum(each.amount for each in self._recent), 1.0) / seconds
