"""Curves of a run: rates, shares and levels over time from the counts of its report. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

Series: TypeAlias = Mapping[str, Sequence[float | None]]
Curve: TypeAlias = list[tuple[float, float]]
"""Times in seconds, and values."""

_PIECES = 64
"""Intervals that a curve is made of, so that single steps do not make it jagged."""


def rate(series: Series, column: str) -> Curve:
    """Return the increase of a count per second."""
    return _by_interval(series, (column,), lambda seconds, increase: increase / seconds)


def quotient(series: Series, above: str, below: str) -> Curve:
    """Return the increase of one count per increase of another, where that increased."""
    return _by_interval(series, (above, below), lambda _, up, down: up / down if down > 0 else None)


def share_so_far(series: Series, above: str, below: str) -> Curve:
    """Return the ratio of two counts over time, from when the second is not 0."""
    points = [*_points(series, (above, below))]
    return [
        (at, part / whole) for at, (part, whole) in _thinned(points, _width(series.get("seconds", ()))) if whole > 0
    ]


def level(series: Series, column: str, scale: float = 1.0) -> Curve:
    """Return the value of a column over time, the largest of each interval."""
    pieces: dict[int, tuple[float, float]] = {}
    seconds = series.get("seconds", ())
    width = _width(seconds)
    for at, value in zip(seconds, series.get(column, ()), strict=False):
        if at is not None and value is not None:
            piece = int(at / width)
            if piece not in pieces or value * scale >= pieces[piece][1]:
                pieces[piece] = at, value * scale
    return [*pieces.values()]


def count(series: Series, column: str) -> Curve:
    """Return a count over time."""
    points = [*_points(series, (column,))]
    return [(at, values[0]) for at, values in _thinned(points, _width(series.get("seconds", ())))]


def foreseen_end(series: Series) -> Curve:
    """Return the forecast of the whole time over time."""
    points = [*_points(series, ("seconds_left",))]
    return [(at, at + values[0]) for at, values in _thinned(points, _width(series.get("seconds", ())))]


def _width(seconds: Sequence[float | None]) -> float:
    return max(1e-3, (seconds[-1] or 0.0) / _PIECES) if seconds else 1e-3


def _points(series: Series, columns: Sequence[str]) -> Iterator[tuple[float, tuple[float, ...]]]:
    """The times at which all columns are known, with their values."""
    chosen = [series.get("seconds", ()), *(series.get(column, ()) for column in columns)]
    for at, *values in zip(*chosen, strict=False):
        known = [value for value in values if value is not None]
        if at is not None and len(known) == len(values):
            yield at, tuple(known)


def _thinned(
    points: Sequence[tuple[float, tuple[float, ...]]], width: float
) -> Iterator[tuple[float, tuple[float, ...]]]:
    """The first and the last point, and between them some that are so far apart."""
    last = None
    for index, point in enumerate(points):
        if last is None or point[0] - last >= width or index == len(points) - 1:
            last = point[0]
            yield point


def _by_interval(series: Series, columns: Sequence[str], value: Callable[..., float | None]) -> Curve:
    """The values of a function of the seconds and of the increases of columns within intervals."""
    points = [*_thinned([*_points(series, columns)], _width(series.get("seconds", ())))]
    if len(points) > 2 and points[-1][0] - points[-2][0] < _width(series.get("seconds", ())):
        del points[-2]  # the last interval is no shorter than the others: what it divides by would be next to nothing
    curve = []
    for (before, old), (after, new) in pairwise(points):
        found = value(after - before, *(b - a for a, b in zip(old, new, strict=True))) if after > before else None
        if found is not None:
            curve.append(((before + after) / 2, found))
    if curve:
        # The ends of the curve are those of its first and its last interval.
        curve = [(points[0][0], curve[0][1]), *curve[1:-1], (points[-1][0], curve[-1][1])]
    return curve
