"""Decision whether the requests of failed batches are to blame, or the model, which then fails whatever it is given.

Finding the request that makes a batch fail takes further calls (`search.py`). If the model is down, they are all in
vain, and twice as many as the requests. Three calls of several requests in a row that fail in the same way, without a
success between them, raise doubt. Halves of a batch that has failed do not count, nor do the last few requests of one,
since they were likely to fail. While there is doubt, nothing is searched, and a single request of each batch is tried,
one at a time: few requests are to blame by themselves. The first success ends the doubt, and the rest is computed. But
if one after another fails, the breaker opens: the requests of those batches fail, and from then on the rest of a batch
fails with the one that was tried, until one succeeds.

At least eight single requests are tried before it opens, and more if more were to blame so far: enough that the chance
that all of them are to blame is less than one in a million.
"""

from __future__ import annotations

import math

_DOUBTFUL = 3
"""Calls of several requests in a row that fail before single requests are tried."""
_FEWEST = 8
"""Single requests that fail in a row before the breaker opens."""
_CHANCE = 1e-6
"""Greatest chance that all of them are to blame."""
_PRIOR_BAD, _PRIOR = 0.5, 50.0
"""Number of requests to blame, and among how many, assumed before any are known."""
_REMEMBERED = 10_000.0
"""Number of requests over which the share to blame is counted."""
_SOONEST, _LATEST = 1.0, 60.0
"""Seconds after which callers are told to try again."""


class Breaker:
    """Breaker of one model: `succeeded` and `failed` record how calls ended."""

    def __init__(self) -> None:
        self.is_open = False
        """Whether the model is down."""
        self._since = 0.0
        """When the first of the present failures occurred."""
        self._kind: type[BaseException] | None = None
        self._calls = 0
        """Failed calls in a row of several requests, none of which was known to be bad."""
        self._alone = 0
        """Single requests that failed in a row since doubt arose, none of them suspected before."""
        self._culprits = 0
        """Single requests that failed in a row."""
        self._bad, self._settled = _PRIOR_BAD, _PRIOR

    @property
    def is_doubtful(self) -> bool:
        """Whether the next try must be a single request, with no other beside it."""
        return self.is_open or self._calls >= _DOUBTFUL

    def succeeded(self, size: int) -> None:
        """Note a call that computed `size` requests: those that failed alone before it were to blame."""
        if not self.is_open:
            self._bad += self._culprits
            self._settled += self._culprits
        self._settled += size
        if self._settled > _REMEMBERED:
            self._bad, self._settled = self._bad / 2, self._settled / 2
        self._kind, self._calls, self._alone, self._culprits, self.is_open = None, 0, 0, 0, False

    def failed(self, size: int, error: BaseException, now: float, *, was_suspected: bool) -> None:
        """Note a call of `size` requests that failed; `was_suspected`: what was known about them made that likely."""
        if type(error) is not self._kind:
            if self.is_open:
                return
            self._kind, self._calls, self._alone, self._culprits, self._since = type(error), 0, 0, 0, now
        if size == 1:
            self._culprits += 1
            self._alone += self.is_doubtful and not was_suspected
        elif not was_suspected:
            self._calls += 1
        if self.is_doubtful and self._alone >= self._needed():
            self.is_open = True

    def retry_after(self, now: float) -> float:
        """Return the seconds after which to try again: an outage lasts about as long again as it has lasted so far."""
        return min(_LATEST, max(_SOONEST, now - self._since))

    def _needed(self) -> int:
        return max(_FEWEST, math.ceil(math.log(_CHANCE) / math.log(min(0.9, self._bad / self._settled))))
