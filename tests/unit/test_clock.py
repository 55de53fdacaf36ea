"""Clocks."""

from __future__ import annotations

import pytest

from batchwright.clock import Clock, ManualClock, MonotonicClock


def test_the_real_clock_never_goes_back() -> None:
    clock: Clock = MonotonicClock()
    first = clock.now()
    assert clock.now() >= first


def test_a_manual_clock_moves_only_when_told_to() -> None:
    clock: Clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0


def test_a_manual_clock_moves_by_what_it_is_told() -> None:
    clock = ManualClock()
    clock.advance(1.5)
    clock.advance(0.0)
    assert clock.now() == 1.5


def test_a_manual_clock_cannot_go_back() -> None:
    clock = ManualClock(1.0)
    with pytest.raises(ValueError, match="seconds=-1"):
        clock.advance(-1.0)
    assert clock.now() == 1.0
