"""`FoundRate`: a rate limit that the endpoint does not state, found from the requests that it refuses.

A refusal for a rate says that nothing was left at that moment. So what was accepted between two refusals, divided by
the time between them, is the rate at which the endpoint admits, whatever it allows at once. Requests are paced a little
above that rate, and pause shortly after each refusal: what is saved in the pause is used before the next refusal comes,
so nothing of the limit is lost while there is about one refusal in a hundred requests. The longer none comes, the
further the pace rises, so a limit that was raised is followed.

What the unstated limit counts, requests or tokens, is not known. Amounts are a mean of both: 1 for a request of the
mean size.
"""

from __future__ import annotations

from batchwright.pacing.pace import Pace

_PAUSE = 2.0
"""Amounts for which a pause after a refusal lasts."""
_LEAST_GAIN = 0.01
_GAIN_STEP = 60.0
"""Amounts without a refusal after which the pace has risen by twice the least gain."""
_LEAST_STEP = 4.0
_STEP_FOR = 2.0
"""Seconds of the rate that this takes at least, so that a high rate rises no faster than answers come."""
_SEARCHED = 8.0
"""Amounts in which the pace doubles at least until a second refusal shows the rate."""
_DOUBTED = 1.1
"""Factor by which the pace must have risen above the rate to be taken for the rate itself."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 5.0
_KEEP = 0.5
"""Share of what earlier refusals showed that is kept at each."""
_RECENT = 10.0
"""Seconds without a refusal after which the rate may be doubted: some limits count answers at their end."""


class FoundRate:
    """Pace at which an endpoint accepts requests, once it has refused some."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """Amounts a second that the endpoint admits; None: nothing was refused."""
        self.until = float("-inf")
        """End of the pause after a refusal."""
        self._emptied: float | None = None
        """When the endpoint last refused."""
        self._accepted = 0.0
        """Amounts sent since then and not refused."""
        self._amounts = 0.0
        self._seconds = 0.0
        self._refusals = 0
        """Refusals in a row, nothing being accepted between them."""
        self._pace = Pace()

    def wait(self, now: float) -> float:
        """Return the seconds until the next request may go."""
        if self.rate is None:
            return 0.0
        return max(self.until - now, self._pace.wait(self._raised, now))

    def begin(self, amount: float, now: float) -> None:
        """Count a request that is sent."""
        self._accepted += amount
        if self.rate is None:
            return
        raised = self._raised
        self._pace.take(amount, raised, now)
        since = now - (self._emptied or now)
        if self._seconds and raised > self.rate * _DOUBTED and since > _RECENT:
            # What was accepted since the last refusal was sent at a lower pace, and says less than the present one.
            self.rate, self._emptied, self._accepted = raised, now, 0.0
            self._amounts, self._seconds = self._amounts * _KEEP, self._amounts * _KEEP / raised

    def refused(self, amount: float, sent_at: float, now: float, recent_rate: float, retry_after: float | None) -> None:
        """Learn that a request was refused, which was sent after the last refusal was known.

        `recent_rate`: amounts a second that were accepted before the first refusal.
        """
        self._accepted = max(0.0, self._accepted - amount)
        if self._emptied is None or self.rate is None:
            self.rate = recent_rate / 2.0
            self._refusals = 1
        else:
            self._amounts += self._accepted
            self._seconds += max(sent_at - self._emptied, 1e-3)
            if self._accepted > 0.0:
                self.rate = max(self._amounts, 0.5) / self._seconds
                self._amounts *= _KEEP
                self._seconds *= _KEEP
                self._refusals = 1
            else:
                self._refusals += 1
        self._emptied, self._accepted = sent_at, 0.0
        first = _FIRST_PAUSE if self._seconds == 0.0 else min(_LONGEST_PAUSE, _PAUSE / max(self.rate, 1e-9))
        pause = min(_LONGEST_PAUSE, first * 2.0 ** min(self._refusals - 1, 8))
        self.until = now + max(pause, retry_after or 0.0)

    def withdrawn(self, amount: float) -> None:
        """Note that a request that was counted was refused together with another one."""
        self._accepted = max(0.0, self._accepted - amount)

    @property
    def _raised(self) -> float:
        """The pace: the rate, and more the longer nothing was refused."""
        assert self.rate is not None
        if not self._seconds:
            return self.rate * (1.0 + self._accepted / max(_SEARCHED, _STEP_FOR * self.rate))
        # What few requests have shown is soon doubted.
        step = max(min(_GAIN_STEP, _LEAST_STEP + self._amounts / 2.0), _STEP_FOR * self.rate)
        return self.rate * (1.0 + _LEAST_GAIN * (1.0 + (self._accepted / step) ** 2))
