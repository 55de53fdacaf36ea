"""A law of seconds, learned from measurements: coefficients · features, each coefficient at least 0.

- Least squares of the relative error, so that what is quick counts as much as what is slow. Old measurements fade
  (`memory` of them are remembered), so a model that changes its speed is followed. What is kept is a few sums, and each
  measurement updates them: recursive least squares, without the inverse that drifts.
- Coefficients below 0 would make more work look faster. All ways of leaving some out are solved, and the best one
  without a negative coefficient is taken; with so few unknowns this is exact, and cheap.
- The sums can say less than the coefficients need, for instance when all measurements were alike. Then the fit that
  needs fewer of them is kept, the first feature before the others: to believe that more work costs nothing is put right
  by the next measurement, but nobody who believes in proportion ever tries more.
- What is far from its prediction (a pause for garbage collection, a cold cache) is left out, unless there was never so
  much work before: then the prediction was a guess. When such measurements come one after another it is the model that
  has changed: what was learned is let go, and learned anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement
from operator import mul

_SHORTEST = 1e-7
_SINGULAR = 1e-9
_BETTER = 0.98
"""Share of the error to which a fit with more coefficients must lower it."""
_WARM_UP = 8
"""Measurements before the first outlier."""
_OUTLIER = 6.0
"""Outliers are this many times the usual error."""
_LEAST_ERROR = 0.05
_FITTED_ALWAYS, _FITTED_EVERY = 32, 8
"""Fits at first, and then among how many: a fit costs more than all else that is done for a small batch."""
_CHANGED = 4
"""Number of outliers one after another that are the truth."""


class FadedFit:
    """Learns from `observe`, answers through `predict`; `size` features, the first of which is 1 for a fixed cost.

    `memory` is the number of measurements that it looks back. Raises ValueError when either is below 1.
    """

    def __init__(self, size: int, memory: int) -> None:
        if size < 1 or memory < 1:
            raise ValueError(f"size={size}, memory={memory}: both must be at least 1")
        self.size = size
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
        """Outliers one after another, until now."""
        self._error = 0.0
        """Usual relative error."""
        self._forget()

    def observe(self, features: Sequence[float], seconds: float, *, is_larger: bool) -> None:
        """Learn that work with these features took `seconds`; `is_larger`: there was never so much of some before."""
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
        self._learn(features, seconds)
        if is_larger or self.observations <= _FITTED_ALWAYS or not self.observations % _FITTED_EVERY:
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

    def _learn(self, features: Sequence[float], seconds: float) -> None:
        scaled = [feature / seconds for feature in features]
        keep = self._keep
        self._weight = self._weight * keep + 1.0
        self._sums = [total * keep + each for total, each in zip(self._sums, scaled, strict=True)]
        products = zip(self._products, self._pairs, strict=True)
        self._products = [total * keep + scaled[i] * scaled[j] for total, (i, j) in products]

    def _fit(self) -> None:
        best_error = float("inf")
        best: tuple[float, ...] | None = None
        # Rounding leaves errors of this size where the fit is exact.
        floor = 1e-12 * self._weight
        products: list[list[float]] = [[0.0] * self.size for _ in range(self.size)]
        for total, (i, j) in zip(self._products, self._pairs, strict=True):
            products[i][j] = products[j][i] = total
        for subset in self._subsets:
            values = _solve(products, self._sums, subset)
            if values is None or min(values) < 0.0:
                continue
            error = max(self._weight - sum(v * self._sums[i] for v, i in zip(values, subset, strict=True)), floor)
            if error < best_error * _BETTER:
                best_error = error
                fitted = [0.0] * self.size
                for value, i in zip(values, subset, strict=True):
                    fitted[i] = value
                best = tuple(fitted)
        if best is not None:
            self.coefficients = best


def _solve(products: Sequence[Sequence[float]], sums: Sequence[float], subset: tuple[int, ...]) -> list[float] | None:
    """Return the least-squares coefficients of `subset`; None where the sums do not settle them."""
    scale = [products[i][i] ** 0.5 for i in subset]
    if min(scale) <= 0.0:
        return None
    size = len(subset)
    if size == 1:
        return [sums[subset[0]] / scale[0] ** 2]
    rows = [
        [products[i][j] / (scale[a] * scale[b]) for b, j in enumerate(subset)] + [sums[i] / scale[a]]
        for a, i in enumerate(subset)
    ]
    # Gauss without pivoting: the matrix is symmetric and positive, with ones on its diagonal.
    for pivot in range(size):
        if rows[pivot][pivot] < _SINGULAR:
            return None
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[below][column] -= factor * rows[pivot][column]
    values = [0.0] * size
    for pivot in reversed(range(size)):
        known = sum(rows[pivot][column] * values[column] for column in range(pivot + 1, size))
        values[pivot] = (rows[pivot][size] - known) / rows[pivot][pivot]
    return [value / by for value, by in zip(values, scale, strict=True)]
