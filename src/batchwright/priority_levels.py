"""Figures of requests by their priority, for a bounded number of priorities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from batchwright.histograms import Histogram

MOST_LEVELS = 10
"""Most levels. Each may be a label of a metric, so clients must not be able to create arbitrarily many."""
OTHERS: Literal["other"] = "other"
"""Level of all priorities beyond the first `MOST_LEVELS` - 1."""

ANSWERS = ("succeeded", "failed", "refused")
"""Figures of a level that say how requests ended; also their labels in metrics."""
DEADLINES = ("in_time", "late")
"""Figures of a level that say whether deadlines were met."""

Level: TypeAlias = int | Literal["other"]


@dataclass(slots=True)
class LevelFigures:
    """Figures of the requests of one priority."""

    succeeded: int = 0
    failed: int = 0
    """Requests answered with an error, except late ones."""
    refused: int = 0
    """Requests not taken: too many waited, the service was stopping, or a batcher knew that they would be late or were
    too large."""
    in_time: int = 0
    """Requests with a deadline that were answered by then."""
    late: int = 0
    """Requests whose deadline passed before they were answered."""
    latency_ms: Histogram = field(default_factory=Histogram)
    """Time from submission to the answer, of requests that succeeded, in milliseconds."""

    @property
    def in_time_share(self) -> float | None:
        """Share of the requests with a deadline, refused ones aside, that were answered by then; None if none.

        Failed requests are neither in time nor late.
        """
        ended = self.in_time + self.late
        return self.in_time / ended if ended else None


class PriorityLevels(dict[Level, LevelFigures]):
    """Figures by priority, at most `MOST_LEVELS`: the priorities that come first have their own, others share one."""

    def at(self, priority: int) -> LevelFigures:
        """Return the figures in which a request of `priority` is counted."""
        found = self.get(priority)
        if found is None:
            found = self.setdefault(priority if len(self) < MOST_LEVELS - 1 else OTHERS, LevelFigures())
        return found

    def ordered(self) -> list[tuple[Level, LevelFigures]]:
        """Return all levels, the most urgent first and the shared one last."""
        # A copy: the owner may be counting in another thread.
        return sorted(self.copy().items(), key=lambda item: (item[0] == OTHERS, item[0] if item[0] != OTHERS else 0))
