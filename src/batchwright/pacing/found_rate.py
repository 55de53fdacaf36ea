"""`FoundRate`: a rate limit that the endpoint does not state, found from the requests that it refuses.

A refusal for a rate means that nothing was left at that moment. So the amount accepted between two refusals, divided by
the time between them, is the rate that the endpoint admits, whatever burst it allows. Requests are paced a little above
that rate, and pause briefly after each refusal: what is saved in the pause is used before the next refusal, so none of
the limit is lost, with about one refusal in a hundred requests. The longer none comes, the further the pace rises, so
it follows a limit that was raised.

A refusal that names a pause of several seconds ends a window: what was accepted before it had all of that time,
including the pause, and the same amount may go faster in the next window.

Whether the unstated limit counts requests or tokens is not known. Amounts are a mean of both: 1 for a request of the
mean size.
"""

from __future__ import annotations

from batchwright.pacing.pace import Pace

_PAUSE = 2.0
"""Amounts for which a pause after a refusal lasts."""
_LEAST_GAIN = 0.008
_GAIN_STEP = 60.0
"""Amounts without a refusal after which the pace has risen by twice the least gain."""
_LEAST_STEP = 4.0
_BELIEVED, _LONGEST_BELIEVED = 12.0, 60.0
"""Seconds without a refusal after which a rate is doubted, at the earliest and at the latest."""
_BELIEVED_AMOUNTS = 75.0
"""Amounts without a refusal after which it is doubted, between these times."""
_DOUBLES = 15.0
"""Seconds in which the pace doubles from then on."""
_LONGEST_DOUBT = 300.0
_SEARCHED = 8.0
"""Amounts in which the pace doubles until a second refusal shows the rate."""
_SEARCHED_SECONDS = 10.0
"""Seconds in which it doubles at the latest."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 5.0
_WINDOW = 5.0
"""Shortest pause named by a refusal, in seconds, that is taken for the rest of a window."""
_SURGE, _MORE_SURGE, _MOST_SURGE = 6.0, 2.0, 24.0
"""Multiple of the rate at which the next window is used: at first, its increase after each such window, and at most."""
_BELOW = 40.0
"""Amounts after a refusal that stay below the limit: the pause saved more than the pace exceeds it by."""
_SETTLED = 0.4
"""Share of a rate that must be accepted before the next refusal for it to be the rate of a limit."""
_SURE = 0.95
"""Share of what a window admitted that is used that way in the next one."""
_KEEP = 0.5
"""Weight that earlier refusals keep at each new one."""


class FoundRate:
    """Pace at which an endpoint accepts requests, once it has refused some. `first`: where the search starts."""

    def __init__(self, first: float | None = None) -> None:
        self.rate = first
        """Amounts per second that the endpoint admits; None: nothing was refused."""
        self.until = float("-inf")
        """End of the pause after a refusal."""
        self._began = float("inf")
        """When the first request was sent."""
        self._emptied = float("-inf")
        """When the endpoint last refused, or the end of a long pause that it named then."""
        self.weight = 1.0
        """Amounts of all processes together per amount of this one."""
        self._accepted = 0.0
        """Amounts sent since then and not refused."""
        self._stock = 0.0
        """Amounts that the present window admits at once, as the one before it did."""
        self._surge = _SURGE
        self._quiet = 0.0
        """Amounts of all processes since any of them was last known to be refused."""
        self._amounts = 0.0
        self._seconds = 0.0
        self._refusals = 0
        """Refusals in a row with nothing accepted between them."""
        self._is_settled = False
        """Whether about as much was accepted between the last two refusals as the rate found at the first predicts."""
        self._pace = Pace()

    @property
    def is_measured(self) -> bool:
        """Whether anything was accepted between two refusals; until then the rate is a guess."""
        return self._amounts > 0.0

    @property
    def is_below(self) -> bool:
        """Whether less than the rate was sent since the last refusal, so that no limit refuses the next request."""
        return self._is_settled and self._refusals <= 1 and self._stock <= 0.0 and self._quiet <= _BELOW

    @property
    def is_in_window(self) -> bool:
        """Whether the present window still admits what the one before it did."""
        return self._stock > 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next request may go."""
        if self.rate is None:
            return 0.0
        return max(self.until - now, self._pace.wait(self._raised(now), now))

    def begin(self, amount: float, now: float) -> None:
        """Count a request that is sent."""
        self._began = min(self._began, now)
        self._accepted += amount
        self._quiet += amount * self.weight
        if self.rate is not None:
            self._pace.take(amount, self._raised(now), now)
            self._stock -= amount

    def refused(self, amount: float, sent_at: float, now: float, guess: float, retry_after: float | None) -> None:
        """Learn of the refusal of a request that was sent after the last refusal was known.

        `guess`: amounts a second with which to begin after the first refusal.
        """
        self._accepted = max(0.0, self._accepted - amount)
        named = retry_after or 0.0
        # A long pause ends with the window: what was accepted before it had all of that time.
        ends = max(sent_at, now + named) if named >= _WINDOW else sent_at
        self._take_stock(is_window=named >= _WINDOW)
        if self.rate is None or self._refusals == 0:
            self.rate = guess if self.rate is None else self._raised(now) / 2.0
            if named >= _WINDOW and self._accepted > 0.0:
                self._amounts, self._seconds = self._accepted, max(ends - self._began, 1e-3)
                self.rate = self._amounts / self._seconds
            self._refusals = 1
        else:
            self._amounts += self._accepted
            seconds = max(ends - self._emptied, 1e-3)
            self._seconds += seconds
            self._is_settled = self._accepted > _SETTLED * self.rate * seconds
            if self._accepted > 0.0:
                self.rate = max(self._amounts, 0.5) / self._seconds
                self._amounts *= _KEEP
                self._seconds *= _KEEP
                self._refusals = 1
            else:
                self._refusals += 1
        self._emptied, self._accepted, self._quiet = ends, 0.0, 0.0
        first = _FIRST_PAUSE if self._seconds == 0.0 else min(_LONGEST_PAUSE, _PAUSE / max(self.rate, 1e-9))
        pause = min(_LONGEST_PAUSE, first * 2.0 ** min(self._refusals - 1, 8))
        self.until = now + max(pause, named)

    def _take_stock(self, *, is_window: bool) -> None:
        """Learn at a refusal whether a window has ended, so that the next one may use the same amount."""
        if not is_window:
            self._stock, self._surge = 0.0, _SURGE
            return
        if self.rate is not None and self._stock <= 0.0:
            self._surge = min(_MOST_SURGE, _MORE_SURGE * self._surge)
        self._stock = _SURE * self._accepted

    def withdrawn(self, amount: float) -> None:
        """Note that a counted request was refused, or was not sent after all."""
        self._accepted = max(0.0, self._accepted - amount)
        self._quiet = max(0.0, self._quiet - amount * self.weight)

    @property
    def amounts(self) -> float:
        """Amounts from which the rate is known."""
        return self._amounts

    def go_on_at(self, rate: float, amounts: float, now: float) -> None:
        """Continue at this process's part of a rate that all processes have found, from `amounts` in each."""
        if self.rate is not None and self.is_measured:
            self._accepted *= rate / self.rate
        else:
            self._emptied, self._accepted, self._refusals = now, 0.0, 1
            self.be_sure(now)
        self.rate, self._amounts, self._seconds = rate, amounts, amounts / rate

    def be_sure(self, now: float) -> None:
        """Note that the limit was reached recently, because another process was refused."""
        self.until, self._quiet = max(self.until, now), 0.0

    def _raised(self, now: float) -> float:
        """Return the pace: the rate, raised further the longer nothing was refused."""
        assert self.rate is not None
        if not self._seconds:
            since = max(0.0, now - max(self.until, self._began))
            doubled: float = 2.0 ** (min(since, _LONGEST_DOUBT) / _SEARCHED_SECONDS)
            return self.rate * max(1.0 + self._accepted / _SEARCHED, doubled)
        if self._stock > 0.0:
            return self.rate * self._surge
        # A rate measured from few requests is soon doubted, and any rate after a while.
        step = min(_GAIN_STEP, _LEAST_STEP + self._amounts * self.weight / 2.0)
        quiet = min(now - self.until, _LONGEST_DOUBT)
        believed = min(_LONGEST_BELIEVED, max(_BELIEVED, _BELIEVED_AMOUNTS / self.rate))
        doubted: float = 2.0 ** (max(0.0, quiet - believed) / _DOUBLES)
        return self.rate * (1.0 + _LEAST_GAIN * (1.0 + (self._quiet / step) ** 2)) * doubted
