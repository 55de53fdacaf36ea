"""`UnstatedLimits`: limits that an endpoint does not state, learned from what it refuses and accepts.

A refusal that blames a rate is believed. Of the others the first is taken for one of too many requests at once
(`ConcurrencyCap`); if another comes with fewer under way than were accepted before, it was a rate (`FoundRate`), unless
windows explain it (`FoundWindow`, `FoundSlidingWindow`) or it came at random (`RandomRefusals`).

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
"""Seconds without a request after a refusal, in which those that are on their way will be refused too."""
_EPISODES = 3
"""Refusals with the same number of requests under way that show a limit on that number."""
_DOUBTS = 3
"""Times that they must show it again where others send too, whose number is known with a delay."""
_FEWEST_TO_BLAME = 3
_STRIKES = 4
"""Refusals in a row with ever fewer requests under way that show that not their number is to blame."""
_LONG_NAMED = 10.0
"""Seconds of a pause that a refusal names which show that no number at once is to blame."""
_CAP_SPREAD = 0.1
"""Share by which numbers of requests at once that are refused may differ where the number is to blame."""
_FREE_SHARE, _FIRST_FREE, _MOST_FREE = 0.075, 6.0, 10.0
"""Share of requests beside limits that are stated or configured which are taken to be refused at random, such
refusals that are taken for it at first, and in a row at most."""
_RECENT = 10.0
_FAR_MORE = 4.0
"""Times the rate that the text of a refusal names which show, if accepted, that it is not that rate."""


class UnstatedLimits:
    """A rate, a window or a number of requests at once that refusals have shown."""

    def __init__(self, sharing: Sharing, search: ConcurrencySearch) -> None:
        self.cap: ConcurrencyCap | None = None
        self.blocked_until = float("-inf")
        """End of the pause after a refusal for another reason than a rate."""
        self._sharing = sharing
        self._search = search
        self._rate = FoundRate()
        self._random = RandomRefusals()
        self._windows = (FoundWindow(), FoundSlidingWindow())
        self._refused_under_way: deque[int] = deque(maxlen=_EPISODES)
        self._accepted_under_way = 0
        """Most requests that were under way when one was accepted since the last refusal."""
        self._suspicions = 0
        """Refusals in a row for which a number at once may be to blame rather than a rate."""
        self._verdict = 0
        """Times that refusals have shown that not a number at once but a rate is limited, or the reverse."""
        self._recent: deque[Attempt] = deque()
        self._tried_epoch: int | None = None
        """Epoch of a number at once that was tried when a request beyond what is proven was last refused."""
        self._free = _FIRST_FREE
        """Refusals beside limits that leave enough which teach nothing if they come now, as long as none has."""

    @property
    def _known_window(self) -> FoundWindow | FoundSlidingWindow | None:
        return next((each for each in self._windows if each.rate), None)

    @property
    def is_in_window(self) -> bool:
        """Whether a window admits at once what is left of it."""
        return self._known_window is not None or self._rate.is_in_window

    @property
    def is_rate_known(self) -> bool:
        """Whether a limit on a rate is known, if only by a guess."""
        return self._known_window is not None or self._rate.rate is not None

    @property
    def rate(self) -> float | None:
        """Requests of the mean size that are admitted in a second; None: no refusals have shown it."""
        if self._known_window is not None:
            return self._known_window.rate
        return self._rate.rate if self._rate.is_measured else None

    def at_once(self, under_way: int) -> int:
        """Return how many requests are under way of all processes: the others have their parts, if parts are known."""
        if self.cap is None:
            return under_way + self._sharing.under_way
        return under_way + self.cap.value - self._sharing.places(self.cap.value)

    def wait(self, now: float) -> float:
        """Return the seconds until the next request may go; 0 or less: at once."""
        return max(self.blocked_until - now, (self._known_window or self._rate).wait(now))

    def blocked(self, now: float) -> float:
        """Return the seconds of the pause after a refusal that are left; 0 or less: none."""
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
        """Keep a request that was sent in mind until a rate is known."""
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
        """Take a request that was refused, or not sent after all, out of what counts."""
        self._rate.withdrawn(attempt.amount)
        for window in self._windows:
            window.withdrawn(attempt.at)

    def refused_together(self, attempt: Attempt) -> None:
        """Note that a request was refused which was under way with another one that was: that is one event."""
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
        """Learn that a request was refused; return whether that has taught anything.

        `refused_before`: when the last refusal was known that did; `named`: rates, in requests of the mean size a
        second, that the refusal names.
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
        # The first guess is from what was accepted; a later one, from how far the pace had risen, says nothing.
        rate = self._rate.rate if is_first or self._rate.is_measured else None
        self._random.found(rate or 0.0, 0 if self.cap is None else self.cap.value, now)
        return True

    def note(self) -> dict[str, float]:
        """Return what other processes are to know."""
        note: dict[str, float] = {"verdict": self._verdict + 1}
        if self.cap is not None:
            note |= {"cap": self.cap.value, "cap epoch": self.cap.epoch + 1}
        elif self._rate.rate is not None and self._rate.is_measured and self._sharing.is_hungry:
            note |= {"rate": self._rate.rate / self._sharing.rate_part, "known": self._rate.amounts}
        return note

    def share(self, now: float, *, was_refused: bool) -> None:
        """Learn what other processes have published; `was_refused`: whether one of them was refused lately."""
        if was_refused:
            self._rate.be_sure(now)
        if self._sharing.has_others:
            # Each process sees a part of the requests only, so they share the rate of the windows instead.
            if (known := self._known_window) is not None:
                self._rate.go_on_at(known.rate, float(known.limit), now)
            for window in self._windows:
                window.forget()
        latest, is_cap = self._sharing.verdict
        # Who has found nothing takes over what there is. Of two that differ, a number at once is the one that refusals
        # would soon disprove.
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
        """Learn whether a refusal for which nothing is to blame came at random."""
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
        """Return whether refusals disprove a number at once that is tried: else it would be tried for ever."""
        if self.cap is None or attempt.at_once <= self.cap.proven:
            return False
        is_same = self._tried_epoch == self.cap.epoch
        self._tried_epoch = self.cap.epoch
        return is_same

    def _search_again(self, now: float) -> None:
        """Forget the limits that refusals showed which may come at random, and search for them anew."""
        rate = self._rate.rate or self._recent_rate(now)
        self._rate = FoundRate(self._random.begin_trial(rate, 0 if self.cap is None else self.cap.value))
        self.cap = None
        self._refused_under_way.clear()
        self._suspicions = 0

    def _is_window(self, attempt: Attempt, now: float, retry_after: float | None) -> bool:
        """Return whether a window was known, or now is, that explains a refusal."""
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
        """Decide whether it was the number of requests at once or a rate that refused a request, and learn which."""
        if cause == "rate" or (cause is None and (retry_after or 0.0) >= _LONG_NAMED):
            # Nobody knows for how long a number at once will be used up.
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
            # How many of other processes are under way is known with a delay.
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
        """Take no number at once for known any more, nor for a suspect."""
        if self.cap is not None:
            self.cap = None
            self._overturn()
        self._refused_under_way.clear()
        self._suspicions = 0

    def _find_rate(self, attempt: Attempt, now: float, retry_after: float | None, named: Sequence[float]) -> None:
        # The rate from which to begin is that of the text of the refusal, unless far more was accepted of late.
        guess = max(min(named, default=0.0), self._recent_rate(now) / (_FAR_MORE if named else 2.0))
        self._rate.refused(attempt.amount, attempt.at, now, guess, retry_after)
        self._sharing.measured_rate()

    def _overturn(self) -> None:
        """Note that not what was blamed so far is limited, a number at once or a rate, but the other."""
        self._verdict = max(self._verdict, self._sharing.verdict[0] - 1) + 1

    def _is_number_to_blame(self) -> bool:
        """Return whether all of the last refusals came with as many under way, and never so many were accepted."""
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
