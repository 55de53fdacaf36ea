"""The largest batch that keeps a latency target.

The idea: larger batches are more efficient, and slower. How slow is learned (`latency.py`), and the largest batch that
keeps the target is taken. A request that arrives just after a batch has left waits for that batch, and then for its
own: so a batch may take half of the target. If more requests wait than such a batch holds, the queue costs the time,
and throughput shortens it: then a batch may take the whole target.

Nothing is held back while the model is free, and at least `min_batch_size` requests go if that many wait. A batch is at
most twice the largest one seen, in items and in tokens: beyond that, the model's latency is a guess. Growing from one
request to 32 takes five batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.policies.checks import check_size, check_time
from batchwright.policies.latency import LatencyModel
from batchwright.policies.policy import Item, NarrowedShape, Order, Policy, Shape
from batchwright.policies.simple import BySize


class TargetLatency(NarrowedShape):
    """Shape that takes as many of another shape's batch as meet the latency target."""

    def __init__(self, target: float, *, min_batch_size: int = 1, inner: Shape) -> None:
        check_time("target", target, above_zero=True)
        check_size("min_batch_size", min_batch_size)
        if min_batch_size > inner.max_batch_size:
            raise ValueError(f"min_batch_size={min_batch_size}: must be ≤ max_batch_size={inner.max_batch_size}")
        super().__init__(inner)
        self.target = target
        self.min_batch_size = min_batch_size

    def choose(self, items: Sequence[Item], now: float, latency: LatencyModel) -> tuple[Sequence[Item], bool]:
        batch, full = self.inner.choose(items, now, latency)
        within = self._largest(batch, self.target / 2, latency)
        if within < len(items):
            within = self._largest(batch, self.target, latency)
        return batch[:within], full or within < len(batch)

    def largest_size(self, latency: LatencyModel) -> int:
        """Return the size of the largest batch that would go now, of requests as long as those of the largest seen."""
        if not latency.largest_count:
            return self.min_batch_size
        item = Item(0.0, latency.largest_cells // latency.largest_count)
        # Estimates beyond twice the largest batch seen are not trusted.
        most = min(self.inner.max_batch_size, max(self.min_batch_size, 2 * latency.largest_count))
        return self._largest([item] * most, self.target / 2, latency)

    def _largest(self, batch: Sequence[Item], seconds: float, latency: LatencyModel) -> int:
        """Return how many of the first requests of `batch` take at most `seconds`; at least `min_batch_size`."""
        longest = 0
        for count, item in enumerate(batch, 1):
            longest = max(longest, item.length)
            if count > self.min_batch_size:
                trusted = count <= 2 * latency.largest_count and count * longest <= 2 * latency.largest_cells
                expected = latency.predict(count * longest, count)
                if not trusted or expected is None or expected > seconds:
                    return count - 1
        return len(batch)


def adaptive(
    target_latency: float = 0.1,
    min_batch_size: int = 1,
    max_batch_size: int = 32,
    *,
    order: Order | None = None,
) -> Policy:
    """Return a policy that takes the largest batch that meets `target_latency` seconds, between the two sizes."""
    check_time("target_latency", target_latency, above_zero=True)
    check_size("max_batch_size", max_batch_size)
    return Policy(
        TargetLatency(target_latency, min_batch_size=min_batch_size, inner=BySize(max_batch_size)), order=order
    )
