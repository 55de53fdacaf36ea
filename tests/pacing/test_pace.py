"""`Pace`: what it says of the time until the next amount comes true."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from batchwright.pacing.pace import Pace


@given(st.floats(1e-4, 1e4), st.lists(st.floats(0.0, 5e4), min_size=1, max_size=10))
@example(100 / 86_400, [1158.0])
def test_the_next_amount_may_go_after_the_wait(rate: float, amounts: list[float]) -> None:
    pace, now = Pace(), 0.0
    for amount in amounts:
        now += pace.wait(rate, now)
        assert pace.wait(rate, now) <= 1e-9 * max(now, 1.0)
        pace.take(amount, rate, now)


def test_it_is_full_at_first_and_holds_almost_nothing() -> None:
    pace = Pace()
    assert pace.wait(10.0, 5.0) == 0.0
    pace.take(1.0, 10.0, 5.0)
    assert pace.wait(10.0, 5.0) == 0.05
    assert pace.wait(0.0, 5.0) == float("inf")
