"""Intervals around forecasts of a job's end, from how wrong its earlier forecasts have been."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_COVERED = 0.9
"""Share of forecasts whose interval is to hold the truth."""
_KEPT = 64
"""Forecasts, and errors, that are remembered."""
_SPACING = 0.02
"""Share of the work after which a forecast is remembered."""
_LEAST_SPAN = 0.1
"""Share of what a forecast was about that must have been done before it is judged."""
_FIRST_ERROR = 0.7
"""Error that is assumed before there are enough: the truth within half of the forecast and twice that."""

_MOST_ERROR = 10.0
"""Error that says no more than that the forecast was worth nothing."""


@dataclass(frozen=True, slots=True)
class _Told:
    """A forecast at one moment."""

    at: float
    done: float
    left: float
    """Work that was left then, as far as was known."""
    seconds: float


class ForecastIntervals:
    """Finds intervals that hold the end of a job in nine cases of ten, whatever makes its forecasts wrong.

    Each forecast of a job says how long any part of the rest takes. When a part is done, it shows by which factor the
    forecasts before it were wrong; the errors of the present one are taken to be like the last of those
    (conformal prediction in a window). So the interval is honest for noise and for changes that have come already; of a
    pace that goes on to change nothing warns.
    """

    def __init__(self) -> None:
        self._told: deque[_Told] = deque(maxlen=_KEPT)
        self._errors: deque[float] = deque(maxlen=_KEPT)
        """Absolute logarithms of true over forecast seconds."""

    def observe(self, at: float, done: float, left: float, seconds: float) -> tuple[float, float]:
        """Return the least and the most seconds that are left, of which a forecast says that they are `seconds`.

        `done` and `left` are amounts of work, in any unit. To be called with rising `at`, in seconds of any clock.
        """
        last = self._told[-1] if self._told else None
        if (
            done > 0.0
            and left > 0.0
            and seconds > 0.0
            and (last is None or done - last.done >= _SPACING * (done + left))
        ):
            self._judge(at, done)
            self._told.append(_Told(at, done, left, seconds))
        factor = math.exp(self._error)
        return seconds / factor, seconds * factor

    @property
    def _error(self) -> float:
        rank = math.ceil((len(self._errors) + 1) * _COVERED)
        if rank > len(self._errors):
            return max(_FIRST_ERROR, *self._errors, 0.0)
        return sorted(self._errors)[rank - 1]

    def _judge(self, at: float, done: float) -> None:
        """Note how wrong the forecasts were that spoke of the time until now."""
        # One error for each moment, of the latest forecast of which enough came true: what a job did long ago says
        # little of what it does next.
        for told in reversed(self._told):
            share = (done - told.done) / told.left
            expected = told.seconds * min(1.0, share)
            if share >= _LEAST_SPAN and at > told.at and expected > 0.0:
                self._errors.append(min(_MOST_ERROR, abs(math.log(at - told.at) - math.log(expected))))
                return
