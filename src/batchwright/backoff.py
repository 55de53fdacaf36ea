"""Pauses before something that failed is tried again, each longer than the one before."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential pauses in seconds: `first`, then `factor` times the one before, up to `longest`.

    `jitter` bounds what a pause is then multiplied with, so that what failed together does not come back together.
    """

    first: float
    longest: float
    factor: float = 2.0
    jitter: tuple[float, float] = (1.0, 1.0)

    def pause(self, failures: int, luck: float = 0.0) -> float:
        """Return the seconds to wait after `failures` (≥ 1) in a row; `luck`, 0 to 1, chooses within the jitter."""
        low, high = self.jitter
        pause = min(self.longest, self.first * self.factor ** min(failures - 1, _MOST_DOUBLINGS))
        return pause * (low + (high - low) * luck)
