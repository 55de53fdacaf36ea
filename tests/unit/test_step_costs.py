"""The cost model of steps: found in measurements, robust against pauses, and kept in bounded memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.scheduling.slo import StepShape
from batchwright.scheduling.step_costs import (
    BENDS,
    NUM_FEATURES,
    Measurement,
    StepCosts,
    StepRecord,
    features_of,
    fitted,
)

COSTS = StepCosts((10e-3, 0.3e-3, 4e-7, 0.2e-3, 2e-6, 0.1e-3, 0.4e-3, 0.2e-3))
shapes = st.builds(
    lambda prompt, depth, rows, context, sampled: StepShape(
        prompt, prompt * depth, rows, rows * context, rows + min(sampled, prompt)
    ),
    st.integers(0, 512),
    st.integers(1, 2000),
    st.integers(0, 256),
    st.integers(1, 2000),
    st.integers(0, 4),
)


def measured(count: int, noise: float, seed: int) -> list[Measurement]:
    draw, found = random.Random(seed), []
    for number in range(count):
        prompt = draw.choice((0, 0, 3, 40, 500)) if number else 500
        rows = draw.choice((0, 1, 2, 6, 12, 40, 200)) if prompt else draw.choice((1, 2, 6, 12, 40, 200))
        shape = StepShape(
            prompt, prompt * draw.randint(1, 1500), rows, rows * draw.randint(1, 1500), rows + bool(prompt)
        )
        found.append(Measurement(shape, COSTS.seconds(shape) * draw.uniform(1 - noise, 1 + noise)))
    return found


@given(shapes)
def test_seconds_are_coefficients_times_features(shape: StepShape) -> None:
    product = sum(cost * feature for cost, feature in zip(COSTS.coefficients, features_of(shape), strict=True))
    assert COSTS.seconds(shape) == pytest.approx(product)
    assert set(COSTS.ratios) == {1.0}
    assert COSTS.drawn(shape, 0.999) == COSTS.seconds(shape)


@settings(max_examples=examples(15, long=100))
@given(st.integers(0, 100))
def test_the_cost_model_is_found_in_what_follows_it(seed: int) -> None:
    costs = fitted(measured(200, 0.0, seed))
    for each in measured(50, 0.0, seed + 1000):
        assert costs.seconds(each.shape) == pytest.approx(each.seconds, rel=0.01)
    assert costs.within(1.0) < 0.01


@settings(max_examples=examples(15, long=100))
@given(st.integers(0, 100))
def test_pauses_of_the_machine_do_not_bend_it(seed: int) -> None:
    draw = random.Random(seed)
    paused = [
        Measurement(each.shape, each.seconds * (draw.uniform(3, 20) if draw.random() < 0.05 else 1.0))
        for each in measured(300, 0.03, seed)
    ]
    costs = fitted(paused)
    errors = [costs.seconds(each.shape) / each.seconds - 1.0 for each in measured(100, 0.0, seed + 1000)]
    assert sorted(map(abs, errors))[90] < 0.06
    assert costs.ratios == tuple(sorted(costs.ratios))
    assert max(costs.ratios[-1], costs.long_ratios[-1]) > 2.0, "they are a part of the spread, though"


def test_what_the_cost_model_errs_by_each_time_is_no_chance() -> None:
    draw = random.Random(0)
    kinds = [StepShape(0, 0, rows, 300 * rows, rows) for rows in (1, 2, 5, 9, 17, 33, 65, 129)]
    errs = [draw.choice((0.8, 1.25)) for _ in kinds]
    costs = fitted(
        [
            Measurement(shape, COSTS.seconds(shape) * err * draw.uniform(0.99, 1.01))
            for shape, err in zip(kinds, errs, strict=True)
            for _ in range(10)
        ]
    )
    assert costs.within(0.9) < 0.06
    for shape, err in zip(kinds, errs, strict=True):
        assert costs.seconds(shape) == pytest.approx(COSTS.seconds(shape) * err, rel=0.06)
    for ratios in (costs.ratios, costs.long_ratios):
        assert 0.98 < min(ratios) <= max(ratios) < 1.02


def test_what_was_hardly_measured_follows_the_cost_model() -> None:
    steps = [StepShape(0, 0, rows, 300 * rows, rows) for rows in (1, 2, 5, 9, 17, 33, 65, 129)] * 5
    rare = StepShape(300, 300 * 150, 4, 1200, 5)
    costs = fitted([Measurement(each, COSTS.seconds(each)) for each in (*steps, rare)] * 3)
    assert costs.seconds(rare) == pytest.approx(COSTS.seconds(rare), rel=0.02)
    without = replace(costs, factors={})
    assert without.seconds(rare) == costs.seconds(rare)
    assert costs.factors


@settings(max_examples=examples(15, long=100))
@given(st.integers(0, 100))
def test_the_total_of_a_record_is_that_of_its_steps(seed: int) -> None:
    record, steps = StepRecord(), measured(300, 0.2, seed)
    for each in steps:
        record.add(each.shape, each.seconds)
    costs = fitted(record.measurements)
    assert costs.total(record) == pytest.approx(sum(costs.seconds(each.shape) for each in steps))
    assert costs.total(record) == pytest.approx(sum(each.seconds for each in steps), rel=0.1)


def test_first_steps_of_rare_kinds_are_as_rare_in_the_spread() -> None:
    record, draw = StepRecord(), random.Random(0)
    for rows in (1, 3, 9, 20, 40, 100):
        for number in range(2 if rows > 20 else 5):
            shape = StepShape(0, 0, rows, 300 * rows, rows)
            record.add(shape, COSTS.seconds(shape) * (1.0 if number else 3.0))
    for _ in range(3000):
        shape = StepShape(0, 0, draw.choice((1, 3, 9)), 900, 1)
        record.add(shape, COSTS.seconds(shape))
    assert sum(each.weight for each in record.measurements) == pytest.approx(record.added)
    costs = fitted(record.measurements)
    assert max(costs.ratios) < 1.1
    again = StepRecord(record.measurements)
    assert sum(each.weight for each in again.measurements) == pytest.approx(record.added)


@settings(max_examples=examples(40, long=100))
@given(st.lists(st.tuples(shapes, st.floats(1e-5, 10.0)), min_size=1, max_size=60))
def test_any_measurements_make_a_cost_model_without_negative_costs(given_: list[tuple[StepShape, float]]) -> None:
    costs = fitted([Measurement(*each) for each in given_])
    assert len(costs.coefficients) == NUM_FEATURES == 6 + len(BENDS)
    assert min(costs.coefficients) >= 0.0
    assert all(costs.seconds(shape) > 0.0 for shape, _ in given_)


def test_what_is_no_cost_model_is_refused() -> None:
    with pytest.raises(ValueError, match="measurements"):
        fitted([])
    with pytest.raises(ValueError, match="above 0"):
        fitted([Measurement(StepShape(1, 1), 0.0)])
    with pytest.raises(ValueError, match="coefficients"):
        StepCosts((1.0,))
    with pytest.raises(ValueError, match="errors"):
        StepCosts(COSTS.coefficients, (0.0,))
    with pytest.raises(ValueError, match="ratios"):
        StepCosts(COSTS.coefficients, ratios=())
    with pytest.raises(ValueError, match="factors"):
        StepCosts(COSTS.coefficients, factors={(0, 0, 1, 0, 1): 0.0})


_LAST = StepShape(0, 0, 1, 5, 1)


@given(st.lists(shapes, max_size=300))
def test_a_record_is_bounded_and_keeps_late_ones_of_each_kind(added: list[StepShape]) -> None:
    record = StepRecord()
    for number, shape in enumerate([*added, _LAST] * 2, 1):
        record.add(shape, float(number))
    kept = record.measurements
    assert record.added == 2 * (len(added) + 1)
    assert len(kept) <= 12 * 512
    numbers = [number for number, shape in enumerate([*added, _LAST] * 2, 1) if shape == _LAST]
    assert kept[-1].seconds >= numbers[-min(8, len(numbers))]
    again = StepRecord(kept)
    again.include(StepRecord())
    assert again.measurements == kept
    assert again.added == 0
    record.clear()
    assert not record.measurements


def test_what_is_kept_of_many_steps_is_of_a_longer_time() -> None:
    record, shape = StepRecord(), StepShape(0, 0, 4, 400, 4)
    for number in range(1, 13):
        record.add(shape, float(number))
    assert [each.seconds for each in record.measurements] == [float(number) for number in range(1, 13)]
    for number in range(13, 13 + 12 * 8):
        record.add(shape, float(number))
    kept = record.measurements
    assert [each.seconds for each in kept] == [float(number) for number in range(20, 109, 8)]
    assert sum(each.weight for each in kept) == record.added
    # Few steps of another run are none too few.
    later = StepRecord()
    later.add(shape, 1000.0)
    record.include(later)
    assert [each.seconds for each in record.measurements][-2:] == [108.0, 1000.0]
