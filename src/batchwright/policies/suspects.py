"""Decisions about which lines are computed together after a process died computing them. Pure: time is an argument.

One of them may have ended the process, through the memory that it needs or a defect in native code. Nothing is left to
show which one. So all of them are suspects, and are tried again in groups that get smaller with each death, the last
time alone: a line fails only when a process has died `most` times while computing it, the last time with no other line
beside it. A suspect that succeeds is cleared.

With n lines in progress at the first death and `most` = 3, a group of the second try has √n lines, and a line of a
group that died is tried alone. So one fatal line among 256 others costs three deaths, and about 2 × 16 times the time
of a line, during which the process computes few lines at once. A group belongs to one tenant: after the first death, a
tenant's line takes down no line of another tenant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CRASHES = 3
"""Default number of deaths after which a line fails."""
PATIENCE = 10.0
"""Seconds for which suspects wait for an idle process, such as the one that is restarted."""
REST = 30.0
"""Seconds for which a tenant's lines come after those of all others once a process died of its suspects."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Waiting lines of one tenant that were in progress in a process when it died."""

    key: int
    tenant: str
    since: float
    """When the process died."""
    at_once: int
    """Most of them that may be in progress in one process; 0: they must fail."""
    taker: str | None
    """Worker that is trying them, if any."""
    rests_until: float = 0.0
    """When the tenant's rest after a death among its suspects ends."""


def at_once(crashes: int, lines: int, *, alone: bool, most: int) -> int:
    """Return how many of `lines` suspects may be in progress at once in a process; 0: the line fails.

    `crashes` counts the deaths of a process while they were in progress, including the last one; `alone`: it is
    certain that nothing else in progress caused that one. The group shrinks by the same factor with each remaining try.
    """
    if alone and crashes >= most:
        return 0
    left = max(1, most - crashes)
    # Rounded first, since roots are not exact.
    return max(1, math.ceil(round(math.pow(lines, (left - 1) / left), 9)))


def first(groups: Iterable[Suspects], now: float, *, resting: bool = False) -> Suspects | None:
    """Return the suspects for an idle worker to try: those that have waited longest.

    Suspects of tenants that rest are left out, unless `resting`.
    """
    due = [group for group in groups if group.at_once and (resting or group.rests_until <= now)]
    return min(due, key=lambda group: (group.since, group.key), default=None)


def worth_draining(groups: Iterable[Suspects], worker: str, now: float) -> Suspects | None:
    """Return the suspects for which a worker with other lines in progress should begin no more of those, if any.

    They have waited long enough, and no other worker is trying them.
    """
    overdue = (
        group for group in groups if group.taker == worker or (group.taker is None and now >= group.since + PATIENCE)
    )
    return first(overdue, now)
