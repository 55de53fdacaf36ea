"""What happens to a file of the data folder that no record in the database names. Decided without clock and I/O.

Such a file was left by a crash, between its rename and the commit of its record; or it belongs to records that this
database does not have: those of a newer state of it, or of another one. Only time tells the two apart, so a file is
watched first, set aside then, and removed last.

Time is what the watching process measured between two sweeps of its own, on a clock that nobody sets. The time of day
has no part in it, and neither have hours in which nothing was running. So no jump of a clock makes a period shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from batchwright.service.limits import DAY, LONGEST_AGE, LONGEST_WINDOW

HOUR = 3600.0
GRACE = DAY
"""Seconds for which a file is watched before it goes to the quarantine, and there before it is removed."""
LONGEST_NEED = LONGEST_AGE + LONGEST_WINDOW + DAY
"""Seconds after which no database can need a file any more: a batch that was made just before a file expired reads it
for as long as its window lasts."""
LONGEST_STEP = HOUR
"""Most seconds that two sightings can count for, so that every period consists of many of them."""

Verdict: TypeAlias = Literal["keep", "quarantine", "restore", "remove"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """A file that no process is writing, as a sweep finds it."""

    stamp: str
    """Stamp that changes when the contents do."""
    quarantined: bool = False
    recorded: bool = False
    """Whether the database has a record of it."""
    ever_recorded: bool = False
    """Whether a database ever had a record of it: then it was not left behind by a crash."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Record of how long a file has been seen without a record where it is now."""

    stamp: str
    quarantined: bool
    seconds: float = 0.0


def judge(seen: Sighting, watch: Watch | None, elapsed: float) -> tuple[Verdict, Watch | None]:
    """Return what to do with a file, and how it is watched from now on; None: not.

    `watch`: what the sweep before made of it. `elapsed`: seconds since that sweep; 0 where it was another process's.
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
