"""Intervals around forecasts of a job's end, from how wrong its earlier forecasts have been."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_COVERED = 0.9
"""Share of forecasts whose interval should contain the truth."""
_KEPT = 64
"""Forecasts, and errors, that are remembered."""
_SPACING = 0.02
"""Share of the work after which a forecast is remembered."""
_LEAST_SPAN = 0.1
"""Share of the work a forecast was about that must be done before it is judged."""
_FIRST_ERROR = 0.7
"""Error that is assumed until there are enough: the truth is between half of the forecast and twice that."""

_MOST_ERROR = 10.0
"""Error from which on a forecast was simply worth nothing."""


def covering_error(errors: Sequence[float], first: float) -> float:
    """Return the error that nine in ten future ones do not exceed, if they are like `errors`.

    This is split conformal prediction (Vovk, Gammerman and Shafer, 2005). `first`: the least that is returned while
    there are too few errors, fewer than nine.
    """
    rank = math.ceil((len(errors) + 1) * _COVERED)
    return max((first, *errors)) if rank > len(errors) else sorted(errors)[rank - 1]


@dataclass(frozen=True, slots=True)
class _Forecast:
    """A forecast at one moment."""

    at: float
    done: float
    left: float
    """Work that was left then, as far as was known."""
    seconds: float


class ForecastIntervals:
    """Finds intervals that hold the end of a job in nine cases of ten, whatever makes its forecasts wrong.

    Each forecast of a job says how long any part of the rest takes. When a part is done, it shows by which factor the
    forecasts before it were wrong; the error of the present one is assumed to be like the latest of those (conformal
    prediction in a window). So the interval accounts for noise and for changes that have already come; nothing warns of
    a pace that keeps changing.
    """

    def __init__(self) -> None:
        self._forecasts: deque[_Forecast] = deque(maxlen=_KEPT)
        self._errors: deque[float] = deque(maxlen=_KEPT)
        """Absolute logarithms of true over forecast seconds."""

    def observe(self, at: float, done: float, left: float, seconds: float) -> tuple[float, float]:
        """Return the least and the most seconds that are left, where a forecast says that `seconds` are.

        `done` and `left` are amounts of work, in any unit. `at`, in seconds of any clock, must rise from call to call.
        """
        last = self._forecasts[-1] if self._forecasts else None
        if (
            done > 0.0
            and left > 0.0
            and seconds > 0.0
            and (last is None or done - last.done >= _SPACING * (done + left))
        ):
            self._judge(at, done)
            self._forecasts.append(_Forecast(at, done, left, seconds))
        factor = math.exp(self._error)
        return seconds / factor, seconds * factor

    @property
    def _error(self) -> float:
        return covering_error(self._errors, _FIRST_ERROR)

    def _judge(self, at: float, done: float) -> None:
        """Note how wrong the forecasts of the time until now were."""
        # One error for each moment, of the latest forecast of which enough came true: what a job did long ago says
        # little about what it does next.
        for forecast in reversed(self._forecasts):
            share = (done - forecast.done) / forecast.left
            expected = forecast.seconds * min(1.0, share)
            if share >= _LEAST_SPAN and at > forecast.at and expected > 0.0:
                self._errors.append(min(_MOST_ERROR, abs(math.log(at - forecast.at) - math.log(expected))))
                return
