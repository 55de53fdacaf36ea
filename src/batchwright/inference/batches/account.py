"""What became of a job's batches, for its report and its progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from batchwright.pacing.long_waits import span


@dataclass(slots=True)
class BatchAccount:
    """Numbers of batches and lines of this run, and the batches that are still at the provider."""

    submitted: int = 0
    """Batches that were created in this run."""
    resumed: int = 0
    """Batches that earlier runs had submitted and for which this run waited."""
    endings: dict[str, int] = field(default_factory=dict)
    """Batches by how they ended."""
    answered: int = 0
    """Lines with an answer."""
    failed: int = 0
    """Lines with an error of their own."""
    again: int = 0
    """Lines that expired, were cancelled or were refused because of other lines, and went into another batch."""
    moved: int = 0
    """Lines that became live requests, to meet the deadline."""
    at_provider: list[str] = field(default_factory=list)
    """Ids of batches that are still being computed."""
    unclear: int = 0
    """Batches for which it is not known yet whether the provider created them; the next run finds out."""

    late_seconds: float = 0.0
    """Seconds by which the run ended after the deadline of the job; 0 if it was in time or there is none."""

    def count_ending(self, ending: str) -> None:
        """Count a batch that ended."""
        self.endings[ending] = self.endings.get(ending, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """JSON values by name."""
        return asdict(self)


def standing_text(
    counts: Sequence[tuple[int, int]],
    *,
    gathered: int,
    waiting: int,
    live: int,
    next_look: float | None,
    silence: float,
) -> str | None:
    """Return a text that says where the lines of a job are; None if there are none.

    `counts`: lines done and total lines of each batch at the provider; `gathered`: lines of a batch that is not full;
    `waiting`: batches not submitted yet; `live`: lines that are live requests; `next_look`: seconds until the batches
    are polled; `silence`: seconds for which the provider has not answered.
    """
    parts = []
    if counts:
        done, total = sum(each[0] for each in counts), sum(each[1] for each in counts)
        parts.append(f"{_counted(len(counts), 'batch', 'batches')} at the provider: {done:,} of {total:,} lines done")
        if next_look is not None and not silence:
            parts.append(f"next look in {next_look:.0f} s")
    if waiting:
        parts.append(f"{_counted(waiting, 'batch', 'batches')} to be submitted")
    if gathered:
        parts.append(f"{_counted(gathered, 'line', 'lines')} gathered")
    if live:
        parts.append(f"{_counted(live, 'line', 'lines')} taken up as live requests")
    if parts and silence:
        parts.append(f"the provider has not answered for {span(silence)}, and is tried again")
    return ", ".join(parts) or None


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
