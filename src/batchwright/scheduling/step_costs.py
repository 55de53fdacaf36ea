"""Cost model of an engine's steps: seconds of a step by its shape, fitted to measured steps.

`StepTimes` (`slo.py`) follows an engine from step to step and forgets within minutes. `StepCosts` is worth keeping: a
cost model for steps of any shape that this engine computes on this machine, with the spread of its errors.

    seconds = factor of its kind · Σ coefficient · feature

with all coefficients at least 0. The features are those of `StepShape`, the rows whose logits choose a token, and the
rows beyond some numbers of them: a step of few rows waits for the weights to be read, one of many for the multipliers,
and the fit finds the bend between the two. The factor is the error of the sum for steps of about this shape, if enough
of them were measured; otherwise 1.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from batchwright.scheduling.slo import StepShape

BENDS = (4, 16)
"""Rows beyond which each further one may cost more."""
NUM_FEATURES = 6 + len(BENDS)
_QUANTILES = 64
"""Number of quantiles that describe the spread of errors."""
_WORST_RATIO = 4.0
"""Largest ratio of measured to predicted seconds that counts: beyond it, the machine paused."""
_OUTLIER = 5.0
"""Steps that are this many times the usual error away from the model are left out of its fit."""
_SHORTEST = 1e-6
_EACH = 12
"""Measurements kept of similar steps."""
_APART = 8
"""If there are many steps of a kind, one measurement is kept for this many of them, so that those kept span some
minutes: a machine may be faster or slower for seconds, without a lasting reason."""
_LEAST_ALIKE = 4
"""Fewest measurements of similar steps for which their spread and their factor are known."""
_DOUBT = 2
"""Number of measurements as which the factor 1 counts, beside those of a kind."""
_LEAST_SPREAD = 20
"""Fewest measurements for which a spread is given."""
_KINDS = 512
"""Kinds of steps kept."""
Kind: TypeAlias = tuple[int, ...]
"""Magnitudes of a shape: steps of one kind are similar."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A step, and the seconds that it took."""

    shape: StepShape
    seconds: float
    weight: float = 1.0
    """Number of steps that it represents: itself, and its share of similar ones that are not kept."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Cost model of steps: how many seconds one of any shape takes."""

    coefficients: tuple[float, ...]
    """Seconds for one of each of `features_of`."""
    errors: tuple[float, ...] = (1.0,)
    """Quantiles of measured over predicted seconds, evenly spaced."""
    ratios: tuple[float, ...] = (1.0,)
    """Quantiles of the seconds of the shorter half of the steps over those of similar steps, evenly spaced: the random
    part. The model's error for a kind of step is the same each time."""
    long_ratios: tuple[float, ...] = (1.0,)
    """Those of the longer half, which a pause of the machine lengthens by less."""
    long_from: float = math.inf
    """Predicted seconds from which a step counts as long."""
    steps: int = 0
    """Number of measured steps that it was fitted to."""
    factors: Mapping[Kind, float] = field(default_factory=dict)
    """Measured over summed seconds, for kinds with enough measured steps."""

    def __post_init__(self) -> None:
        if len(self.coefficients) != NUM_FEATURES or min(self.coefficients) < 0.0 or not any(self.coefficients):
            raise ValueError(
                f"coefficients={self.coefficients}: must be {NUM_FEATURES} numbers of at least 0, not all 0"
            )
        for name in ("errors", "ratios", "long_ratios"):
            quantiles = getattr(self, name)
            if not quantiles or min(quantiles) <= 0.0:
                raise ValueError(f"{name}={quantiles}: must be numbers above 0, at least one")
        if min(self.factors.values(), default=1.0) <= 0.0:
            raise ValueError(f"factors={self.factors}: must be numbers above 0")

    def seconds(self, shape: StepShape) -> float:
        """Return the seconds that such a step takes on average."""
        return max(self._sum(shape) * self.factors.get(_kind_of(shape), 1.0), _SHORTEST)

    def _sum(self, shape: StepShape) -> float:
        fixed, tokens, pairs, rows, keys, sampled, *bends = self.coefficients
        num_rows = shape.prefill_tokens + shape.decode_rows
        seconds = (
            fixed
            + tokens * shape.prefill_tokens
            + pairs * shape.prefill_pairs
            + rows * shape.decode_rows
            + keys * shape.decode_keys
            + sampled * shape.sampled_rows
        )
        for cost, bend in zip(bends, BENDS, strict=True):
            if num_rows > bend:
                seconds += cost * (num_rows - bend)
        return seconds

    def drawn(self, shape: StepShape, quantile: float) -> float:
        """Return the seconds of one such step; `quantile`, 0 to 1, selects from the observed spread."""
        seconds = self.seconds(shape)
        ratios = self.ratios if seconds < self.long_from else self.long_ratios
        return seconds * ratios[min(len(ratios) - 1, int(quantile * len(ratios)))]

    def total(self, record: StepRecord) -> float:
        """Return the seconds of all steps that `record` has counted."""
        seconds = self._product(record.features)
        for kind, features in record.features_by_kind():
            seconds += (self.factors.get(kind, 1.0) - 1.0) * self._product(features)
        return seconds

    def _product(self, features: Sequence[float]) -> float:
        return sum(each * sum_ for each, sum_ in zip(self.coefficients, features, strict=True))

    def within(self, share: float) -> float:
        """Return the relative error within which this share of the steps were predicted."""
        errors = sorted(abs(ratio - 1.0) for ratio in self.errors)
        return errors[min(len(errors) - 1, int(share * len(errors)))]


