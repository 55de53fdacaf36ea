"""`StatedBudget`: a limit that the endpoint states in the headers of its answers.

An answer says how much was left when its request arrived, and when everything will be left again. Together with what
has been sent since, that determines what is left now. Two kinds of limits look alike in one answer, and are
distinguished by several:

- a *bucket* is refilled continuously, so the time until it is full is proportional to what is missing;
- a *window* ends at a fixed time, whatever was used, and then everything is left again.

A bucket's stock is spent in about `_HORIZON` seconds, in addition to what is refilled, and a window at a multiple of
its mean rate: nothing is left unused, and nothing is sent in a burst. What the endpoint counts for a request may differ
from what is expected here (it may count `max_tokens`, or other clients with the same key); the ratio is learned from
what is left after consecutive requests.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from batchwright.pacing.limits import DAY, MINUTE, Use
from batchwright.pacing.pace import Pace
from batchwright.pacing.short_window import ShortWindow
from batchwright.pacing.window_end import WindowEnd
from batchwright.wire.rate_limits import RateKind, StatedLimit

_HORIZON = 10.0
"""Most seconds in which what a bucket holds beside its reserve is spent."""
_STEADY_SURGE, _SOON = 3.0, 4.0
"""Multiple of the even rate at which a bucket's stock is also spent, until it would last for this many seconds."""
_RESERVE = 0.01
"""Share of the limit that is held back, since what is left is known with a delay."""
_SHORT = 5.0
"""Longest window, in seconds, that is too short for what an answer says is left to be still true: requests go in step
with it, or evenly until its beginning is known."""
_SURGE, _MOST_SURGE = 12.0, 24.0
"""Multiple of the even rate at which what is left is used: at first, and at most after windows that were used up."""
_MORE_SURGE = 2.0
"""Factor by which a window is used faster than the previous one, if that was used up without an unpredicted refusal."""
_USED_UP = 0.1
"""Largest share left in a window that counts as used up; a refusal with more left means that it was used too fast."""
_LATE = 0.25
"""Seconds, or a share of a shorter window, until the next one is used: its end is known only approximately."""
_ON_THE_WAY = 0.1
"""Seconds after which a sent request is assumed to have arrived."""
_SIGNIFICANT = 0.02
"""Share of the limit that must be missing for a reset to show anything."""
_NEARLY_FULL = 0.9
"""Share of the limit that must have been left once for resets to show anything: it might never hold that much."""
_LOOKED_BACK = 0.1
"""Share of the longest reset over which that time is compared, since it changes slowly in a window."""
_MOVED, _ENDED = 0.1, 0.8
"""Shares of a window between which its end must have moved for it to slide: beyond, it is the end of the next one."""
_STEADY = 0.2
"""Mean deviation, as a logarithm, of the stated time in which a bucket fills."""
_FADES = 0.8
"""Share of the longest reset that is remembered after that time has passed."""
_LEAST_CARE, _MORE_CARE, _LESS_CARE = 0.95, 0.98, 1e-5
_MOST_MARGIN, _MORE_MARGIN = 5.0, 1.7
"""Greatest factor of the reserve, and factor by which it grows at each unpredicted refusal."""
_NEWEST = 0.1
"""Weight of the newest answer among a window's statements of what is left; other clients may use it up meanwhile."""
_CLEARLY = 0.5
"""Largest deviation by arrival times, as a share of that by answer times, at which arrival times are believed."""
_KEEP = 0.95
"""Share of what was learned of the ratio that is kept at each answer."""
_RATIO_KNOWN = 0.01
"""Share of the limit that must have been sent for the ratio to be known."""
_RATIOS = (0.2, 10.0)
_FEWEST_SURPLUS, _MOST_SURPLUS = 3.0, 0.2
"""Least unpredicted surplus of requests that counts, and share of the capacity that one answer may add to it."""
_WATCHED = 3.0
"""Windows for which that must have been observed."""
_WINDOWS = (1.0, 10.0, MINUTE, 3600.0, DAY)


@dataclass(slots=True, eq=False)
class Sent:
    """A request as a budget counted it."""

    at: float
    amount: float
    total: float
    """Amounts of all requests up to and including this one."""
    settled: float
    """Amounts of all answers that had arrived by then."""
    left_window: float = 0.0
    """Amounts that were older than a window by then."""


