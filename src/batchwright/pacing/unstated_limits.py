"""`UnstatedLimits`: limits that an endpoint does not state, learned from what it refuses and accepts.

A refusal that blames a rate is believed. The first of the others is attributed to too many concurrent requests
(`ConcurrencyCap`); if others come with clearly different numbers under way, or several in a row with hardly any answers
between them, it was a rate (`FoundRate`), unless windows explain it (`FoundWindow`, `FoundSlidingWindow`) or it came at
random (`RandomRefusals`).

Pure: times are arguments, in seconds of any clock that only goes forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from batchwright.pacing.attempt import Attempt
from batchwright.pacing.concurrency import ConcurrencyCap, ConcurrencySearch, alike
from batchwright.pacing.found_rate import FoundRate
from batchwright.pacing.found_sliding_window import FoundSlidingWindow
from batchwright.pacing.found_window import FoundWindow
from batchwright.pacing.random_refusals import RandomRefusals
from batchwright.pacing.sharing import PERIOD, Sharing
from batchwright.wire.rate_limits import RefusalCause

PAUSE = 0.25
"""Seconds without a request after a refusal, during which those on the way will be refused too."""
_EPISODES = 3
"""Refusals with the same number of requests under way that show a limit on that number."""
_DOUBTS = 3
"""Times that they must show it again if other processes send too, since their number is known with a delay."""
_FEWEST_TO_BLAME = 3
_STRIKES = 4
"""Refusals in a row with ever fewer requests under way that show that their number is not to blame."""
_LONG_NAMED = 10.0
"""Shortest pause named by a refusal, in seconds, that shows that concurrency is not to blame."""
_CAP_SPREAD = 0.1
"""Share by which the numbers under way at refusals may differ if concurrency is to blame."""
_FREE_SHARE, _FIRST_FREE, _MOST_FREE = 0.075, 6.0, 10.0
"""Share of requests that is assumed to be refused at random despite stated or configured limits, number of such
refusals assumed at first, and the most in a row."""
_RECENT = 10.0
_FAR_MORE = 4.0
"""Multiple of the rate named in the text of a refusal that, if accepted, shows that it is not that rate."""


class UnstatedLimits:
    """A rate, a window or a concurrency limit that refusals have shown."""

    def __init__(self, sharing: Sharing, search: ConcurrencySearch) -> None:
        self.cap: ConcurrencyCap | None = None
        self.blocked_until = float("-inf")
        """End of the pause after a refusal, unless `_rate` keeps it."""
        self._sharing = sharing
        self._search = search
        self._rate = FoundRate()
        self._random = RandomRefusals()
        self._windows = (FoundWindow(), FoundSlidingWindow())
        self._refused_under_way: deque[int] = deque(maxlen=_EPISODES)
        self._accepted_under_way = 0
        """Most requests under way when one was accepted since the first refusal of the present series."""
        self._suspicions = 0
        """Refusals in a row for which concurrency may be to blame rather than a rate."""
        self._verdict = 0
        """Times that refusals have shown that a rate is limited and not concurrency, or the reverse."""
        self._recent: deque[Attempt] = deque()
        self._tried_epoch: int | None = None
        """Epoch of the concurrency limit under trial when a request beyond the proven number was last refused."""
        self._free = _FIRST_FREE
        """Refusals ignored if they come now, while known limits have enough left and none has taught anything."""

    @property
    def _known_window(self) -> FoundWindow | FoundSlidingWindow | None:
        return next((each for each in self._windows if each.rate), None)

    @property
    def is_in_window(self) -> bool:
        """Whether a window admits immediately what is left of it."""
        return self._known_window is not None or self._rate.is_in_window

    @property
    def is_rate_known(self) -> bool:
        """Whether a rate limit is known, if only as a guess."""
        return self._known_window is not None or self._rate.rate is not None

    @property
    def rate(self) -> float | None:
        """Requests of the mean size that are admitted per second; None: no refusals have shown it."""
        if self._known_window is not None:
            return self._known_window.rate
        return self._rate.rate if self._rate.is_measured else None

    def at_once(self, under_way: int) -> int:
        """Return how many requests all processes have under way; others count with their parts, if those are known."""
        if self.cap is None:
            return under_way + self._sharing.under_way
        return under_way + self.cap.value - self._sharing.places(self.cap.value)

    def wait(self, now: float) -> float:
        """Return the seconds until the next request may go; 0 or less: immediately."""
        return max(self.blocked_until - now, (self._known_window or self._rate).wait(now))

    def blocked(self, now: float) -> float:
        """Return the seconds left of the pause after a refusal; 0 or less: none."""
        return max(self.blocked_until, self._rate.until) - now

    def block(self, until: float) -> None:
        """Let no request go until then."""
        self.blocked_until = max(self.blocked_until, until)

    def begin(self, amount: float, now: float) -> tuple[bool, int]:
        """Count a request that is sent; return whether it is below the limits that are known, and its number."""
        self._free = min(_MOST_FREE, self._free + _FREE_SHARE)
        is_below = self._rate.is_below or (self.cap is not None and self.cap.is_below)
        is_below = is_below and not self._sharing.has_others
        self._rate.begin(amount, now)
        for window in self._windows:
            window.begin(now)
        return is_below, self._random.sent(is_below=is_below)

    def remember(self, attempt: Attempt, now: float) -> None:
        """Remember a request that was sent until a rate is known."""
        if self._rate.rate is not None:
            return
        self._recent.append(attempt)
        while self._recent[0].at < now - _RECENT:
            self._recent.popleft()

    def accepted(self, attempt: Attempt) -> None:
        """Learn that a request was answered."""
        self._accepted_under_way = max(self._accepted_under_way, attempt.at_once)
        if self.cap is not None:
            weight = self.cap.value / self._sharing.places(self.cap.value)
            may_probe = self._sharing.may_probe(self.cap.epoch + 1)
            self.cap.succeeded(attempt.cap_epoch, attempt.at_once, weight=weight, may_probe=may_probe)

    def withdrawn(self, attempt: Attempt) -> None:
        """Stop counting a request that was refused, or was not sent after all."""
        self._rate.withdrawn(attempt.amount)
        for window in self._windows:
            window.withdrawn(attempt.at)

    def refused_together(self, attempt: Attempt) -> None:
        """Note that a request was refused while another refused one was under way: the two are one event."""
        self._random.refused_together(attempt.number, is_below=attempt.is_below)
        self.withdrawn(attempt)

    def refused(
        self,
        attempt: Attempt,
        now: float,
        refused_before: float,
        *,
        retry_after: float | None = None,
        cause: RefusalCause | None = None,
        named: Sequence[float] = (),
    ) -> bool:
        """Learn that a request was refused; return whether anything was learned from it.

        `refused_before`: when the last refusal that taught something was known; `named`: rates that the refusal names,
        in requests of the mean size per second.
        """
        if self.cap is not None and self._sharing.has_others and attempt.at <= refused_before + PERIOD:
            # The other processes have not heard of the last refusal yet.
            self.withdrawn(attempt)
            self.block(now + max(retry_after or 0.0, PAUSE))
            return False
        if cause is None and (retry_after or 0.0) < _LONG_NAMED and self._is_random(attempt, now):
            self.withdrawn(attempt)
            self._search.overloaded(attempt.epoch)  # as by an endpoint that is too busy
            return False
        if not self._sharing.has_others and self._is_window(attempt, now, retry_after):
            self._rate.withdrawn(attempt.amount)
            return True
        is_first = self._rate.rate is None
        self._learn(attempt, now, retry_after, cause, named)
        # The first guess comes from what was sent; a later one, from how far the pace had risen, says nothing.
        rate = self._rate.rate if is_first or self._rate.is_measured else None
        self._random.found(rate or 0.0, 0 if self.cap is None else self.cap.value, now)
        return True

    def note(self) -> dict[str, float]:
        """Return what to publish to other processes."""
        note: dict[str, float] = {"verdict": self._verdict + 1}
        if self.cap is not None:
            note |= {"cap": self.cap.value, "cap epoch": self.cap.epoch + 1}
        elif self._rate.rate is not None and self._rate.is_measured and self._sharing.is_hungry:
            note |= {"rate": self._rate.rate / self._sharing.rate_part, "known": self._rate.amounts}
        return note

    def share(self, now: float, *, was_refused: bool) -> None:
        """Learn what other processes have published; `was_refused`: whether one of them was recently refused."""
        if was_refused:
            self._rate.be_sure(now)
        if self._sharing.has_others:
            # Each process sees only some of the requests, so they share the rate of the windows instead.
            if (known := self._known_window) is not None:
                self._rate.go_on_at(known.rate, float(known.limit), now)
            for window in self._windows:
                window.forget()
        latest, is_cap = self._sharing.verdict
        # A process that has found nothing takes over what others found. If two findings differ, refusals would soon
        # disprove a concurrency limit.
        is_open = self.cap is None and (is_cap or not self._rate.is_measured)
        if latest > self._verdict + (0 if is_open else 1):
            self._verdict = latest - 1
            self._refused_under_way.clear()
            if is_cap:
                self._rate, self.cap = FoundRate(), ConcurrencyCap(1)
            else:
                self.cap = None
        if self.cap is not None:
            if (cap := self._sharing.latest_cap(self._verdict + 1)) is not None:
                self.cap.take_over(cap[0], cap[1] - 1)
        elif (whole := self._sharing.whole_rate(self._rate)) is not None:
            self._rate.go_on_at(self._sharing.part_of_rate(whole[0]), whole[1], now)
            self._rate.weight = 1.0 / self._sharing.rate_part

    def _is_random(self, attempt: Attempt, now: float) -> bool:
        """Learn whether a refusal that blames nothing came at random."""
        if self._sharing.has_others:
            return False
        is_beside = bool(attempt.stated) and self.cap is None
        if self._random.refused(attempt.number, now, is_below=attempt.is_below, is_beside=is_beside):
            self._search_again(now)
        if self._random.share:
            return not self._is_disproved(attempt) and self._random.absorbs()
        is_free = bool(attempt.stated or attempt.configured) and self.cap is None and not self.is_rate_known
        if not is_free or self._free < 1.0:
            return False
        self._free -= 1.0
        return True

    def _is_disproved(self, attempt: Attempt) -> bool:
        """Return whether refusals disprove the concurrency limit being tried: otherwise it would be tried forever."""
        if self.cap is None or attempt.at_once <= self.cap.proven:
            return False
        is_same = self._tried_epoch == self.cap.epoch
        self._tried_epoch = self.cap.epoch
        return is_same

    def _search_again(self, now: float) -> None:
        """Forget the limits shown by refusals that may be random, and search for them again."""
        rate = self._rate.rate or self._recent_rate(now)
        self._rate = FoundRate(self._random.begin_trial(rate, 0 if self.cap is None else self.cap.value))
        self.cap = None
        self._refused_under_way.clear()
        self._suspicions = 0

    def _is_window(self, attempt: Attempt, now: float, retry_after: float | None) -> bool:
        """Learn about windows from a refusal, and return whether one is known now."""
        rates = [(each.rate, each.limit) for each in self._windows if each.rate]
        known = self._known_window
        for window in self._windows:
            window.withdrawn(attempt.at)
            # What one of them explains is no evidence for another.
            if known is None or window is known:
                window.refused(attempt.at, retry_after)
        if self._known_window is None:
            for rate, limit in rates:
                self._rate.go_on_at(rate, float(limit), now)
            return False
        self._blame_rate()
        self.block(attempt.at + (retry_after or PAUSE))
        return True

    def _learn(
        self,
        attempt: Attempt,
        now: float,
        retry_after: float | None,
        cause: RefusalCause | None,
        named: Sequence[float],
    ) -> None:
        """Decide whether concurrency or a rate caused a refusal, and learn which."""
        if cause == "rate" or (cause is None and (retry_after or 0.0) >= _LONG_NAMED):
            # An endpoint cannot know for how long a concurrency limit will be used up.
            self._blame_rate()
            self._find_rate(attempt, now, retry_after, named)
            return
        if self.cap is None and self._rate.rate is None and attempt.at_once > self._sharing.count:
            self.cap = ConcurrencyCap(attempt.at_once - 1)
            self.block(now + max(retry_after or 0.0, PAUSE))
            self._refused_under_way.clear()
            self._accepted_under_way = 0
            return
        if self.cap is not None:
            self.cap.refused(attempt.at_once)
        if self.cap is None or not self.cap.strikes:
            self._refused_under_way.append(attempt.at_once)
        if self.cap is not None:
            # The number under way in other processes is known with a delay.
            spread = 2.0 * _CAP_SPREAD if self._sharing.has_others else _CAP_SPREAD
            is_likely = self.cap.strikes < _STRIKES and alike(self._refused_under_way, spread)
            if is_likely and self.cap.value >= self._sharing.count:
                self.block(now + max(retry_after or 0.0, PAUSE * (1 + self.cap.strikes)))
                return
            self.cap = None
            self._overturn()
            self._refused_under_way.clear()
        self._suspicions = self._suspicions + 1 if self._is_number_to_blame() else 0
        if self._suspicions > (_DOUBTS if self._sharing.has_others else 0):
            self._suspicions = 0
            self.cap = ConcurrencyCap(max(1, min(self._refused_under_way) - 1))
            self._rate = FoundRate()
            self._overturn()
            self._refused_under_way.clear()
        else:
            self._find_rate(attempt, now, retry_after, named)
        if len(self._refused_under_way) <= 1:
            self._accepted_under_way = 0

    def _blame_rate(self) -> None:
        """Forget any concurrency limit, known or suspected."""
        if self.cap is not None:
            self.cap = None
            self._overturn()
        self._refused_under_way.clear()
        self._suspicions = 0

    def _find_rate(self, attempt: Attempt, now: float, retry_after: float | None, named: Sequence[float]) -> None:
        # Begin at the rate in the text of the refusal, unless far more was recently sent.
        guess = max(min(named, default=0.0), self._recent_rate(now) / (_FAR_MORE if named else 2.0))
        self._rate.refused(attempt.amount, attempt.at, now, guess, retry_after)
        self._sharing.measured_rate()

    def _overturn(self) -> None:
        """Note that the verdict is reversed: from concurrency to a rate, or from a rate to concurrency."""
        self._verdict = max(self._verdict, self._sharing.verdict[0] - 1) + 1

    def _is_number_to_blame(self) -> bool:
        """Return whether all recent refusals came with the same number under way, and that many were never accepted."""
        refused = self._refused_under_way
        if (
            len(refused) < _EPISODES
            or min(refused) < max(_FEWEST_TO_BLAME, self._sharing.count + 1)
            or not alike(refused)
        ):
            return False
        return self._accepted_under_way <= min(refused) + 1

    def _recent_rate(self, now: float) -> float:
        if not self._recent:
            return 1.0
        seconds = max(now - self._recent[0].at, 0.5)
        return max(sum(each.amount for each in self._recent), 1.0) / seconds
