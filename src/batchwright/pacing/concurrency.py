"""How many requests an endpoint gets at once if no rate limit bounds them.

`ConcurrencySearch` climbs: at each level it measures the tokens delivered per second, and goes on as long as they grow.
By Little's law, a level delivers the number of requests under way times the tokens per second of each, which is, over
the requests that began at this level, the sum of their tokens divided by the sum of their latencies. So neither long
answers nor the moments at which answers end disturb it, as they would disturb latencies or counts. On a plateau it
stays, and tries again from time to time. Errors that mean overload reduce the level by a factor, once there are more
than a few: an endpoint that fails one call in twenty, whatever its load, is not helped by fewer calls.

`ConcurrencyCap` is a limit on requests at once that the endpoint enforces by refusals, and probes for a higher one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

FIRST_LEVEL = 16
_LEAP = 4.0
_STEP = 1.4
_NEARLY = 0.6
"""Growth of the delivered rate, as a share of the growth of the level, from which the next step is a leap."""
_LEAST_GAIN = 1.03
_LEAST_MEASURED = 8
_AGAIN = 12
"""Measurements on a plateau after which a higher level is tried again."""
_CHANGED = 1.2
"""Factor by which the delivered rate on a plateau must change for the search to start again."""
_SHRINK = 0.7
_OUTCOMES = 20
_OVERLOADED = 0.5
"""Share of recent outcomes that must be overload for the level to shrink."""
_FEWEST_OUTCOMES = 10
"""Fewest outcomes over which that share is taken: of fewer, that many fail by chance where some always do."""
_MOST_ROUNDS = 64
_FEWER = 0.75
_LEAST_QUEUE, _QUEUE = 2.0, 0.1
"""Requests that should wait in an engine that reports its queue: a number, plus a share of those that it computes."""
_GUIDED_STEP = 1.5
_BUSY = 0.9
"""Share of a level that must have been in use for its measurement to count."""


class ConcurrencySearch:
    """Finds the number of concurrent requests beyond which throughput does not grow. `most` is never exceeded."""

    def __init__(self, most: int, *, first: int = FIRST_LEVEL) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"max_concurrency={most!r}: must be a whole number, 1 or more")
        self.most = most
        self.level = float(min(first, most))
        self.epoch = 0
        """Number of the present level; a request belongs to the level at which it was sent."""
        self.delivered: float | None = None
        """Tokens per second at the last measured level; None: none was measured."""
        self._before: tuple[float, float] | None = None
        """Level before this one, and the rate that it delivered."""
        self._holding = 0
        """Measurements on the present plateau; 0 while climbing."""
        self._tokens = self._latency = self._busy = 0.0
        self._measured = 0
        self._outcomes: deque[bool] = deque(maxlen=_OUTCOMES)

    @property
    def value(self) -> int:
        """Number of requests that may be under way."""
        return max(1, int(self.level))

    def succeeded(self, epoch: int, under_way: int, tokens: float, latency: float, *, is_guided: bool = False) -> None:
        """Learn from an answer with `tokens` after `latency` seconds, sent as one of `under_way` requests under way.

        `is_guided`: whether the endpoint reports its queue, which says more than the delivered rate.
        """
        self._outcomes.append(False)
        if epoch != self.epoch:
            return
        self._tokens += max(tokens, 1.0)
        self._latency += max(latency, 1e-6)
        self._busy += under_way
        self._measured += 1
        if self._measured >= max(_LEAST_MEASURED, self.level / 2.0):
            self._decide(is_guided=is_guided)

    def overloaded(self, epoch: int) -> bool:
        """Learn that the endpoint was too busy for a request, or took too long; return whether the level shrank."""
        self._outcomes.append(True)
        outcomes = max(_FEWEST_OUTCOMES, len(self._outcomes))
        if epoch != self.epoch or sum(self._outcomes) < _OVERLOADED * outcomes:
            return False
        self._outcomes.clear()
        self._before = None
        self._holding = 1
        self._go_to(self.level * _SHRINK)
        return True

    def guide(self, running: float, waiting: float, under_way: int) -> None:
        """Learn from an engine's own figures: the requests that it computes and those that wait, from all its clients.

        A few waiting requests keep its batches full; while none wait, it may take more.
        """
        enough = _LEAST_QUEUE + _QUEUE * running
        if waiting < enough / 2.0 and under_way >= _BUSY * self.level:
            self.raise_to(self.level * _GUIDED_STEP + 1.0)
        elif waiting > 2.0 * enough:
            self.lower_to(max(1.0, under_way - waiting + enough))

    def raise_to(self, level: float) -> None:
        """Go to a level immediately, for a reason that needs no measurement."""
        if level > self.level and self.level < self.most:
            self._before = None
            self._holding = 0
            self._go_to(level)

    def lower_to(self, level: float) -> None:
        """Go to a lower level immediately, for a reason that needs no measurement, and hold it."""
        if level < self.level:
            self._before = None
            self._holding = 1
            self._go_to(level)

    def _go_to(self, level: float) -> None:
        self.level = min(float(self.most), max(1.0, level))
        self.epoch += 1
        self._start_measuring()

    def _start_measuring(self) -> None:
        self._tokens = self._latency = self._busy = 0.0
        self._measured = 0

    def _decide(self, *, is_guided: bool) -> None:
        used = self._busy / self._measured
        delivered = min(used, self.level) * self._tokens / self._latency
        self._start_measuring()
        if used < _BUSY * self.level - 1.0 or is_guided:
            return  # this level did not bound them, or the engine's own figures decide
        if self._holding:
            self._hold(delivered)
            return
        self.delivered = delivered
        before, self._before = self._before, (self.level, delivered)
        if before is None:
            self._go_to(self.level * _LEAP)
            return
        grown, gain = self.level / before[0], delivered / before[1]
        if gain >= 1.0 + _NEARLY * (grown - 1.0):
            self._go_to(self.level * _LEAP)
        elif gain >= _LEAST_GAIN:
            self._go_to(self.level * _STEP)
        else:
            self._holding = 1
            if gain < 1.0:
                self._go_to(before[0])

    def _hold(self, delivered: float) -> None:
        known = self.delivered or delivered
        changed = max(delivered / known, known / delivered)
        self.delivered = delivered if changed > _CHANGED else 0.8 * known + 0.2 * delivered
        self._holding += 1
        if (changed > _CHANGED or self._holding > _AGAIN) and self.level < self.most:
            self._holding = 0
            self._before = (self.level, self.delivered)
            self._go_to(self.level * _STEP)


class ConcurrencyCap:
    """The most concurrent requests that an endpoint accepts, learned from refusals."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.epoch = 0
        """Number of the present value; a request belongs to the value at which it was sent."""
        self.strikes = 0
        """Refusals in a row with hardly any answers between them; there are none if the number is to blame."""
        self._accepted = 0.0
        """Answers since the last refusal."""
        self._step = 1
        self._rounds = 1
        """Rounds of answers before the next probe."""
        self._left = float(value)
        self._probing = False

    @property
    def proven(self) -> int:
        """Number of concurrent requests that were accepted before more were tried."""
        return self.value - self._step if self._probing else self.value

    @property
    def is_below(self) -> bool:
        """Whether as many as are now let through were accepted before."""
        return not self._probing and self._accepted >= self.value / 2.0

    def succeeded(self, epoch: int, under_way: int, *, weight: float = 1.0, may_probe: bool = True) -> None:
        """Learn from an answer to a request that was sent as one of `under_way` requests under way.

        `weight`: number of answers that it represents, including those that other processes get; `may_probe`: False if
        another process tries a higher value.
        """
        self._accepted += weight
        if epoch != self.epoch or under_way < self.value or not may_probe:
            return
        self._left -= weight
        if self._left > 0:
            return
        if self._probing:
            # The higher value held: the next step is larger.
            self._step *= 2
            self._rounds = 1
        self._probing = True
        self._go_to(self.value + self._step)

    def refused(self, under_way: int) -> None:
        """Learn that a request was refused as one of `under_way` requests under way."""
        self.strikes = 0 if self._accepted >= self.value / 4 else self.strikes + 1
        if self._probing and self._step == 1:
            self._rounds = min(_MOST_ROUNDS, 2 * self._rounds)
        self._accepted, self._step, self._probing = 0.0, 1, False
        value = min(self.value, under_way)
        # A second refusal in a row means that it is not just one too many.
        self._go_to(max(1, value - 1 if not self.strikes else int(value * _FEWER)))

    def take_over(self, value: int, epoch: int) -> None:
        """Take over what another process has learned, if it is newer than what is known here, or higher and as new."""
        if (epoch, value) <= (self.epoch, self.value):
            return
        if value < self.value:
            if self._probing and self._step == 1:
                self._rounds = min(_MOST_ROUNDS, 2 * self._rounds)
            self._step, self._probing = 1, False
        self._go_to(value)
        self.epoch = epoch

    def _go_to(self, value: int) -> None:
        self.value = value
        self.epoch += 1
        self._left = float(self._rounds * value)


def alike(values: Collection[int], spread: float = 0.03) -> bool:
    """Return whether whole numbers differ by at most two, or by a share of `spread`."""
    low, high = min(values, default=0), max(values, default=0)
    return high - low <= max(2, math.floor(spread * high))
