"""Float32 values with few digits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.wire.responses import short_floats

FLOATS = st.floats(width=32, allow_nan=False)


@given(st.lists(FLOATS, max_size=50))
def test_they_become_the_same_float32_again(values: list[float]) -> None:
    given_ = np.array(values, np.float32)
    back = np.array(short_floats(given_), np.float64).astype(np.float32)
    assert back.tobytes() == given_.tobytes()


@given(st.floats(2.0**-40, 2.0**60, width=32) | st.floats(-(2.0**60), -(2.0**-40), width=32))
def test_there_are_as_few_digits_as_numpy_writes(value: float) -> None:
    """But for powers of two, below which float32 is twice as dense: the nearest decimal is not always the shortest."""
    [found] = short_floats(np.array([value], np.float32))
    written = float(np.format_float_scientific(np.float32(value)))
    assert len(repr(found)) <= len(repr(written)) + (np.frexp(value)[0] in (0.5, -0.5))


@pytest.mark.parametrize("value", [0.1, -0.02, 1e-5, 3.14159, 123456.7, 1.0, 1e20, -0.0, float("inf")])
def test_decimals_stay_what_they_were(value: float) -> None:
    assert repr(short_floats(np.array([value], np.float32))) == repr([value])
