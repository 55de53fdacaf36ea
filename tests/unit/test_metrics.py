"""Percentiles in bounded memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.histograms import Histogram

_QUICK = settings(max_examples=examples(80, long=200))


def _filled(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


@_QUICK
@given(
    values=st.lists(st.one_of(st.floats(1e-9, 1e12), st.just(0.0), st.floats(-5.0, 0.0)), min_size=1, max_size=60),
    q=st.one_of(st.floats(0.0, 100.0), st.sampled_from([0, 50, 90, 99, 100])),
)
def test_percentiles_are_within_one_percent_of_the_nearest_rank(values: list[float], q: float) -> None:
    rank = max(1, math.ceil(len(values) * q / 100.0))
    exact = sorted(max(value, 0.0) for value in values)[rank - 1]
    assert _filled(values).percentile(q) == pytest.approx(exact, rel=0.01, abs=0.0)


@_QUICK
@given(values=st.lists(st.floats(0.0, 1e9), min_size=1, max_size=60))
def test_mean_and_maximum_are_exact(values: list[float]) -> None:
    histogram = _filled(values)
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(math.fsum(values) / len(values))
    assert histogram.summary()["max"] == max(values)


@_QUICK
@given(values=st.lists(st.floats(0.001, 1e9), min_size=1, max_size=60))
def test_percentiles_never_decrease_and_never_pass_the_maximum(values: list[float]) -> None:
    histogram = _filled(values)
    percentiles = [histogram.percentile(q) or 0.0 for q in range(0, 101, 5)]
    assert percentiles == sorted(percentiles)
    assert percentiles[-1] <= max(values)


def test_an_empty_histogram_has_no_figures() -> None:
    histogram = Histogram()
    assert histogram.mean is None
    assert histogram.percentile(50) is None
    assert histogram.summary() == {"mean": None, "p50": None, "p90": None, "p99": None, "max": None}


def test_zeros_and_negative_values_count_as_zero() -> None:
    histogram = _filled([0.0, -3.0, 0.0, 4.0])
    assert (histogram.percentile(75), histogram.mean, histogram.maximum) == (0.0, 1.0, 4.0)
    assert histogram.percentile(100) == pytest.approx(4.0, rel=0.01)
    assert _filled([0.0]).summary() == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}


def test_the_whole_range_of_floats_is_taken() -> None:
    histogram = _filled([5e-324, 1e308])
    assert histogram.percentile(0) == pytest.approx(5e-324, abs=1e-320)
    assert histogram.percentile(100) == pytest.approx(1e308, rel=0.01)


@_QUICK
@given(
    values=st.lists(st.floats(-5.0, 1e9), max_size=30),
    more=st.lists(st.one_of(st.floats(1e-9, 1e9), st.floats(1e307, 1e308)), max_size=30),
    times=st.integers(1, 40),
)
def test_values_may_be_counted_together(values: list[float], more: list[float], times: int) -> None:
    together, single = Histogram(), _filled([*values, *more] + [7.5] * times)
    together.add_all(values)
    together.add_all(more)
    together.add(7.5, times)
    assert (together.count, together.maximum) == (single.count, single.maximum)
    assert together.total == pytest.approx(single.total)
    for q in range(0, 101, 5):
        assert together.percentile(q) == single.percentile(q)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_and_not_counted(value: float) -> None:
    histogram = _filled([2.0])
    with pytest.raises(ValueError, match="finite"):
        histogram.add(value)
    with pytest.raises(ValueError, match="finite"):
        histogram.add_all([value, 2.0])
    assert (histogram.count, histogram.mean) == (1, 2.0)


@pytest.mark.parametrize("q", [-0.1, 100.1, math.nan])
def test_a_percentile_out_of_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        _filled([1.0]).percentile(q)


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    histogram = _filled([1.0 + number / 1000.0 for number in range(9000)])
    assert len(histogram._buckets) < 130
