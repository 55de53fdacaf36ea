"""How long a batch will take, learned from those that were computed.

The idea: seconds = α + β · padded tokens + γ · items, each coefficient at least 0. α is what any batch costs, β what a
cell of the padded rectangle costs, γ what a request costs whatever its length.

- Least squares of the relative error, so that a small batch counts as much as a large one. Old batches fade
  (`memory` batches are remembered), so a model that changes its speed is followed. What is kept is ten sums, and each
  batch updates them: recursive least squares, without the inverse that drifts.
- Coefficients below 0 would make a larger batch look faster. All seven ways of leaving some out are solved, and the
  best one without a negative coefficient is taken; with three unknowns this is exact, and cheap.
- The sums can say less than three coefficients need, for instance when all batches were alike. Then the fit that needs
  fewer of them is kept, α first: to believe that a larger batch costs nothing more is put right by the next one, but
  nobody who believes in proportion ever tries one.
- A batch far from its prediction (a pause for garbage collection, a cold cache) is left out, unless none was so large
  before: then the prediction was a guess. When such batches come one after another it is the model that has changed:
  what was learned is let go, and learned anew.
"""

from __future__ import annotations

from collections.abc import Sequence

_SUBSETS: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
"""Which of the three coefficients are in use; the first of equally good ones is taken."""
_SHORTEST = 1e-7
_SINGULAR = 1e-9
_BETTER = 0.98
"""A fit with more coefficients must lower the error at least to this share of it."""
_WARM_UP = 8
"""No outliers among so few batches."""
_OUTLIER = 6.0
"""Times the usual error."""
_LEAST_ERROR = 0.05
_FITTED_ALWAYS, _FITTED_EVERY = 32, 8
"""A fit costs more than all else that is done for a small batch: among many, one more says little."""
_CHANGED = 4
"""So many outliers one after another are the truth."""


class LatencyModel:
    """Learns from `observe`, answers through `predict`. `memory` is the number of batches that it looks back."""

    def __init__(self, memory: int = 200) -> None:
        if memory < 1:
            raise ValueError(f"memory={memory}: must be at least 1")
        self._keep = 1.0 - 1.0 / memory
        self.coefficients = (0.0, 0.0, 0.0)
        """Seconds for each batch, for each padded token, and for each item."""
        self.batches = 0
        """Observed since what was known was last let go; 0: nothing is known."""
        self.rejected = 0
        """Outliers left out since the model was made."""
        self.largest_count = 0
        """Items of the largest batch observed."""
        self.largest_cells = 0
        """Padded tokens of the largest batch observed."""
        self._outliers = 0
        """One after another, until now."""
        self._error = 0.0
        """The usual relative error."""
        self._weight = 0.0
        self._sums = [0.0] * 3
        """Of the features, each divided by the time of its batch."""
        self._products = [[0.0] * 3 for _ in range(3)]
        """Likewise, of the products of any two."""

    def observe(self, cells: int, count: int, seconds: float) -> None:
        """A batch of `count` items, padded to `cells` tokens in all, took `seconds`."""
        seconds = max(seconds, _SHORTEST)
        is_larger = count > self.largest_count or cells > self.largest_cells
        self.largest_count = max(self.largest_count, count)
        self.largest_cells = max(self.largest_cells, cells)
        expected = self.predict(cells, count)
        if expected is not None and not is_larger:
            error = abs(expected - seconds) / max(expected, seconds)
            if self._is_outlier(error):
                self.rejected += 1
                self._outliers += 1
                if self._outliers < _CHANGED:
                    return
                self._forget()
            else:
                self._error += (error - self._error) * max(1.0 / self.batches, 0.05)
        self._outliers = 0
        self.batches += 1
        self._learn((1.0, float(cells), float(count)), seconds)
        if is_larger or self.batches <= _FITTED_ALWAYS or not self.batches % _FITTED_EVERY:
            self._fit()

    def predict(self, cells: int | float, count: int | float, batches: int = 1) -> float | None:
        """Seconds for `count` items in `batches` batches, `cells` padded tokens in all; None when nothing is known."""
        if not self.batches:
            return None
        base, by_cell, by_item = self.coefficients
        return base * batches + by_cell * cells + by_item * count

    def _is_outlier(self, error: float) -> bool:
        return self.batches >= _WARM_UP and error > max(_OUTLIER * self._error, _LEAST_ERROR)

    def _forget(self) -> None:
        self.batches = 0
        self._error = 0.0
        self._weight = 0.0
        self._sums = [0.0] * 3
        self._products = [[0.0] * 3 for _ in range(3)]

    def _learn(self, features: tuple[float, float, float], seconds: float) -> None:
        scaled = [feature / seconds for feature in features]
        keep = self._keep
        self._weight = self._weight * keep + 1.0
        for i in range(3):
            self._sums[i] = self._sums[i] * keep + scaled[i]
            row = self._products[i]
            for j in range(3):
                row[j] = row[j] * keep + scaled[i] * scaled[j]

    def _fit(self) -> None:
        best_error = float("inf")
        best: tuple[float, float, float] | None = None
        # Rounding leaves errors of this size where the fit is exact.
        floor = 1e-12 * self._weight
        for subset in _SUBSETS:
            values = _solve(self._products, self._sums, subset)
            if values is None or min(values) < 0.0:
                continue
            error = max(self._weight - sum(v * self._sums[i] for v, i in zip(values, subset, strict=True)), floor)
            if error < best_error * _BETTER:
                best_error = error
                fitted = [0.0, 0.0, 0.0]
                for value, i in zip(values, subset, strict=True):
                    fitted[i] = value
                best = (fitted[0], fitted[1], fitted[2])
        if best is not None:
            self.coefficients = best


def _solve(products: Sequence[Sequence[float]], sums: Sequence[float], subset: tuple[int, ...]) -> list[float] | None:
    """The least-squares coefficients of `subset`; None where the sums do not settle them."""
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
