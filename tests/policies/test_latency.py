"""The latency model finds what is true, ignores what is not, and follows change."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.policies import LatencyModel

_QUICK = settings(max_examples=60)


def _batches(rng: random.Random, number: int) -> list[tuple[int, int]]:
    """(cells, count) of unlike batches."""
    counts = [rng.randint(1, 32) for _ in range(number)]
    return [(count * rng.randint(8, 512), count) for count in counts]


def test_nothing_is_known_before_the_first_batch() -> None:
    assert LatencyModel().predict(100, 4) is None


@_QUICK
@given(
    base=st.floats(0.001, 0.1),
    by_cell=st.floats(1e-6, 1e-4),
    by_item=st.floats(0.0, 0.01),
    seed=st.integers(0, 1000),
)
def test_an_exact_model_is_found(base: float, by_cell: float, by_item: float, seed: int) -> None:
    rng = random.Random(seed)
    model = LatencyModel()
    for cells, count in _batches(rng, 40):
        model.observe(cells, count, base + by_cell * cells + by_item * count)
    for cells, count in _batches(rng, 10):
        assert model.predict(cells, count) == pytest.approx(base + by_cell * cells + by_item * count, rel=0.05)


def test_a_noisy_model_is_found_within_the_noise() -> None:
    rng = random.Random(7)
    model = LatencyModel()
    for cells, count in _batches(rng, 200):
        model.observe(cells, count, (0.02 + 2e-5 * cells) * rng.uniform(0.9, 1.1))
    for cells, count in _batches(rng, 20):
        assert model.predict(cells, count) == pytest.approx(0.02 + 2e-5 * cells, rel=0.1)


def test_batches_all_alike_give_their_own_time_and_one_larger_batch_the_rest() -> None:
    model = LatencyModel()
    for _ in range(50):
        model.observe(1000, 10, 0.5)
    assert model.predict(1000, 10) == pytest.approx(0.5)
    # Nothing speaks against a larger batch, so that one is tried.
    assert model.predict(2000, 20) == pytest.approx(0.5)
    model.observe(2000, 20, 0.9)
    assert model.predict(3000, 30) == pytest.approx(1.3)


@_QUICK
@given(
    batches=st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(1, 64), st.floats(0.0, 10.0)), min_size=1, max_size=40
    )
)
def test_a_larger_batch_is_never_predicted_faster(batches: list[tuple[int, int, float]]) -> None:
    model = LatencyModel()
    for batch in batches:
        model.observe(*batch)
    assert min(model.coefficients) >= 0.0
    smaller, larger = model.predict(100, 5), model.predict(200, 6)
    assert smaller is not None
    assert larger is not None
    assert smaller <= larger


def test_single_outliers_change_nothing() -> None:
    rng = random.Random(3)
    clean, disturbed = LatencyModel(), LatencyModel()
    for step, (cells, count) in enumerate(_batches(rng, 100)):
        seconds = (0.02 + 2e-5 * cells) * rng.uniform(0.98, 1.02)
        clean.observe(cells, count, seconds)
        disturbed.observe(cells, count, seconds)
        if step >= 20 and step % 10 == 0:
            disturbed.observe(cells, count, 100 * seconds)
    assert disturbed.coefficients == clean.coefficients


def test_a_model_that_becomes_slower_is_learned_anew_within_ten_batches() -> None:
    rng = random.Random(5)
    model = LatencyModel()
    for cells, count in _batches(rng, 200):
        model.observe(cells, count, 0.02 + 2e-5 * cells)
    for cells, count in _batches(rng, 10):
        model.observe(cells, count, 3 * (0.02 + 2e-5 * cells))
    assert model.predict(2000, 16) == pytest.approx(3 * (0.02 + 2e-5 * 2000), rel=0.05)
