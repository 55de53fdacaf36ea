"""`Pacer`: when the next request may be sent to a remote endpoint, for one address, key and model.

It obeys all of these: limits that the user states (`SlidingWindow`); limits that answers state (`StatedBudget`); those
that refusals show and that no stated limit explains (`UnstatedLimits`); how fast usage may rise, as shown by refusals
that say so (`RiseLimit`); and the number of requests beyond which no more is delivered (`ConcurrencySearch`).

Pure: times are arguments, in seconds of any clock that only goes forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchwright.decayed_rate import DecayedRate
from batchwright.pacing.attempt import Attempt, StatedKey
from batchwright.pacing.concurrency import FIRST_LEVEL, ConcurrencySearch
from batchwright.pacing.expected_use import ExpectedUse
from batchwright.pacing.figures import LimitFigures, PacerFigures
from batchwright.pacing.limits import MINUTE, ConfiguredLimit, Use
from batchwright.pacing.pace import Pace
from batchwright.pacing.rise_limit import RiseLimit
from batchwright.pacing.sharing import Note, Sharing
from batchwright.pacing.sliding_window import SlidingWindow
from batchwright.pacing.stated_budget import StatedBudget
from batchwright.pacing.unstated_limits import PAUSE, UnstatedLimits
from batchwright.wire.rate_limits import RefusalCause, StatedLimit

_PREDICTED = 2
"""Refusals in a row after which what was stated is not enough to predict the next one."""
_LONGEST_PAUSE = 5.0
_AFTER_REFUSAL = 10.0
"""Requests per second with which it resumes after a pause, doubled after each further `PAUSE` seconds."""
_RAMP = 1.0
"""Seconds in which the number of concurrent requests may double if a rate limit bounds them anyway."""
_FIRST_SURGE = 16.0
"""Requests per second that may be sent before any was answered."""
_MOST_SURGE = 2.0
"""Requests that may be sent for each answer, so that their number doubles in the time of an answer."""
_WINDOW_SURGE = 2.0
"""Multiple of the most answers per second at which a window's admitted requests are sent."""
_CAPPED_SURGE = 1.5
_SURGE_OVER = 3.0
_DIFFERS = 1.5
"""Multiple of a request's expected amount that the endpoint may count for it."""
_SAME = 1.001
_MEMORY = 0.98
_GUIDED = 10.0
"""Seconds after an engine last reported its queue for which that counts for more than the delivered rate."""


