"""When a window ends, as answers tell that take different times."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.pacing.window_end import WindowEnd


@pytest.mark.parametrize("stated_at_its_end", [False, True])
@given(st.lists(st.floats(0.2, 8.0), min_size=30, max_size=60, unique=True), st.integers(0, 1))
def test_the_end_is_found_whenever_headers_are_filled_in(
    stated_at_its_end: bool, latencies: list[float], rounds: int
) -> None:
    """Resets are whole seconds where they are rounded; ends are then known to about a second."""
    told, window, sent_at = WindowEnd(), 60.0, 0.0
    alternating = [latency if number % 2 else latency / 8.0 for number, latency in enumerate(latencies)]
    for number, latency in enumerate(alternating):
        sent_at = 0.7 * number
        now = sent_at + latency
        reset = window - (now if stated_at_its_end else sent_at) % window
        told.learn(sent_at, now, float(round(reset, 1 - rounds)), window)
    spread = sum(abs(a - b) for a, b in pairwise(alternating)) / len(alternating)
    if spread > 1.0:
        assert abs((told.value + 30.0) % 60.0 - 30.0) <= (1.0 if rounds else 0.1)


def test_a_later_window_ends_later() -> None:
    told = WindowEnd()
    told.learn(10.0, 11.0, 50.0, 60.0)
    assert told.value == 60.0
    told.pass_by(2, 60.0)
    assert told.value == 180.0
