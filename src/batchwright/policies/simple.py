"""Fixed size with a longest wait.

The idea: collect `batch_size` requests and compute them together. So that the last few are not left lying, a batch that
is not full goes when its oldest request has waited `max_wait`. Good when arrivals are steady and the size is known to
suit the model; a free model idles for up to `max_wait`, which the default policy, `auto`, does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.policies.checks import check_size, check_time
from batchwright.policies.item import Item
from batchwright.policies.latency import LatencyModel
from batchwright.policies.policy import Policy, Reason


class BySize:
    """Shape: the first `max_batch_size` in order."""

    keeps_order = True
    max_batch_tokens = None

    def __init__(self, max_batch_size: int) -> None:
        check_size("max_batch_size", max_batch_size)
        self.max_batch_size = max_batch_size

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        return items[: self.max_batch_size], len(items) >= self.max_batch_size


class MaxWait:
    """Timing: when the oldest has waited `seconds`."""

    reason = Reason.MAX_WAIT

    def __init__(self, seconds: float) -> None:
        check_time("max_wait", seconds)
        self.seconds = seconds

    def release(self, item: Item) -> float:
        return item.arrival + self.seconds


def simple(batch_size: int = 8, max_wait: float = 0.1) -> Policy:
    """Batches of `batch_size`, or of what there is when the oldest has waited `max_wait` seconds."""
    return Policy(BySize(batch_size), timing=MaxWait(max_wait))