def features_of(shape: StepShape) -> tuple[float, ...]:
    """Return the features by which the coefficients of `StepCosts` are multiplied."""
    num_rows = shape.prefill_tokens + shape.decode_rows
    return (*shape.features, shape.sampled_rows, *(max(0.0, num_rows - bend) for bend in BENDS))


def fitted(measurements: Sequence[Measurement]) -> StepCosts:
    """Return the cost model that fits `measurements` best.

    The relative error counts, so that a quick step counts as much as a slow one. Outliers are left out. Raises
    ValueError without measurements, or for seconds that are not above 0.
    """
    if not measurements or min(each.seconds for each in measurements) <= 0.0:
        raise ValueError(f"{len(measurements)} measurements: must be one or more, of seconds above 0")
    features = np.array([features_of(each.shape) for each in measurements])
    seconds = np.array([each.seconds for each in measurements])
    scaled = features / seconds[:, None]
    chosen = np.ones(len(seconds), dtype=bool)
    coefficients = _least_squares(scaled)
    for _ in range(3):
        errors = np.abs(np.log(np.maximum(features @ coefficients, _SHORTEST) / seconds))
        chosen = errors <= max(0.05, _OUTLIER * float(np.median(errors)))
        coefficients = _least_squares(scaled[chosen])
    summed = np.maximum(features @ coefficients, _SHORTEST)
    kinds, places, counts = np.unique(
        np.array([_kind_of(each.shape) for each in measurements]), axis=0, return_inverse=True, return_counts=True
    )
    places = places.reshape(-1)
    factors = _factors(seconds / summed, places, counts)
    predicted = summed * factors[places]
    weights = np.array([each.weight for each in measurements])
    # The model of least relative error is below the mean if errors are large, but the sum of all steps must be right,
    # since a job takes the time of all of them.
    level = float((weights * seconds)[chosen].sum() / (weights * predicted)[chosen].sum())
    coefficients, predicted = coefficients * level, predicted * level
    errors = np.clip(seconds / predicted, 1.0 / _WORST_RATIO, _WORST_RATIO)
    spread, is_known = errors / _medians(errors, places, len(counts))[places], counts[places] >= _LEAST_ALIKE
    if is_known.sum() < _LEAST_SPREAD:
        spread, is_known = errors, np.ones(len(errors), dtype=bool)
    long_from = _quantiles(predicted[is_known], weights[is_known], 1)[0]
    is_long = is_known & (predicted >= long_from)
    is_short = is_known & (predicted < long_from)
    if not is_short.any():
        is_short = is_long
    return StepCosts(
        tuple(float(each) for each in coefficients),
        _quantiles(errors, weights),
        _around_one(spread[is_short], weights[is_short]),
        _around_one(spread[is_long], weights[is_long]),
        long_from,
        len(measurements),
        {
            tuple(map(int, kind)): float(factor)
            for kind, factor, count in zip(kinds, factors, counts, strict=True)
            if count >= _LEAST_ALIKE
        },
    )