@dataclass(slots=True)
class _Mean:
    """Mean of values, the newest of which count most."""

    mean: float = 0.0
    spread: float = 0.0
    """Mean deviation."""
    _count: int = 0

    def add(self, value: float) -> None:
        self._count += 1
        weight = max(1.0 / self._count, _NEWEST)
        if self._count > 1:
            self.spread += (abs(value - self.mean) - self.spread) * weight
        self.mean += (value - self.mean) * weight


class StatedBudget:
    """One limit of an endpoint, as its answers state it."""

    def __init__(self, kind: RateKind) -> None:
        self.kind = kind
        self.limit = 0.0
        """Amount per window; 0 while nothing was stated."""
        self._is_charged_late = kind == "output_tokens"
        """Whether it counts the tokens that answers have, as they arrive, and not the tokens expected."""
        self._under_way = self._settled = 0.0
        """Amounts of requests under way, and of those that ended."""
        self._seen = 0.0
        """Most that was ever left."""
        self._capacity = 0.0
        """Most that can be left: a bucket may hold less than it is given in a window."""
        self.window = MINUTE
        self.care = 1.0
        """Share of the limit that is used: less than all after refusals that were not predicted by what was left."""
        self._margin = 1.0
        """Multiple of the usual reserve that is held back, since predictions of what is left proved less accurate."""
        self._surge = _SURGE
        self._by_arrival, self._by_answer = _Mean(), _Mean()
        """What answers of the present window say is left, plus everything sent before their requests arrived, and
        before they arrived themselves."""
        self._was_too_fast = False
        """Whether requests were refused in the present window while much of it was left."""
        self.ratio = 1.0
        """Amount that the endpoint counts for each unit that is expected here."""
        self._left = math.inf
        self._at = -math.inf
        """Time for which `_left` holds."""
        self._end = WindowEnd()
        self._first_end = -math.inf
        """Its end, as first stated: if the end moves, the window slides."""
        self._filled_count = 0
        """Answers that showed in which time a bucket would be filled: as a logarithm, its mean and mean deviation."""
        self._filled = self._spread = 0.0
        self._early_filled: float | None = None
        """The same from an answer that came before it was known whether the bucket can be full."""
        self._stated_at = -math.inf
        self._longest_reset = 0.0
        self.slides = False
        """Whether it seems to be a sliding window."""
        self._young: deque[tuple[float, float]] = deque()
        """Times and amounts of what was sent within the last window, if that is at most a minute."""
        self._left_window = 0.0
        """Amounts that were sent longer ago than a window."""
        self._rolled: float | None = None
        """Amounts sent until a window's end was passed, if no answer has shown yet what was left after it."""
        self._surplus = 0.0
        """Amount that was left beyond what had been predicted, since `_doubted_at`."""
        self._doubted_at = math.inf
        self._refused_at = -math.inf
        self._total = 0.0
        self.is_counted = False
        """Whether the endpoint has stated what remains of it."""
        self._last: tuple[float, float, float] | None = None
        """When the request of the latest statement was sent, `Sent.total` then, and what was left."""
        self._counted = self._expected = 0.0
        self._pace = Pace()
        self._short_window: ShortWindow | None = None
        """Window that requests keep in step with, if it is short."""
        self._is_short_of_answer = False
        """Whether its end was learned from the times at which answers were ready."""
        self._round_trip = 0.0
        """Seconds that the latest refusal took, which is the round trip to the endpoint."""

    @property
    def _known_short_window(self) -> ShortWindow | None:
        """The window that requests keep in step with, if it is known where windows begin."""
        window = self._short_window
        is_known = window is not None and window.is_known and window.length == self.window
        return window if is_known and self.is_window else None

    @property
    def is_window(self) -> bool:
        """Whether the limit seems to have fixed windows, not a bucket."""
        return self._spread > _STEADY and not self.slides

    def left(self, now: float) -> float:
        """Return what is left of the budget, in the units of the endpoint."""
        self._advance(now)
        return self._left

    def wait(self, use: Use, now: float) -> float:
        """Return the seconds until `use` may go."""
        if not self.limit:
            return 0.0
        self._advance(now)
        amount = use.at_most(self.kind) * self.ratio
        if self.window <= _SHORT:
            if (window := self._known_short_window) is not None:
                return window.wait(int(self.limit), now)
            return self._pace.wait(self._rate(amount, now), now)
        missing = min(amount, self._capacity) - self._left
        if missing > 1e-9 * self.limit:
            return self._until_more(missing, now)
        return self._pace.wait(self._rate(amount, now), now)

    def begin(self, use: Use, now: float) -> Sent:
        """Count a request that is sent."""
        amount = use.at_most(self.kind)
        self._total += amount
        self._under_way += amount
        if self.limit:
            self._advance(now)
            counted = amount * self.ratio
            self._pace.take(counted, self._rate(counted, now), now)
            self._left -= counted
            if self._short_window is not None:
                self._short_window.begin(int(self.limit), now)
            if self.window <= MINUTE:
                self._young.append((now, amount))
        return Sent(now, amount, self._total, self._settled, self._left_window)

    def earlier(self, use: Use, at: float) -> Sent:
        """Return how a request counts that was sent before the limit was known: as if sent before all others."""
        return Sent(at, use.at_most(self.kind), 0.0, 0.0)

    def end(self, sent: Sent, amount: float) -> None:
        """Note that a request ended, and used `amount`."""
        self._under_way = max(0.0, self._under_way - sent.amount)
        self._settled += amount

    def observe(self, sent: Sent, stated: StatedLimit, now: float, *, refused: bool = False) -> None:
        """Learn what the answer to the request `sent` states about the time when the request arrived."""
        if stated.remaining is None:
            if not self.is_counted and stated.limit != self.limit:
                left = self.left(now) if self.limit else math.inf
                self.limit, self.window = float(stated.limit), stated.window or self.window
                self._capacity = self.limit
                self._left, self._at = 0.0 if refused else min(left, self.limit), now
            return
        self.is_counted = True
        self._take_care(sent, now, refused=refused)
        is_older = self._last is not None and sent.at < self._last[0]
        if is_older and stated.limit != self.limit:
            return
        if stated.limit != self.limit:
            self.limit, self._last = float(stated.limit), None
            self._counted = self._expected = self._capacity = self._seen = 0.0
        self._seen = max(self._seen, stated.remaining + sent.amount * self.ratio)
        self._capacity = min(self.limit, max(self._capacity, self._seen, stated.remaining + self._refills(stated)))
        if stated.window is not None:
            self.window = stated.window
        if stated.reset is not None:
            self._learn_kind(stated, sent, now)
            self._learn_short_window(stated, sent, now, refused=refused)
        is_of_answer = self.is_window and self.window > _SHORT and self._end.is_of_answer
        if is_older and not is_of_answer:
            return  # its answer took longer than a later request's, which says what has been left since
        if is_of_answer:
            # It already counts what was sent before, except for requests on the way.
            on_the_way = takewhile(lambda each: each[0] > now - _ON_THE_WAY, reversed(self._young))
            since = sum(amount for _, amount in on_the_way) * self.ratio
        elif self._is_charged_late:
            # On average, half of what is under way will be charged before as much is refilled.
            since = self._settled - sent.settled + 0.5 * self._under_way
        else:
            self._learn_ratio(sent, stated.remaining)
            since = (self._total - sent.total) * self.ratio
            if (self.is_window or self._slides_known) and self.kind == "requests" and not refused:
                since += stated.remaining - self._agreed(stated.remaining, sent)
        self._advance(now)
        refilled = self._refilled(sent, now)
        left = min(self._capacity, stated.remaining + refilled - since)
        if stated.window is None and self.window > _SHORT and self.kind == "requests" and self._last is not None:
            self._doubt_window(left - self._left, now)
        self._left = left
        self._at = now
        self._last = (sent.at, sent.total, float(stated.remaining))

    def _agreed(self, remaining: float, sent: Sent) -> float:
        """Return what was left when a request arrived, combining the answers of the present window.

        Requests do not arrive in the order in which they were sent: one that others have overtaken shows too little
        left, and one that has overtaken others too much. If answers seem to say what is left when they are ready, each
        is used by itself.
        """
        slides = self._slides_known
        at_arrival = sent.total - (sent.left_window if slides else 0.0)
        self._by_arrival.add(remaining + at_arrival)
        self._by_answer.add(remaining + self._total - (self._left_window if slides else 0.0))
        if self._by_arrival.spread > _CLEARLY * self._by_answer.spread:
            return remaining
        return round(self._by_arrival.mean) - at_arrival

    def _take_care(self, sent: Sent, now: float, *, refused: bool) -> None:
        """Use a little less of the limit after each refusal of a request that was sent when the limit was known."""
        if not self.limit:
            self._doubted_at = self._refused_at = now
        if refused and sent.at > self._refused_at:
            self._refused_at = now
            if self._left >= _USED_UP * self._capacity:
                self._surge, self._was_too_fast = _SURGE, True
            self.care = max(_LEAST_CARE, self.care * _MORE_CARE)
            self._margin = min(_MOST_MARGIN, self._margin * _MORE_MARGIN)
        elif not refused:
            self.care = min(1.0, self.care + _LESS_CARE)

    def _doubt_window(self, surplus: float, now: float) -> None:
        """Learn that `surplus` more was left than predicted, the only sign that the assumed window is too long.

        Answers that take longer than a window say that everything is left, but not since when.
        """
        self._surplus += min(surplus, _MOST_SURPLUS * self._capacity)
        seconds = now - self._doubted_at
        if self._surplus < max(_FEWEST_SURPLUS, 0.5 * self._capacity) or seconds <= 0.0:
            return
        filled = self.limit / (self.limit / self.window + self._surplus / seconds)
        shorter = [each for each in _WINDOWS if each < self.window and seconds >= _WATCHED * each]
        if shorter and filled < 0.5 * self.window:
            self.window = min(shorter, key=lambda each: abs(math.log(each / filled)))
            self._surplus, self._doubted_at = 0.0, now

    def _rate(self, amount: float, now: float) -> float:
        """Return the rate at which requests are sent, in amounts per second."""
        even = self.limit / self.window * self.care
        if self.window <= _SHORT:
            return even
        reserve = max(_RESERVE * self._capacity, min(2.0 * amount * self._margin, 0.1 * self._capacity))
        spare = self._left - reserve
        if self.is_window or (self._slides_known and spare > 0.0):
            return self._surge * even
        if spare >= 0.0:
            spent = spare / min(_HORIZON, max(1.0, self._capacity / even / 3.0))
            # Stock far beyond any error is spent evenly, not ever more slowly.
            return even + max(spent, min(_STEADY_SURGE * even, spare / _SOON))
        # The rate falls with what is left, so that the reserve fills again.
        return even * max(0.5, 1.0 + spare / (2.0 * reserve))

    @property
    def _late(self) -> float:
        return min(_LATE, 0.05 * self.window)

    def _advance(self, now: float) -> None:
        if now <= self._at or not self.limit:
            return
        left_window = self._left_window
        while self._young and self._young[0][0] <= now - self.window:
            self._left_window += self._young.popleft()[1]
        if self._slides_known:
            self._left = min(self._capacity, self._left + (self._left_window - left_window) * self.ratio)
        elif not self.is_window:
            self._left = min(self._capacity, self._left + (now - self._at) * self.limit / self.window)
        elif now >= self._end.value + self._late:
            if self._left < _USED_UP * self._capacity and not self._was_too_fast:
                self._surge = min(_MOST_SURGE, _MORE_SURGE * self._surge)
            self._was_too_fast = False
            self._left, self._rolled = self._capacity, self._total
            self._by_arrival, self._by_answer = _Mean(), _Mean()
            self._end.pass_by(math.ceil((now - self._end.value) / self.window), self.window)
        self._at = now

    @property
    def _slides_known(self) -> bool:
        """Whether an amount is left again as soon as it was sent longer than a window ago."""
        return self.slides and self.window <= MINUTE and not self._is_charged_late

    def _refilled(self, sent: Sent, now: float) -> float:
        """Return the amount that has become left again since a request was sent."""
        if self._slides_known:
            return (self._left_window - sent.left_window) * self.ratio
        return 0.0 if self.is_window else (now - sent.at) * self.limit / self.window

    def _until_more(self, missing: float, now: float) -> float:
        """Return the seconds until more is left: at most until `missing` more is."""
        if self._slides_known and self._young:
            return max(0.0, self._young[0][0] + self.window + self._late - now)
        return max(0.0, self._end.value + self._late - now) if self.is_window else missing * self.window / self.limit

    def _refills(self, stated: StatedLimit) -> float:
        return 0.0 if stated.reset is None else stated.reset * self.limit / self.window

    def _learn_kind(self, stated: StatedLimit, sent: Sent, now: float) -> None:
        """Learn from a stated reset what kind of limit it is, and how long its window is."""
        assert stated.reset is not None
        assert stated.remaining is not None
        missing = stated.limit - stated.remaining
        passed, self._stated_at = max(0.0, sent.at - self._stated_at), max(self._stated_at, sent.at)
        fades = _FADES ** min(passed / max(self._longest_reset, 1e-3), 1e3)
        self._longest_reset = max(stated.reset, self._longest_reset * fades, 1e-3)
        if self._rolled is not None and sent.total > self._rolled:
            # If it was not full after its end, it has none: it slides, and is used evenly, like a bucket.
            since = (sent.total - self._rolled) * self.ratio
            if self.window > _SHORT and missing > since + 0.5 * stated.limit:
                self._slide()
            self._rolled = None
        if self._last is None or sent.at >= self._last[0]:
            self._end.learn(sent.at, now, stated.reset, self.window)
            moved = self._end.value - self._first_end
            if sent.at >= self._first_end:
                self._first_end = self._end.value
            elif self.is_window and self.window > _SHORT and _MOVED < moved / self.window < _ENDED:
                self._slide()
                self.window = min(_WINDOWS, key=lambda each: abs(math.log(each / self._longest_reset)))
        if missing >= _SIGNIFICANT * stated.limit and stated.reset > 0.0:
            filled = math.log(stated.reset * stated.limit / missing)
            if self._seen >= _NEARLY_FULL * stated.limit:
                weight = min(0.1, passed / (_LOOKED_BACK * self._longest_reset))
                self._learn_filled(filled, weight)
            else:
                self._early_filled = filled
        if self._early_filled is not None and self._seen >= _NEARLY_FULL * stated.limit:
            # A statement from before it was known that the bucket can be full is useful now.
            self._learn_filled(self._early_filled, 0.1)
            self._early_filled = None
        if stated.window is None and not self.slides and self._filled_count:
            longest = self._longest_reset if self.is_window else math.exp(self._filled)
            self.window = min(_WINDOWS, key=lambda each: abs(math.log(each / max(longest, 1e-3))))

    def _learn_short_window(self, stated: StatedLimit, sent: Sent, now: float, *, refused: bool) -> None:
        """Learn when a short window ends, on the clock of requests that are sent."""
        if self.window > _SHORT or self.kind != "requests" or not stated.reset or stated.remaining == stated.limit:
            return  # nothing is stated about a window that has not begun
        of_answer, window = self._end.is_of_answer, self._short_window
        if window is None or window.length != self.window or self._is_short_of_answer != of_answer:
            window = self._short_window = ShortWindow(self.window)
            self._is_short_of_answer = of_answer
        if refused:
            self._round_trip = now - sent.at
            if not stated.remaining:  # otherwise it was refused for another limit
                window.refused(sent.at, now)
        # A request that is sent when an answer arrives reaches the endpoint a round trip after that answer was ready.
        window.learn(stated.reset + (now - self._round_trip if of_answer else sent.at))

    def _slide(self) -> None:
        if not self.slides:
            self.slides = True
            self._by_arrival, self._by_answer = _Mean(), _Mean()

    def _learn_filled(self, filled: float, weight: float) -> None:
        """Learn from an answer the time, as a logarithm, in which a bucket would be filled."""
        if self._filled_count == 0:
            self._filled, self._spread = filled, 0.0
        self._filled_count += 1
        weight = max(weight, 1.0 / self._filled_count)
        self._spread += (abs(filled - self._filled) - self._spread) * weight
        self._filled += (filled - self._filled) * weight

    def _learn_ratio(self, sent: Sent, remaining: int) -> None:
        if self._last is None or self.kind == "requests":
            return
        at, total, before = self._last
        refilled = 0.0 if self.is_window else (sent.at - at) * self.limit / self.window
        counted, expected = before + refilled - remaining, sent.total - total
        if expected <= 0.0 or (self.is_window and remaining > before):
            return
        if before + refilled >= _NEARLY_FULL * self._capacity:
            return  # it may have been full, and so not refilled
        self._counted = self._counted * _KEEP + counted
        self._expected = self._expected * _KEEP + expected
        if self._expected >= _RATIO_KNOWN * self._capacity:
            low, high = _RATIOS
            self.ratio = min(high, max(low, self._counted / self._expected))
