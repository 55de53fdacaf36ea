"""Requests in step with windows of which answers state the end."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from batchwright.pacing.limits import Use
from batchwright.pacing.short_window import ShortWindow
from batchwright.pacing.stated_budget import StatedBudget
from batchwright.wire.rate_limits import StatedLimit

EIGHTHS = st.integers(0, 40).map(lambda each: each / 8)


def known(start: float, length: float = 1.0) -> ShortWindow:
    """A window of which ten answers have told that one begins at `start`."""
    window = ShortWindow(length)
    for number in range(10):
        window.learn(start + number * length)
    assert window.is_known
    return window


def sent(window: ShortWindow, limit: int, start: float, end: float) -> list[float]:
    """Times at which requests go that wait for nothing else."""
    now, times = start, list[float]()
    while now < end:
        if (wait := window.wait(limit, now)) > 1e-9:
            now += wait
            continue
        window.begin(limit, now)
        times.append(now)
    return times


@given(limit=st.integers(1, 200), length=st.sampled_from([1.0, 2.0, 5.0]), start=EIGHTHS, first=EIGHTHS)
def test_each_window_is_used_up_within_its_margins(limit: int, length: float, start: float, first: float) -> None:
    times = sent(known(start, length), limit, first, first + 10.0 * length)
    counts = Counter((each - start) // length for each in times)
    assert max(counts.values()) == limit
    assert [count for _, count in sorted(counts.items())][1:-1] == [limit] * (len(counts) - 2)
    places = [(each - start) / length % 1.0 for each in times]
    assert all(0.1 - 1e-6 <= place <= 0.9 + 1e-6 for place in places)


@given(limit=st.integers(10, 400), phase=st.floats(0.0, 0.99))
def test_no_burst_follows_a_pause(limit: int, phase: float) -> None:
    window = known(0.0)
    sent(window, limit, 10.0, 12.0)
    times = sent(window, limit, 20.0 + phase, 22.0)
    at_once = Counter(times).most_common(1)[0][1]
    assert at_once <= 0.25 * limit + 2
    assert max(Counter(int(each) for each in times).values()) <= limit


@given(seed=st.integers(0, 1000), drift=st.floats(-1e-3, 1e-3))
def test_the_beginning_is_the_mean_of_what_is_told_and_follows_a_clock_that_goes_wrong(seed: int, drift: float) -> None:
    draw, window = random.Random(seed), ShortWindow(1.0)
    for number in range(400):
        window.learn(0.3 + number * (1.0 + drift) + draw.uniform(-0.2, 0.2))
    assert window.is_known
    place = (sent(window, 1, 400.0, 403.0)[1] - 0.5 - 0.3 - 400 * drift) % 1.0
    assert min(place, 1.0 - place) < 0.12


def test_nothing_is_known_of_few_answers_or_of_such_as_do_not_agree() -> None:
    window, draw = ShortWindow(1.0), random.Random(1)
    for number in range(4):
        window.learn(float(number))
        assert not window.is_known
    window = ShortWindow(1.0)
    for _ in range(200):
        window.learn(draw.uniform(0.0, 100.0))
    assert not window.is_known


def test_places_that_others_take_are_left_to_them_and_tried_again_ever_less_often() -> None:
    """Another client has one of ten places: what is refused for it becomes rare."""
    window, refused, now = known(0.0), list[float](), 100.0
    used: Counter[int] = Counter()
    while now < 1100.0:
        if (wait := window.wait(10, now)) > 1e-9:
            now += wait
            continue
        window.begin(10, now)
        used[int(now)] += 1
        if used[int(now)] > 9:
            refused.append(now)
            window.refused(now, now)
    assert len(refused) < 25
    assert len([each for each in refused if each > 500.0]) < 12
    assert sum(used.values()) - len(refused) > 0.97 * 9 * 1000


def test_what_another_limit_refuses_takes_no_place() -> None:
    use, now = Use(10, 10), 0.0
    budget = StatedBudget("requests")
    for number in range(40):
        now = number * 0.1
        sent = budget.begin(use, now)
        left = 9 - number % 10
        budget.observe(sent, StatedLimit("requests", 10, left, 1.0 - now % 1.0, None), now + 0.01)
    window = budget._short_window
    assert window is not None
    assert window.is_known
    for left, taken in ((4, 0), (0, 1)):
        sent = budget.begin(use, now + 0.02)
        now += 0.05
        budget.observe(sent, StatedLimit("requests", 10, left, 0.5, None), now, refused=True)
        assert window._taken == taken
