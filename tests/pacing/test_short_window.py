"""Requests in step with windows of which answers state the end."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.pacing.short_window import ShortWindow

EIGHTHS = st.integers(0, 40).map(lambda each: each / 8)


def sent(window: ShortWindow, limit: int, start: float, end: float) -> list[float]:
    """Times at which requests go that wait for nothing else."""
    now, times = start, list[float]()
    while now < end:
        if (wait := window.wait(limit, now)) > 1e-9:
            now += wait
            continue
        window.begin(now)
        times.append(now)
    return times


@given(
    limit=st.integers(1, 200),
    length=st.sampled_from([1.0, 2.0, 5.0]),
    start=EIGHTHS,
    first=EIGHTHS,
)
def test_each_window_is_used_up_and_none_has_more(limit: int, length: float, start: float, first: float) -> None:
    window = ShortWindow(length)
    for number in range(10):
        window.tell(start + number * length)
    assert window.is_known
    times = sent(window, limit, first, first + 10.0 * length)
    counts = Counter((each - start) // length for each in times)
    assert max(counts.values()) == limit
    assert [count for _, count in sorted(counts.items())][1:-1] == [limit] * (len(counts) - 2)
    places = [(each - start) / length % 1.0 for each in times[counts[min(counts)] :]]
    assert all(0.1 - 1e-6 <= place <= 0.9 + 1e-6 for place in places)


@given(seed=st.integers(0, 1000), drift=st.floats(-1e-3, 1e-3))
def test_the_beginning_is_the_mean_of_what_is_told_and_follows_a_clock_that_goes_wrong(seed: int, drift: float) -> None:
    draw, window = random.Random(seed), ShortWindow(1.0)
    for number in range(400):
        window.tell(0.3 + number * (1.0 + drift) + draw.uniform(-0.2, 0.2))
    place = (sent(window, 1, 400.0, 403.0)[1] - 0.5 - 0.3 - 400 * drift) % 1.0
    assert min(place, 1.0 - place) < 0.12


def test_nothing_is_known_of_few_answers() -> None:
    window = ShortWindow(1.0)
    for number in range(4):
        window.tell(float(number))
        assert not window.is_known


@pytest.mark.parametrize("pause", [0.0, 3.4])
def test_a_pause_is_not_made_up_for(pause: float) -> None:
    window = ShortWindow(1.0)
    for number in range(10):
        window.tell(float(number))
    times = sent(window, 10, 10.0, 12.0) + sent(window, 10, 12.0 + pause, 14.0 + pause)
    assert max(Counter(int(each) for each in times).values()) == 10
