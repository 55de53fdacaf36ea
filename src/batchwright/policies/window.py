"""Time windows.

The idea: the first request opens a window of fixed length, and all that arrive in it go together when it ends. A window
is fixed when it opens: later arrivals neither delay it nor start it anew, and requests that leave do not move it. The
first request after its end opens the next one, whether or not the model was free to take the last. Batches have at most
`max_batch_size` requests; one that is full goes before its window ends.
"""

from __future__ import annotations

import math

from batchwright.policies.checks import check_time
from batchwright.policies.item import Item
from batchwright.policies.policy import Policy, Reason
from batchwright.policies.simple import BySize


class Window:
    """Timing: when the window of the oldest request ends."""

    reason = Reason.WINDOW

    def __init__(self, seconds: float) -> None:
        check_time("window", seconds)
        self.seconds = seconds
        self._end = -math.inf

    def release(self, item: Item) -> float:
        if item.arrival >= self._end:
            self._end = item.arrival + self.seconds
        return self._end


def window(seconds: float = 0.05, max_batch_size: int = 32) -> Policy:
    """All that arrive within `seconds` of the first go together, in batches of at most `max_batch_size`."""
    return Policy(BySize(max_batch_size), timing=Window(seconds))