def _factors(ratios: NDArray[np.float64], places: NDArray[np.intp], counts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the factor by which the model errs for each kind of step; 1 for kinds of too few steps.

    `places` has the kind of each step. The fewer measurements there are, the nearer to 1 a factor is.
    """
    medians = np.clip(_medians(ratios, places, len(counts)), 1.0 / _WORST_RATIO, _WORST_RATIO)
    factors = (counts * medians + _DOUBT) / (counts + _DOUBT)
    return np.where(counts >= _LEAST_ALIKE, factors, 1.0)


def _medians(values: NDArray[np.float64], places: NDArray[np.intp], kinds: int) -> NDArray[np.float64]:
    """Return the median value of each kind, the lower one of two: outliers are pauses."""
    return np.array([np.quantile(values[places == place], 0.5, method="lower") for place in range(kinds)])


def _around_one(ratios: NDArray[np.float64], weights: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the quantiles of `ratios` over their mean: pauses are part of both the mean step and the spread."""
    return _quantiles(ratios / np.average(ratios, weights=weights), weights)


def _quantiles(
    values: NDArray[np.float64], weights: NDArray[np.float64], number: int = _QUANTILES
) -> tuple[float, ...]:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    places = np.searchsorted(reached, (np.arange(number) + 0.5) / number * reached[-1])
    return tuple(float(each) for each in values[order][places])


def _least_squares(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients, all at least 0, for which `scaled` @ coefficients is closest to 1 everywhere.

    All ways of leaving some out are tried: with so few coefficients this is exact, and takes milliseconds.
    """
    size = scaled.shape[1]
    scale = np.sqrt((scaled**2).sum(axis=0))
    used = [index for index in range(size) if scale[index] > 0.0]
    unit = scaled[:, used] / scale[used]
    products, targets = unit.T @ unit, unit.sum(axis=0)
    best, best_gain = np.zeros(len(used)), -1.0
    for number in range(1, len(used) + 1):
        for subset in combinations(range(len(used)), number):
            each = list(subset)
            matrix = products[np.ix_(each, each)]
            try:
                values = np.linalg.solve(matrix + 1e-9 * np.eye(number), targets[each])
            except np.linalg.LinAlgError:
                continue
            gain = float(2.0 * values @ targets[each] - values @ matrix @ values)
            # More coefficients without a gain are rejected.
            if values.min() >= 0.0 and gain > best_gain + 1e-9 * len(scaled):
                best, best_gain = np.zeros(len(used)), gain
                best[each] = values
    found = np.zeros(size)
    found[used] = best / scale[used]
    return found


class _Kind:
    """Similar steps."""

    __slots__ = ("features", "kept", "steps", "unkept")

    def __init__(self) -> None:
        self.kept: deque[Measurement] = deque(maxlen=_EACH)
        """Some of the latest."""
        self.steps = 0.0
        """Number of all of them."""
        self.unkept = 0
        """Number of them since the last one that was kept."""
        self.features = [0.0] * NUM_FEATURES
        """Sums of `features_of` of the steps that the record counts."""


class StepRecord:
    """Measured steps, a few of each kind: the recent times of steps of all shapes, in bounded memory."""

    def __init__(self, measurements: Iterable[Measurement] = ()) -> None:
        self.added = 0
        """Number of steps since it was created, without those from which it was created; the next two likewise."""
        self.seconds = 0.0
        """Seconds of all of them."""
        self.features = [0.0] * NUM_FEATURES
        """Sums of `features_of` of all of them."""
        self._kinds: OrderedDict[Kind, _Kind] = OrderedDict()
        for each in measurements:
            self._add(each)

    def add(self, shape: StepShape, seconds: float) -> None:
        """Record that a step took `seconds`."""
        self.added += 1
        self.seconds += seconds
        kind = self._kind(shape)
        for index, feature in enumerate(features_of(shape)):
            self.features[index] += feature
            kind.features[index] += feature
        kind.steps += 1.0
        kind.unkept += 1
        if len(kind.kept) < _EACH or kind.unkept >= _APART:
            kind.unkept = 0
            kind.kept.append(Measurement(shape, seconds))

    def include(self, other: StepRecord) -> None:
        """Add the measurements of `other`, as newer ones."""
        for each in other.measurements:
            self._add(each)

    def features_by_kind(self) -> list[tuple[Kind, list[float]]]:
        """Return the part of `features` of each kind that is still kept."""
        return [(key, kind.features) for key, kind in self._kinds.items()]

    def clear(self) -> None:
        """Forget all."""
        self.added, self.seconds, self.features = 0, 0.0, [0.0] * NUM_FEATURES
        self._kinds.clear()

    @property
    def measurements(self) -> list[Measurement]:
        """Return all kept measurements, the most recently seen kinds last."""
        return [
            replace(each, weight=kind.steps / len(kind.kept)) for kind in self._kinds.values() for each in kind.kept
        ]

    def _add(self, each: Measurement) -> None:
        kind = self._kind(each.shape)
        kind.kept.append(each)
        kind.steps += each.weight

    def _kind(self, shape: StepShape) -> _Kind:
        """Return the steps similar to this shape, and mark them as the most recently seen."""
        key = _kind_of(shape)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = _Kind()
            if len(self._kinds) > _KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(key)
        return found


def _kind_of(shape: StepShape) -> Kind:
    """Return the kind of a shape."""
    depth = shape.prefill_pairs // shape.prefill_tokens if shape.prefill_tokens else 0
    keys = shape.decode_keys // shape.decode_rows if shape.decode_rows else 0
    return (
        shape.prefill_tokens.bit_length(),
        (depth // 128).bit_length(),
        shape.decode_rows.bit_length(),
        (keys // 128).bit_length(),
        shape.sampled_rows.bit_length(),
    )
