"""When a message that did not arrive is tried again. Pure: times and chance come in as arguments."""

from __future__ import annotations

from batchwright.backoff import Backoff

GIVE_UP_AFTER = 72 * 3600.0
"""Seconds from the event for which a message is tried."""
_BACKOFF = Backoff(first=5.0, longest=6 * 3600.0, factor=3.0, jitter=(0.75, 1.25))


def next_try(*, created_at: float, tries: int, now: float, luck: float) -> float | None:
    """Return when to try again, in Unix seconds; None: it is time to give up.

    `tries`: how many came before the one that just failed. The pauses are 5 s, 15 s, 45 s and so on up to 6 hours, each
    up to a quarter longer or shorter by `luck` (from 0 to 1), so that messages that failed together come back apart.
    The last try is at the end of the 72 hours, or right then when the service itself was away for longer.
    """
    end = created_at + GIVE_UP_AFTER
    if now >= end:
        return None
    return min(end, now + _BACKOFF.pause(tries + 1, luck))
