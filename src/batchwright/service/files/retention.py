"""Decision on what to do with a file in the data folder without a record in the database. No clock, no I/O.

Either a crash left the file, between its rename and the commit of its record, or its record is in a newer state of the
database, or in another one. Only time distinguishes these, so a file is first watched, then quarantined, then removed.

Time is what a process measures between its own sweeps on a monotonic clock. The time of day does not count, nor do
hours in which no process ran, so no jump of a clock shortens a period.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from batchwright.service.limits import DAY, LONGEST_AGE, LONGEST_WINDOW

HOUR = 3600.0
GRACE = DAY
"""Seconds for which a file is watched before it is quarantined, and again before it is removed from there."""
LONGEST_NEED = LONGEST_AGE + LONGEST_WINDOW + DAY
"""Seconds after which no database can need a file: a batch created just before it expires reads it until the end of its
window."""
LONGEST_STEP = HOUR
"""Most seconds that count between two sightings, so that every period consists of many sightings."""

Verdict: TypeAlias = Literal["keep", "quarantine", "restore", "remove"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """State in which a sweep finds a file that no process is writing."""

    stamp: str
    """Text that changes when the contents do."""
    quarantined: bool = False
    recorded: bool = False
    """Whether the database has a record of the file."""
    ever_recorded: bool = False
    """Whether a database ever had a record of the file; then it was not left by a crash."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Time for which a file has been seen at its place without a record."""

    stamp: str
    quarantined: bool
    seconds: float = 0.0


def judge(seen: Sighting, watch: Watch | None, elapsed: float) -> tuple[Verdict, Watch | None]:
    """Return what to do with a file, and its watch from now on; None: it is not watched.

    `watch`: its watch after the previous sweep. `elapsed`: seconds since then; 0 after a sweep by another process.
    """
    if seen.recorded:
        return ("restore" if seen.quarantined else "keep"), None
    if watch is None or (watch.stamp, watch.quarantined) != (seen.stamp, seen.quarantined):
        return "keep", Watch(seen.stamp, seen.quarantined)
    seconds = watch.seconds + min(max(elapsed, 0.0), LONGEST_STEP)
    if not seen.quarantined:
        if seconds >= GRACE:
            return "quarantine", Watch(seen.stamp, quarantined=True)
    elif seconds >= (LONGEST_NEED if seen.ever_recorded else GRACE):
        return "remove", None
    return "keep", Watch(seen.stamp, seen.quarantined, seconds)
