"""A model of how long a batch takes, learned from the batches that were computed.

Seconds = α + β · padded tokens + γ · items: α is the cost of any batch, β that of a cell of the padded rectangle, and γ
that of a request of any length. `fitting.py` describes how they are learned.

About every second batch takes longer than expected. Code that holds a request back until it has just enough time left
needs `predict_high`, which few batches exceed: the expected time, times the largest ratio of measured to expected time
among the last batches (of 200, about their 99.5th percentile), and more than that while few have been measured. For
more work than was ever measured, it assumes that time grows in proportion.
"""

from __future__ import annotations

import math
from collections import deque

from batchwright.fitting import FadedFit

_FITTED_EVERY = 24
"""Batches after which the fit is recomputed, once there is one: that many change little of what it remembers."""


class LatencyModel:
    """Latency model that learns through `observe`; `memory` is the number of past batches that count."""

    def __init__(self, memory: int = 200) -> None:
        self._fit = FadedFit(3, memory, every=_FITTED_EVERY)
        self._ratios: deque[float] = deque(maxlen=memory)
        """Measured over expected seconds of recent batches, without outliers and guesses."""
        self.coefficients = (0.0, 0.0, 0.0)
        """Seconds for each batch, for each padded token, and for each item."""
        self.batches = 0
        """Batches observed since the fit last started over; 0: nothing is known."""
        self.largest_count = 0
        """Items of the largest batch observed."""
        self.largest_cells = 0
        """Padded tokens of the largest batch observed."""

    def observe(self, cells: int, count: int, seconds: float) -> None:
        """Learn that a batch of `count` items, padded to `cells` tokens in total, took `seconds`."""
        is_larger = count > self.largest_count or cells > self.largest_cells
        self.largest_count = max(self.largest_count, count)
        self.largest_cells = max(self.largest_cells, cells)
        expected, rejected, batches = self.predict(cells, count), self._fit.rejected, self._fit.observations
        self._fit.observe((1.0, float(cells), float(count)), seconds, is_larger=is_larger)
        if self._fit.observations < batches:
            self._ratios.clear()
        elif expected and not is_larger and self._fit.rejected == rejected:
            self._ratios.append(seconds / expected)
        base, by_cell, by_item = self._fit.coefficients
        self.coefficients = base, by_cell, by_item
        self.batches = self._fit.observations

    def predict(self, cells: int | float, count: int | float, batches: int = 1) -> float | None:
        """Return the seconds for `count` items in `batches` batches, `cells` padded tokens in total; None: unknown."""
        if not self.batches:
            return None
        base, by_cell, by_item = self.coefficients
        return base * batches + by_cell * cells + by_item * count

    def predict_high(self, cells: int | float, count: int | float, batches: int = 1) -> float | None:
        """Return the seconds that the same work rarely exceeds; None: unknown."""
        beyond = max(1.0, count / batches / max(1, self.largest_count), cells / batches / max(1, self.largest_cells))
        expected = self.predict(cells / beyond, count / beyond, batches)
        if expected is None:
            return None
        spread = max(self._ratios, default=1.0) * (1.0 + 1.0 / math.sqrt(1 + len(self._ratios)))
        return expected * beyond * max(spread, 1.0)
