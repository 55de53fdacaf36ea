"""Linear model of seconds, learned from measurements: coefficients · features, each coefficient at least 0.

- Least squares of the relative error, so that quick work counts as much as slow work. Old measurements fade (`memory`
  of them are remembered), so changes in a model's speed are followed. Only a few sums are kept, which each measurement
  updates: recursive least squares, without the inverse that drifts.
- Coefficients below 0 would make more work look faster. The fit is solved for every subset of them, and the best one
  without a negative coefficient is taken; with so few unknowns this is exact and cheap.
- The sums may not determine all coefficients, for instance when all measurements were alike. Then the fit with fewer of
  them is kept, the first feature before the others: a belief that more work costs nothing is corrected by the next
  measurement, but a belief in proportional cost never leads to trying more.
- Measurements far from their prediction (a pause for garbage collection, a cold cache) are left out, unless there was
  never so much work before: then the prediction was a guess. When several such measurements come in a row, it is the
  model that has changed: what was learned is discarded, and learned anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement
from operator import mul, truediv

_SHORTEST = 1e-7
_SINGULAR = 1e-9
_BETTER = 0.98
"""A fit with more coefficients must lower the error to this share of it."""
_WARM_UP = 8
"""Measurements before the first outlier."""
_OUTLIER = 6.0
"""Outliers are this many times the usual error."""
_LEAST_ERROR = 0.05
_FITTED_ALWAYS = 32
"""Measurements at first, after each of which the model is fitted."""
_CHANGED = 4
"""Number of outliers in a row that are taken to be the truth."""


class FadedFit:
    """Learns from `observe`, answers through `predict`; `size` features, the first of which is 1 for a fixed cost.

    `memory` is the number of measurements that it looks back on, and `every` the number after which it is fitted again
    once there are some: a fit costs more than everything else that is done for a small batch. Raises ValueError when
    one of them is below 1.
    """

    def __init__(self, size: int, memory: int, *, every: int = 8) -> None:
        if size < 1 or memory < 1 or every < 1:
            raise ValueError(f"size={size}, memory={memory}, every={every}: all must be at least 1")
        self.size = size
        self._every = every
        self.coefficients: tuple[float, ...] = (0.0,) * size
        """Seconds for one of each feature."""
        self.observations = 0
        """Measurements since the fit last started anew; 0: nothing is known."""
        self.rejected = 0
        """Outliers left out since this was made."""
        self._subsets = [chosen for number in range(1, size + 1) for chosen in combinations(range(size), number)]
        """Sets of coefficients in use; the first of equally good ones is taken."""
        self._pairs = list(combinations_with_replacement(range(size), 2))
        self._keep = 1.0 - 1.0 / memory
        self._outliers = 0
        """Outliers in a row, up to now."""
        self._error = 0.0
        """Usual relative error."""
        self._forget()

    def observe(self, features: Sequence[float], seconds: float, *, is_larger: bool) -> None:
        """Learn that work with these features took `seconds`; `is_larger`: whether some feature is larger than ever."""
        seconds = max(seconds, _SHORTEST)
        expected = self.predict(features)
        if expected is not None and not is_larger:
            error = abs(expected - seconds) / max(expected, seconds)
            if self._is_outlier(error):
                self.rejected += 1
                self._outliers += 1
                if self._outliers < _CHANGED:
                    return
                self._forget()
            else:
                self._error += (error - self._error) * max(1.0 / self.observations, 0.05)
        self._outliers = 0
        self.observations += 1
        self._unsummed.append((features, seconds))
        if is_larger or self.observations <= _FITTED_ALWAYS or not self.observations % self._every:
            self._fit()

    def predict(self, features: Sequence[float]) -> float | None:
        """Return the seconds; None when nothing is known."""
        if not self.observations:
            return None
        seconds: float = sum(map(mul, self.coefficients, features))
        return seconds

    def _is_outlier(self, error: float) -> bool:
        return self.observations >= _WARM_UP and error > max(_OUTLIER * self._error, _LEAST_ERROR)

    def _forget(self) -> None:
        self.observations = 0
        self._error = 0.0
        self._weight = 0.0
        self._sums = [0.0] * self.size
        """Sums of the features, each divided by the seconds."""
        self._products = [0.0] * len(self._pairs)
        """Sums of the products of two features each, by `_pairs`, divided likewise."""
        self._unsummed: list[tuple[Sequence[float], float]] = []
        """Measurements since the last fit, which are not in the sums yet: adding eight costs little more than one."""

    def _add_up(self) -> None:
        """Add the measurements since the last fit to the sums, as if each had been added when it came."""
        count = len(self._unsummed)
        fading = [self._keep**younger for younger in reversed(range(count))]
        scaled = [[feature / seconds for feature in features] for features, seconds in self._unsummed]
        columns = list(zip(*scaled, strict=True))
        faded = [list(map(mul, column, fading)) for column in columns]
        keep = self._keep**count
        self._weight = self._weight * keep + sum(fading)
        self._sums = [total * keep + sum(column) for total, column in zip(self._sums, faded, strict=True)]
        products = zip(self._products, self._pairs, strict=True)
        self._products = [total * keep + sum(map(mul, faded[i], columns[j])) for total, (i, j) in products]
        self._unsummed.clear()

    def _fit(self) -> None:
        self._add_up()
        best_error = float("inf")
        best: tuple[tuple[int, ...], list[float]] | None = None
        # Rounding leaves errors of this size where the fit is exact.
        floor = 1e-12 * self._weight
        # The equations in units in which the matrix has ones on its diagonal, or 0 for a feature that was always 0.
        matrix: list[list[float]] = [[0.0] * self.size for _ in range(self.size)]
        for total, (i, j) in zip(self._products, self._pairs, strict=True):
            matrix[i][j] = matrix[j][i] = total
        scale = [matrix[i][i] ** 0.5 or math.inf for i in range(self.size)]
        matrix = [
            [each / (mine * other) for each, other in zip(row, scale, strict=True)]
            for row, mine in zip(matrix, scale, strict=True)
        ]
        targets = list(map(truediv, self._sums, scale))
        for subset in self._subsets:
            values = _solve(matrix, targets, subset)
            if values is None or min(values) < 0.0:
                continue
            error = max(
                self._weight - sum([value * targets[i] for value, i in zip(values, subset, strict=True)]), floor
            )
            if error < best_error * _BETTER:
                best_error, best = error, (subset, values)
        if best is not None:
            fitted = [0.0] * self.size
            for i, value in zip(*best, strict=True):
                fitted[i] = value / scale[i]
            self.coefficients = tuple(fitted)


def _solve(matrix: Sequence[Sequence[float]], targets: Sequence[float], subset: tuple[int, ...]) -> list[float] | None:
    """Return the least-squares coefficients of `subset`; None where the equations do not settle them."""
    size = len(subset)
    if size == 1:
        i = subset[0]
        return [targets[i]] if matrix[i][i] else None
    rows = [[matrix[i][j] for j in subset] + [targets[i]] for i in subset]
    # Gauss without pivoting: the matrix is symmetric and positive.
    for pivot, head in enumerate(rows):
        if head[pivot] < _SINGULAR:
            return None
        for row in rows[pivot + 1 :]:
            factor = row[pivot] / head[pivot]
            for column in range(pivot, size + 1):
                row[column] -= factor * head[column]
    values = [0.0] * size
    for pivot in reversed(range(size)):
        known = sum([rows[pivot][column] * values[column] for column in range(pivot + 1, size)])
        values[pivot] = (rows[pivot][size] - known) / rows[pivot][pivot]
    return values
