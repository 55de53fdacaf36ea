"""Intervals of forecasts: they hold the end as often as they say, in jobs with other kinds of errors."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.planning.intervals import ForecastIntervals


def held(rate: Callable[[random.Random, float], float], seed: int, after: int) -> list[bool]:
    """Whether the interval held the end, at several moments of a job of 1,000 pieces of which `after` are done."""
    drawn = random.Random(seed)
    pieces = [1.0 / rate(drawn, number / 1000) for number in range(1000)]
    ends = sum(pieces)
    intervals, at, found = ForecastIntervals(), 0.0, list[bool]()
    for number, seconds in enumerate(pieces, start=1):
        at += seconds
        left = 1000 - number
        low, high = intervals.observe(at, number, left, left * at / number)
        if after < number < 950 and number % 50 == 0:
            found.append(low <= ends - at <= high)
    return found


@pytest.mark.parametrize(
    ("rate", "after"),
    [
        (lambda drawn, share: drawn.expovariate(1.0) + 0.1, 300),
        (lambda drawn, share: drawn.choice((0.2, 1.0, 5.0)), 300),
        (lambda drawn, share: 1.0 if share < 0.4 else 0.8, 600),
        (lambda drawn, share: 1.0 if share < 0.4 else 1.5, 600),
    ],
    ids=["noise", "bursts", "slower at once", "faster at once"],
)
def test_intervals_hold_the_end_in_nine_cases_of_ten(rate: Callable[[random.Random, float], float], after: int) -> None:
    found = [each for seed in range(20) for each in held(rate, seed, after)]
    assert sum(found) >= 0.87 * len(found)


def test_intervals_of_good_forecasts_are_narrow() -> None:
    intervals = ForecastIntervals()
    for number in range(1, 900):
        low, high = intervals.observe(float(number), number, 1000 - number, 1000.0 - number)
    assert 95 < low <= 101 <= high < 107


def test_forecasts_of_next_to_nothing_are_no_measure() -> None:
    intervals = ForecastIntervals()
    for number, seconds in enumerate([5e-324, 1e-300, 5e-324, 1e300, 1.0], start=1):
        low, high = intervals.observe(float(number), float(number), 0.5, seconds)
        assert 0.0 <= low <= seconds <= high


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 100), st.floats(0, 1e6)), max_size=60))
def test_whatever_is_forecast_is_in_its_interval(steps: list[tuple[float, float, float, float]]) -> None:
    intervals, at, done = ForecastIntervals(), 0.0, 0.0
    for elapsed, work, left, seconds in steps:
        at, done = at + elapsed, done + work
        low, high = intervals.observe(at, done, left, seconds)
        assert low <= seconds <= high
