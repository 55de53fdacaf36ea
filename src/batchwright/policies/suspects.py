"""Which lines are computed together after a process died with them in work. Pure: time comes in as an argument.

One of them may have ended the process: by the memory that it needs, by a defect in native code. Nothing is left to say
which. So all of them are suspects, and are tried again in companies that get smaller with each death, the last time
alone: a line fails only when a process has died `most` times with it in work, the last time with no other line beside
it. A suspect that succeeds is cleared.

With n lines in work at the first death and `most` = 3, a company of the second try has √n lines, and a line of a
company that died is tried alone. So one line that kills among 256 others costs three deaths, and about 2 × 16 times the
time of a line during which the process computes few lines at once. Companies are of one tenant: beyond the
first death, the line of a tenant takes down none of another's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CRASHES = 3
"""By default."""
PATIENCE = 10.0
"""Seconds for which suspects wait for a process that has nothing else in work, such as the one that starts again."""
REST = 30.0
"""Seconds in which, after a death among its suspects, a tenant's lines come after those of all others."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Lines of one tenant that were in work in a process when it died, those of them that wait."""

    key: int
    tenant: str
    since: float
    """When it died."""
    at_once: int
    """Most of them in work in one process; 0: they are to fail."""
    taker: str | None
    """The worker that sees to them."""
    rests_until: float = 0.0
    """The tenant's, after a death among suspects."""


def at_once(crashes: int, lines: int, *, alone: bool, most: int) -> int:
    """How many of `lines` suspects may be in work at once in a process; 0: the line fails.

    `crashes` counts the deaths of a process with them in work, this last one included; `alone`: in that one it was sure
    that no other line was in work. The company is such that it shrinks by the same factor with each try that is left.
    """
    if alone and crashes >= most:
        return 0
    left = max(1, most - crashes)
    # Rounded first, since roots are not exact.
    return max(1, math.ceil(round(math.pow(lines, (left - 1) / left), 9)))


def first(groups: Iterable[Suspects], now: float, *, resting: bool = False) -> Suspects | None:
    """The suspects that a worker with nothing in work tries: those that have waited longest.

    Without `resting`, those of tenants that rest are left out.
    """
    due = [group for group in groups if group.at_once and (resting or group.rests_until <= now)]
    return min(due, key=lambda group: (group.since, group.key), default=None)


def worth_draining(groups: Iterable[Suspects], worker: str, now: float) -> Suspects | None:
    """The suspects for whose sake a worker that has other lines in work begins no more of those.

    They have waited for long enough, and no other worker sees to them.
    """
    overdue = (
        group for group in groups if group.taker == worker or (group.taker is None and now >= group.since + PATIENCE)
    )
    return first(overdue, now)
