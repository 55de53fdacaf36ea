"""`RandomRefusals`: whether an endpoint refuses requests at random, whatever the rate at which they come.

An endpoint that many share refuses some requests for want of capacity, with the status of a rate limit. A rate that is
found from such refusals falls without end: each says that less is accepted than was thought, and going slower makes
none of them rarer. So where a rate has fallen far, requests go at twice the rate for a moment. At a limit a third of
them and more are refused then; if it is only few, refusals come at random, and say nothing about a rate until they are
many.
"""

from __future__ import annotations

from collections import deque

TRIAL_SPEED = 2.0
"""Times the rate at which requests go in a trial."""
_RATES, _LEAST_RATES = 16, 6
"""Rates found from refusals that are looked at, at most and at least."""
_FALLEN = 0.7
"""Share of the greatest of them below which the rate has fallen far."""
_TRIED, _MANY = 16, 5
"""Requests of a trial, and how many refused ones show a limit."""
_FEW = 0.5
"""Share of requests up to which few are refused."""
_WEIGHT = 1.0 / 20.0
"""Of the latest request in that share."""
_BELIEVED_FOR = 300.0
"""Seconds after a trial that showed a limit until the next one."""


class RandomRefusals:
    """Learns of each request whether it was refused, and of each rate that was found from refusals."""

    def __init__(self) -> None:
        self.holds = False
        """Whether refusals say nothing about a rate now."""
        self.is_on_trial = False
        """Whether requests go at `TRIAL_SPEED` to find out."""
        self._share = 0.0
        """Share of requests of late that were refused."""
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._tried = self._refused = 0
        """Requests of the present trial, and those of them that were refused."""
        self._not_before = float("-inf")

    def accepted(self) -> None:
        """Note that a request was accepted."""
        self._share -= _WEIGHT * self._share
        if self.is_on_trial:
            self._tried += 1
            if self._tried >= _TRIED:
                self.is_on_trial, self.holds, self._share = False, True, 0.0

    def refused(self, now: float) -> None:
        """Note that a request was refused."""
        self._share += _WEIGHT * (1.0 - self._share)
        if self.is_on_trial:
            self._tried += 1
            self._refused += 1
        if (self.is_on_trial and self._refused >= _MANY) or (self.holds and self._share > _FEW):
            self.is_on_trial = self.holds = False
            self._not_before = now + _BELIEVED_FOR

    def forget(self) -> None:
        """Forget the rates, as something else than a rate was to blame."""
        self._rates.clear()

    def found(self, rate: float, now: float) -> None:
        """Learn the rate that was found by a refusal."""
        self._rates.append(rate)
        has_fallen = len(self._rates) >= _LEAST_RATES and rate < _FALLEN * max(self._rates)
        if has_fallen and self._share <= _FEW and now >= self._not_before:
            self.is_on_trial, self._tried, self._refused = True, 0, 0
            self._rates.clear()
