"""A pace that rises no faster than an endpoint allows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.pacing.rise_limit import RiseLimit


def sent_until(limit: RiseLimit, now: float, seconds: float) -> tuple[int, float]:
    """Send whatever may go for so long; return the number of requests and the time then."""
    count, end = 0, now + seconds
    while now < end:
        wait = limit.wait(now)
        if wait > 0.0:
            now += max(wait, 1e-6)
            continue
        limit.begin(now)
        count += 1
    return count, now


def test_nothing_is_paced_before_the_first_refusal() -> None:
    limit = RiseLimit()
    for _ in range(1000):
        assert limit.wait(0.0) == 0.0
        limit.begin(0.0)


def test_the_pace_rises_from_what_was_accepted_by_no_more_than_half_in_five_seconds() -> None:
    limit = RiseLimit()
    for _ in range(10):
        limit.begin(0.0)
    limit.refused(0.1, 4.9)
    assert limit.wait(0.1) == pytest.approx(4.9)
    now, before = 5.0, 10
    for _ in range(6):
        count, now = sent_until(limit, now, 5.0)
        assert before < count <= 1.5 * before + 2
        before = count


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans(), st.one_of(st.none(), st.floats(0.0, 600.0)))))
def test_a_request_goes_at_some_time_whatever_was_refused(
    history: list[tuple[float, bool, float | None]],
) -> None:
    limit, now = RiseLimit(), 0.0
    for seconds, is_refused, retry_after in history:
        now += seconds
        limit.begin(now)
        if is_refused:
            limit.withdrawn(now)
            limit.refused(now, retry_after)
        else:
            limit.accepted()
        now += max(0.0, limit.wait(now))
        assert math.isfinite(now)
        assert limit.wait(now) <= 1e-3
