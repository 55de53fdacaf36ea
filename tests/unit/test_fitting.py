"""The fit that is added up from several measurements at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.fitting import FadedFit

_FEATURES = st.tuples(st.just(1.0), st.integers(0, 4000).map(float), st.integers(1, 64).map(float))


@settings(max_examples=100)
@given(measured=st.lists(st.tuples(_FEATURES, st.floats(1e-3, 1.0)), min_size=1, max_size=40))
def test_sums_of_several_measurements_are_those_of_one_after_the_other(
    measured: list[tuple[tuple[float, float, float], float]],
) -> None:
    fit, keep = FadedFit(3, memory=20), 1.0 - 1.0 / 20
    weight, sums, products = 0.0, [0.0] * 3, [0.0] * 6
    for features, seconds in measured:
        fit._unsummed.append((features, seconds))
        scaled = [each / seconds for each in features]
        weight = weight * keep + 1.0
        sums = [total * keep + each for total, each in zip(sums, scaled, strict=True)]
        pairs = zip(products, fit._pairs, strict=True)
        products = [total * keep + scaled[i] * scaled[j] for total, (i, j) in pairs]
    fit._add_up()
    assert fit._weight == pytest.approx(weight)
    assert fit._sums == pytest.approx(sums)
    assert fit._products == pytest.approx(products)
