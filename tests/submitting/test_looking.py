"""When batches are looked at."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from batchwright.submitting.looking import LookPauses, seconds_left


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1e6), st.floats(0, 1e6))
def test_pauses_are_within_their_bounds(ages: list[float], left: float, still: float) -> None:
    pauses = LookPauses()
    assert 5.0 <= pauses.pause(ages, [left] * len(ages), still) <= 120.0


def test_a_day_takes_few_looks() -> None:
    pauses, age, looks = LookPauses(), 0.0, 0
    while age < 86_400:
        age += pauses.pause([age], [math.inf], age)
        looks += 1
    assert looks < 1000


def test_the_youngest_batch_counts_and_the_end_is_met() -> None:
    pauses = LookPauses()
    assert pauses.pause([], [], 0.0) == math.inf
    assert pauses.pause([10_000.0, 1.0], [math.inf] * 2, 0.0) == 5.0
    assert pauses.pause([10_000.0], [20.0], 0.0) == 20.0
    assert pauses.pause([10_000.0], [math.inf], 0.0) == 60.0


def test_what_is_left_goes_by_progress() -> None:
    assert seconds_left(100.0, 0, 10) == math.inf
    assert seconds_left(100.0, 4, 10) == 150.0
    assert seconds_left(100.0, 10, 10) == 0.0
