"""Time as an argument: runtimes take a `Clock`, decisions take the `now` that it returned."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary, fixed origin."""
        ...


class MonotonicClock:
    """The real clock."""

    def now(self) -> float:
        return time.perf_counter()


class ManualClock:
    """A clock that moves only when told to, for tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (≥ 0). Raises ValueError when negative: time does not go back."""
        if seconds < 0:
            raise ValueError(f"advance(seconds={seconds}): a clock cannot go back")
        self._now += seconds
