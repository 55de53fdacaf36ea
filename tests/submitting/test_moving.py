"""Which batches become live requests for a deadline."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchwright.submitting.moving import BatchSoFar, Mover

HOUR = 3600.0


@st.composite
def batches(draw: st.DrawFn) -> list[BatchSoFar]:
    found = []
    for key in range(draw(st.integers(0, 5))):
        total = draw(st.integers(1, 1000))
        found.append(BatchSoFar(key, draw(st.floats(1, 1e5)), draw(st.integers(0, total)), total))
    return found


@given(batches(), st.floats(0, 1e5), st.integers(0, 1000), st.floats(0.01, 1e4))
def test_only_late_batches_are_given_up(there: list[BatchSoFar], left: float, waiting: int, rate: float) -> None:
    plan = Mover().plan(left, there, waiting, rate)
    by_key = {each.key: each for each in there}
    for key in plan.give_up:
        batch = by_key[key]
        assert not batch.done or batch.age * batch.left / batch.done >= left
    # Time that would suffice for a multiple of the work leaves everything as it is.
    calm = Mover().plan(1e9, there, waiting, rate)
    assert calm.gather
    assert all(not by_key[key].done for key in calm.give_up)


@given(st.integers(0, 999), st.floats(10, 1e4), st.integers(0, 500))
def test_what_would_be_late_is_done_in_time(done: int, rate: float, steps: int) -> None:
    """A batch that has stopped: whenever it is given up, live requests have the time that they need."""
    mover, deadline, step = Mover(), 6 * HOUR, 60.0
    now = 0.0
    while now < deadline:
        batch = BatchSoFar("b", max(now, 1e6), done, 1000)
        if mover.plan(deadline - now, [batch], 0, rate).give_up:
            break
        now += step
    assert now + mover.cancelling + (1000 - done) / rate <= deadline + step


def test_batches_that_will_end_in_time_are_left_alone() -> None:
    mover = Mover()
    quick, slow = BatchSoFar("quick", HOUR, 500, 1000), BatchSoFar("slow", HOUR, 10, 1000)
    assert mover.plan(5 * HOUR, [quick, slow], 0, 10.0).give_up == ()
    assert mover.plan(0.15 * HOUR, [slow], 0, 10.0).give_up == ("slow",)
    assert mover.plan(0.19 * HOUR, [slow, BatchSoFar("fast", HOUR, 990, 1000)], 0, 10.0).give_up == ("slow",)


def test_what_a_cancelled_batch_loses_is_counted_in() -> None:
    mover = Mover()
    assert mover.plan(0.35 * HOUR, [BatchSoFar("b", 9 * HOUR, 900, 1000)], 0, 2.0).give_up == ()
    assert mover.plan(0.34 * HOUR, [BatchSoFar("b", 9 * HOUR, 900, 1000, keeps=False)], 0, 2.0).give_up == ("b",)


def test_lines_are_gathered_as_long_as_a_batch_may_still_end() -> None:
    mover = Mover()
    assert mover.plan(6 * HOUR, [], 1000, 10.0).gather
    assert not mover.plan(0.3 * HOUR, [], 1000, 10.0).gather
    assert not mover.plan(6 * HOUR, [], 1000, 0.01).gather