class Pacer:
    """Decides when requests are sent.

    `most`: concurrent requests, never exceeded; `configured`: limits that the user configures; `first`: concurrent
    requests to begin with, by default a few; `rank`: a number above 0, unique among the processes that share the
    limits.
    """

    def __init__(
        self, most: int, configured: Sequence[ConfiguredLimit] = (), *, first: int = FIRST_LEVEL, rank: float = 1.0
    ) -> None:
        self.sharing = Sharing(rank)
        self.expected = ExpectedUse()
        self.search = ConcurrencySearch(most, first=first)
        self._first_surge = float(max(_FIRST_SURGE, first))
        self.under_way = 0
        self.sent = 0
        self.refused_count = 0
        """Requests refused because of a limit."""
        self.given_up = 0
        """Requests abandoned without waiting for the answer."""
        self._configured = [SlidingWindow(each) for each in configured]
        self._stated: dict[StatedKey, StatedBudget] = {}
        self._unstated = UnstatedLimits(self.sharing, self.search)
        self._rise = RiseLimit()
        self._guided_at = float("-inf")
        """When the engine last reported its queue."""
        self._refused_at = float("-inf")
        """When the last refusal that taught something was known."""
        self._explained = 0
        """Refusals in a row that stated limits explain."""
        self._mean_tokens = self._mean_input = 0.0
        self._sent_amount = 0.0
        self._ramped_at = float("-inf")
        self._surge = Pace()
        self._answers = DecayedRate(_SURGE_OVER)
        self._most_answered = 0.0
        """Most answers per second since usage was last said to rise too fast: a rate allowed again after a pause."""
        self._answered_at = float("inf")

    @property
    def concurrency(self) -> int:
        """Number of requests that may be under way."""
        value = self.search.value
        cap = self._unstated.cap
        return value if cap is None else min(value, self.sharing.places(cap.value))

    @property
    def _is_in_window(self) -> bool:
        return self._unstated.is_in_window or any(each.is_window or each.slides for each in self._stated.values())

    @property
    def is_rate_known(self) -> bool:
        """Whether a rate limit is configured, stated or found."""
        return bool(self._configured or self._stated) or self._unstated.is_rate_known

    def wait(self, use: Use, now: float, *, is_urgent: bool = False) -> float:
        """Return the seconds until a request that is expected to use `use` may go; infinite: only after one ends.

        An `is_urgent` request obeys the limits, but need not wait its turn.
        """
        self._ramp(now)
        if self.under_way >= self.concurrency:
            return float("inf")
        wait = max(self._unstated.wait(now), self._rise.wait(now), 0.0)
        if not is_urgent:
            wait = max(wait, self._surge.wait(self._surge_rate(now), now))
        for window in self._configured:
            if not self._is_stated(window.configured):
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
        is_below, number = self._unstated.begin(amount, now)
        self._rise.begin(now)
        self._surge.take(1.0, self._surge_rate(now), now)
        attempt = Attempt(
            use,
            now,
            self.under_way,
            self._unstated.at_once(self.under_way),
            amount,
            self.search.epoch,
            0 if self._unstated.cap is None else self._unstated.cap.epoch,
            is_below,
            number,
            [(window, window.begin(use, now)) for window in self._configured],
            {key: budget.begin(use, now) for key, budget in self._stated.items()},
        )
        self._unstated.remember(attempt, now)
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
        """Learn from an answer, its usage (None: not reported) and the limits that it states."""
        self._end(attempt)
        self._answers.elapse(min(max(0.0, now - self._answered_at), _SURGE_OVER))
        self._answers.add()
        self._answered_at = now
        self._most_answered = max(self._most_answered, min(self._answers.rate, self._answers.events / _SURGE_OVER))
        used = Use(
            attempt.use.input_tokens if input_tokens is None else input_tokens,
            attempt.use.output_tokens if output_tokens is None else output_tokens,
        )
        self.expected.learn(attempt.use, input_tokens, output_tokens)
        for window, entry in attempt.configured:
            window.settle(entry, used.of(window.configured.kind), now)
        if attempt.at > self._refused_at:
            self._explained = 0
            self._rise.accepted()
        tokens = used.output_tokens or used.input_tokens
        is_guided = now - self._guided_at < _GUIDED
        self.search.succeeded(attempt.epoch, attempt.under_way, tokens, now - attempt.at, is_guided=is_guided)
        self._unstated.accepted(attempt)
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
    ) -> bool:
        """Learn that a request was refused because of a limit; return whether others have to wait.

        `cause`: what the refusal blames, if it says; `named`: limits in its text, used only as a hint, since it does
        not say how they are counted, nor always their window.
        """
        self._end(attempt)
        self.refused_count += 1
        self._forgive(attempt, now)
        self._rise.withdrawn(attempt.at)
        explained = self._observe(attempt, stated, now, refused=True)
        if explained is not None:
            self._unstated.withdrawn(attempt)
            if attempt.at > self._refused_at:
                self._refused_at = now
                self._explained += 1
                pause = PAUSE * 2.0 ** min(self._explained - _PREDICTED, 8) if self._explained > _PREDICTED else 0.0
                self._unstated.block(now + max(min(explained, pause), retry_after or 0.0))
            return True
        if attempt.at <= self._refused_at:
            self._unstated.refused_together(attempt)
        elif cause == "rise":
            self._refused_at = now
            self._most_answered = 0.0
            self._rise.refused(now, retry_after)
            self._unstated.withdrawn(attempt)
        elif self._unstated.refused(
            attempt, now, self._refused_at, retry_after=retry_after, cause=cause, named=self._rates(named)
        ):
            self._refused_at = now
        else:
            return self.blocked(now) > 0.0
        return True

    def overloaded(self, attempt: Attempt, now: float, retry_after: float | None = None) -> None:
        """Learn that the endpoint was too busy for a request (408, 503, 529), or did not answer it in time."""
        self._end(attempt)
        self._forgive(attempt, now)
        self._unstated.withdrawn(attempt)
        self._rise.withdrawn(attempt.at)
        if self.search.overloaded(attempt.epoch) and retry_after is not None:
            self._unstated.block(now + retry_after)

    def failed(self, attempt: Attempt) -> None:
        """Note that a request failed for a reason that says nothing about limits."""
        self._end(attempt)
        for key, sent in attempt.stated.items():
            self._stated[key].end(sent, attempt.use.of(key[0]))

    def gave_up(self, attempt: Attempt) -> None:
        """Note that a request was abandoned: its answer is no longer waited for."""
        self.given_up += 1
        self.failed(attempt)

    def rejected(self, attempt: Attempt, now: float) -> None:
        """Note the refusal of a request that will never be accepted, such as one larger than a limit."""
        self._end(attempt)
        self._forgive(attempt, now)
        self._unstated.withdrawn(attempt)
        self._rise.withdrawn(attempt.at)

    def note(self, now: float, waiting: int = 0) -> dict[str, float]:
        """Return what to publish to other processes while `waiting` requests wait; empty if there is nothing."""
        if not (self.under_way or waiting or any(window.used(now) for window in self._configured)):
            return {}
        is_held_back = self.under_way < self.concurrency
        note = self.sharing.note(now, self._sent_amount, self.under_way, waiting, is_held_back=is_held_back)
        note |= {"refused": self.refused_count, "size": self._mean_tokens}
        for window in self._configured:
            note |= window.note(now, self.sharing)
        return note | self._unstated.note()

    def share(self, notes: Sequence[Note], now: float, *, since: float | None = None) -> None:
        """Learn the notes of other processes with the same key; `since`: when there began to be others, if known."""
        if since is not None and not self.sent:
            self.sharing.hear_until(since)
        keep = max((each.configured.window for each in self._configured), default=MINUTE)
        was_refused = self.sharing.learn(notes, now, keep=keep)
        for window in self._configured:
            window.share(self.sharing)
        self._unstated.share(now, was_refused=was_refused)

    def guide(self, running: float, waiting: float, now: float) -> None:
        """Learn from the engine's own figures how many requests it computes and how many wait."""
        self._guided_at = now
        self.search.guide(running, waiting, self.under_way)

    def blocked(self, now: float) -> float:
        """Return the seconds for which no request may go, as refusals have shown."""
        return max(0.0, self._unstated.blocked(now), self._rise.until - now)

    def withdraw(self, attempt: Attempt, now: float) -> None:
        """Take back a request that was admitted but not sent after all."""
        self._end(attempt)
        self.sent -= 1
        self._unstated.withdrawn(attempt)
        self._rise.withdrawn(attempt.at)
        for window, entry in attempt.configured:
            window.settle(entry, 0.0, now)
        for key, sent in attempt.stated.items():
            self._stated[key].end(sent, 0.0)

    def figures_with(self, waiting: int, use: Use | None, now: float) -> PacerFigures:
        """Return the figures at `now` while `waiting` requests wait, the next of which is expected to use `use`."""
        figures = self.figures(now)
        if use is None:
            return figures
        waits = [0.0 if self._is_stated(each.configured) else each.wait(use, now) for each in self._configured]
        waits += [each.wait(use, now) for each in self._stated.values()]
        seconds, limit = max(zip(waits, figures.limits, strict=True), key=lambda each: each[0], default=(0.0, None))
        if seconds <= figures.blocked_seconds:
            seconds, limit = figures.blocked_seconds, None
        return replace(figures, waiting=waiting, next_in=seconds, waits_for=limit)

    def figures(self, now: float) -> PacerFigures:
        """Return the figures at `now`."""
        configured = (
            LimitFigures(
                each.configured.kind,
                each.configured.limit,
                each.configured.window,
                each.configured.limit - each.used(now),
                False,
            )
            for each in self._configured
        )
        stated = (
            LimitFigures(each.kind, each.limit, each.window, each.left(now), True) for each in self._stated.values()
        )
        rate = self._unstated.rate
        return PacerFigures(
            sent=self.sent,
            refused=self.refused_count,
            under_way=self.under_way,
            concurrency=self.concurrency,
            found_concurrency=self._unstated.cap is not None,
            found_per_minute=None if rate is None else rate * MINUTE,
            limits=[*configured, *stated],
            blocked_seconds=self.blocked(now),
            given_up=self.given_up,
        )

    def _is_stated(self, configured: ConfiguredLimit) -> bool:
        """Return whether the endpoint states what remains of a limit as low as this one: that is more accurate."""
        counted = (each for each in self._stated.values() if each.kind == configured.kind and each.is_counted)
        rates = (each.limit / each.window for each in counted)
        return any(0.0 < rate <= configured.limit / configured.window * _SAME for rate in rates)

    def _observe(self, attempt: Attempt, stated: Sequence[StatedLimit], now: float, *, refused: bool) -> float | None:
        """Learn stated limits. If one of them has too little left for the request, return the longest useful pause."""
        longest = None
        for limit in stated:
            key = (limit.kind, limit.window)
            budget = self._stated.get(key)
            if budget is None:
                budget = self._stated[key] = StatedBudget(limit.kind)
            sent = attempt.stated.get(key)
            if sent is None:
                # Sent before the limit was known: what has been sent since is not known either.
                sent = budget.earlier(attempt.use, attempt.at)
            budget.observe(sent, limit, now, refused=refused)
            if limit.remaining is not None and limit.remaining < max(
                1.0, _DIFFERS * attempt.use.at_most(limit.kind) * budget.ratio
            ):
                longest = max(longest or 0.0, min(_LONGEST_PAUSE, budget.window / 2.0))
        return longest

    def _forgive(self, attempt: Attempt, now: float) -> None:
        """Count no tokens for a request that was not computed; it may still count as a request."""
        for key, sent in attempt.stated.items():
            self._stated[key].end(sent, 0.0)
        for window, entry in attempt.configured:
            if window.configured.kind != "requests":
                window.settle(entry, 0.0, now)

    def _surge_rate(self, now: float) -> float:
        """Return the most requests per second: concurrency grows with answers, not in one burst."""
        if self._unstated.cap is not None:
            since = max(0.0, min(now - self._unstated.blocked_until, 10.0))
            # With other processes, whatever more this one sends, they send less.
            least = self._first_surge if self.sharing.has_others else 1.0
            return min(least + _CAPPED_SURGE * self._answers.rate, float(_AFTER_REFUSAL * 2.0 ** (since / PAUSE)))
        # What a window admits may be sent faster than what was left of the previous one.
        again = _WINDOW_SURGE if self._is_in_window else 1.0
        return max(self._first_surge + _MOST_SURGE * self._answers.rate, again * self._most_answered)

    def _end(self, attempt: Attempt) -> None:
        if attempt.ended:
            raise RuntimeError("the outcome of a request is noted twice")
        attempt.ended = True
        self.under_way -= 1

    def _ramp(self, now: float) -> None:
        """Let more requests be under way if their number is not what bounds them."""
        if self.is_rate_known and self.under_way >= self.search.value and now - self._ramped_at >= _RAMP:
            self._ramped_at = now
            self.search.raise_to(self.search.level * 2.0)

    def _rates(self, named: Sequence[StatedLimit]) -> list[float]:
        """Return the limits named in the text of a refusal, in requests of the mean size per second."""
        mean = Use(self._mean_input, self._mean_tokens - self._mean_input)
        return [each.limit / (each.window or MINUTE) / max(mean.of(each.kind), 1.0) for each in named]
