"""Counters and percentiles in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

_GROWTH = 1.02
_LOG_GROWTH = math.log(_GROWTH)


@dataclass(slots=True)
class Histogram:
    """Percentiles of positive values within 1%, whatever their number.

    Buckets grow geometrically by 2%, so a value is known to ±1% (the DDSketch construction, Masson et al. 2019).
    Values ≤ 0 count as zero.
    """

    count: int = 0
    total: float = 0.0
    maximum: float = 0.0
    _zeros: int = 0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over. Raises ValueError, and counts nothing, when it is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"add(value={value}): must be a finite number")
        self.count += times
        if value <= 0.0:
            self._zeros += times
            return
        self.total += value * times
        self.maximum = max(self.maximum, value)
        bucket = _bucket(value)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + times

    def add_all(self, values: Sequence[float]) -> None:
        """`add` each of `values`, quicker than one by one. Raises ValueError at one that is not finite."""
        total = sum(values)
        if not math.isfinite(total) or min(values, default=0.0) <= 0.0:
            for value in values:
                self.add(value)
            return
        self.count += len(values)
        self.total += total
        self.maximum = max(self.maximum, *values)
        buckets = self._buckets
        # `_bucket` inlined: calling it would take as long again.
        for bucket in [math.ceil(math.log(value) / _LOG_GROWTH) for value in values]:
            buckets[bucket] = buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float | None:
        """Mean of the values; None when empty."""
        return self.total / self.count if self.count else None

    def percentile(self, q: float) -> float | None:
        """Return the value below which `q` percent lie, 0 ≤ q ≤ 100; None when empty."""
        if not 0.0 <= q <= 100.0:
            raise ValueError(f"percentile(q={q}): must be between 0 and 100")
        if not self.count:
            return None
        rank = max(1, math.ceil(self.count * q / 100.0))
        if rank <= self._zeros:
            return 0.0
        seen = self._zeros
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                middle = math.exp((bucket - 0.5) * _LOG_GROWTH)
                return min(middle, self.maximum)
        return self.maximum

    def at_most(self, bounds: Sequence[float]) -> list[int]:
        """Return how many values are at most each of the ascending `bounds` (> 0), and finally how many there are.

        Values up to 2% above a bound may be counted with it; one that equals it always is.
        """
        counts, seen = [], self._zeros
        # A copy: the owner may be counting in another thread.
        buckets = sorted(self._buckets.items())
        position = 0
        for bound in bounds:
            last = _bucket(bound)
            while position < len(buckets) and buckets[position][0] <= last:
                seen += buckets[position][1]
                position += 1
            counts.append(seen)
        return [*counts, seen + sum(number for _, number in buckets[position:])]

    @classmethod
    def merged(cls, histograms: Iterable[Histogram]) -> Histogram:
        """Return a histogram of the values of all `histograms`."""
        result = cls()
        for each in histograms:
            result.count += each.count
            result.total += each.total
            result.maximum = max(result.maximum, each.maximum)
            result._zeros += each._zeros  # noqa: SLF001 - of this class
            for bucket, number in each._buckets.copy().items():  # noqa: SLF001
                result._buckets[bucket] = result._buckets.get(bucket, 0) + number
        return result

    def copy(self) -> Histogram:
        """Return an independent copy."""
        return replace(self, _buckets=dict(self._buckets))

    def summary(self) -> dict[str, float | None]:
        """Return `{"mean", "p50", "p90", "p99", "max"}`, in the unit of the values; None where empty."""
        return {
            "mean": self.mean,
            "p50": self.percentile(50),
            "p90": self.percentile(90),
            "p99": self.percentile(99),
            "max": self.maximum if self.count else None,
        }


@dataclass(slots=True)
class Recent:
    """The last values, 1000 by default, and their exact percentiles: what a dashboard shows as current."""

    size: int = 1000
    _values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._values = deque(maxlen=self.size)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)

    def percentile(self, q: float) -> float | None:
        """Return the value that `q` percent do not exceed, 0 ≤ q ≤ 100; None when empty."""
        if not 0.0 <= q <= 100.0:
            raise ValueError(f"percentile(q={q}): must be between 0 and 100")
        ordered = sorted(self._values)
        return ordered[max(1, math.ceil(len(ordered) * q / 100.0)) - 1] if ordered else None

    @classmethod
    def merged(cls, recents: Iterable[Recent], size: int = 1000) -> Recent:
        """Return the last values of all `recents`, equally many of each."""
        every = [each for each in recents if len(each)]
        result = cls(size)
        for each in every:
            result._values.extend([*each._values][-(size // len(every)) :])  # noqa: SLF001 - of this class
        return result

    def copy(self) -> Recent:
        """Return an independent copy."""
        other = Recent(self.size)
        other._values = self._values.copy()
        return other


def _bucket(value: float) -> int:
    return math.ceil(math.log(value) / _LOG_GROWTH)
