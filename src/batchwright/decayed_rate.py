"""Rate of events per second, in which newer events count more."""

from __future__ import annotations

import math


class DecayedRate:
    """A rate averaged over about the last `memory` seconds, with weights that decay exponentially.

    Only time passed to `elapse` counts. Events and seconds decay alike, so the first seconds give a rate too. A single
    step of time counts in full, however long it is, since the events of all of it may be added after it: pass no more
    than `memory` if these are added one by one.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.events = 0.0
        """Events seen, older ones counting less."""
        self.seconds = 0.0
        """Seconds watched, older ones counting less: about `memory`, unless a single step was longer."""

    def add(self, events: float = 1.0) -> None:
        """Count events that happened now."""
        self.events += events

    def elapse(self, seconds: float) -> None:
        """Let `seconds` (≥ 0) pass."""
        keep = math.exp(-seconds / self._memory)
        self.events *= keep
        self.seconds = self.seconds * keep + seconds

    @property
    def rate(self) -> float:
        """Events per second; 0 before any time has passed."""
        return self.events / self.seconds if self.seconds > 0 else 0.0
