"""Pauses between tries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchwright.backoff import Backoff


def test_each_pause_is_longer_up_to_the_longest() -> None:
    backoff = Backoff(first=0.5, longest=3.0)
    assert [backoff.pause(failures) for failures in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(failures=st.integers(1, 10**9), luck=st.floats(0.0, 1.0), factor=st.floats(1.0, 10.0))
def test_a_pause_stays_within_its_jitter_however_many_failures(failures: int, luck: float, factor: float) -> None:
    plain, jittered = Backoff(0.1, 60.0, factor), Backoff(0.1, 60.0, factor, (0.75, 1.25))
    pause = plain.pause(failures)
    assert 0.1 <= pause <= 60.0
    assert 0.75 * pause - 1e-9 <= jittered.pause(failures, luck) <= 1.25 * pause + 1e-9
