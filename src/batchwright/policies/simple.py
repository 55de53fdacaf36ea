"""Batches of a fixed size, with a longest wait or a time window.

*A longest wait*: collect `batch_size` requests and compute them together. So that the last few are not stranded, a
batch that is not full goes when its oldest request has waited `max_wait`. This is good if arrivals are steady and the
size is known to suit the model; a free model idles for up to `max_wait`, unlike with the default policy, `auto`. The
wait may differ by priority: requests that have time are gathered into full batches, go along with those that have none,
and go on their own when their time is up.

*A window*: the first request opens a window of fixed length, and all that arrive in it go together when it ends. A
window is fixed when it opens: later arrivals neither delay nor restart it, and requests that leave do not move it. The
first request after its end opens the next one, whether or not the model was free to take the last. A batch that is full
goes before its window ends.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from batchwright.policies.checks import check_priority, check_size, check_time
from batchwright.policies.latency import LatencyModel
from batchwright.policies.policy import Item, Policy, Reason, Shape, Timing


class BySize(Shape):
    """Shape that takes the first `max_batch_size` requests in order."""

    keeps_order = True

    def __init__(self, max_batch_size: int) -> None:
        check_size("max_batch_size", max_batch_size)
        self._size = max_batch_size

    @property
    def max_batch_size(self) -> int:
        return self._size

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        return items[: self._size], len(items) >= self._size


class MaxWait(Timing):
    """Timing that dispatches when a request has waited as long as it may.

    That is the request's own `max_wait` or, if it has none, `seconds`. These may depend on the priority: a mapping
    holds the seconds of some priorities, and those between them wait as long as the next more urgent one that is
    listed; priorities more urgent than all listed ones do not wait.
    """

    reason = Reason.MAX_WAIT

    def __init__(self, seconds: float | Mapping[int, float]) -> None:
        self._priorities: list[int] = []
        if isinstance(seconds, Mapping):
            for priority, wait in seconds.items():
                check_priority("max_wait", priority)
                check_time(f"max_wait[{priority}]", wait)
            self._priorities = sorted(seconds)
            self._waits = [0.0, *(seconds[priority] for priority in self._priorities)]
        else:
            check_time("max_wait", seconds)
            self._waits = [seconds]

    def release(self, item: Item) -> float:
        wait = item.max_wait
        if wait is None:
            wait = self._waits[bisect_right(self._priorities, item.priority)]
        return item.arrival + wait if wait else -math.inf


def simple(batch_size: int = 8, max_wait: float = 0.1) -> Policy:
    """Return a policy of batches of `batch_size`, or smaller once the oldest request has waited `max_wait` seconds."""
    return Policy(BySize(batch_size), timing=MaxWait(max_wait))


class Window(Timing):
    """Timing that dispatches when the window of the oldest request ends."""

    reason = Reason.WINDOW

    def __init__(self, seconds: float) -> None:
        check_time("window", seconds)
        self.seconds = seconds
        self._end = -math.inf

    def release(self, item: Item) -> float:
        if item.arrival >= self._end:
            self._end = item.arrival + self.seconds
        return self._end if item.max_wait is None else min(self._end, item.arrival + item.max_wait)


def window(seconds: float = 0.05, max_batch_size: int = 32) -> Policy:
    """Return a policy of batches of all that arrives within `seconds` of the first, at most `max_batch_size` each."""
    return Policy(BySize(max_batch_size), timing=Window(seconds))
