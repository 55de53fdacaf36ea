"""A sliding limit of a minute that an endpoint does not state."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.pacing.found_sliding_window import FoundSlidingWindow

from .kinds import KINDS, SAYS
from .simulation import simulate, works

MINUTE = 60.0


class Endpoint:
    """Admits `limit` requests in any minute."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._admitted: deque[float] = deque()
        self.times: list[float] = []
        self.refused = 0

    def retry_after(self, at: float) -> float | None:
        """Admit a request, or return the seconds until one will be admitted."""
        while self._admitted and self._admitted[0] <= at - MINUTE:
            self._admitted.popleft()
        if len(self._admitted) >= self.limit:
            self.refused += 1
            return self._admitted[len(self._admitted) - self.limit] + MINUTE - at
        self._admitted.append(at)
        self.times.append(at)
        return None


def drive(found: FoundSlidingWindow, endpoint: Endpoint, start: float, end: float, rate: float) -> None:
    """Send from one time to another at `rate`, unless the limit is known and says otherwise."""
    now, until = start, -1.0
    while now < end:
        wait = max(found.wait(now), until - now)
        if wait > 1e-9:
            now += wait
            continue
        found.begin(now)
        pause = endpoint.retry_after(now)
        if pause is not None:
            found.withdrawn(now)
            found.refused(now, pause)
            until = now + pause
        now += 1.0 / rate


@pytest.mark.parametrize("limit", [20, 600, 3000])
def test_what_was_sent_a_minute_ago_is_sent_again(limit: int) -> None:
    found, endpoint = FoundSlidingWindow(), Endpoint(limit)
    drive(found, endpoint, 0.0, 30.0, limit / 10.0)
    drive(found, endpoint, 60.01, 300.0, limit / 4.0)
    assert found.limit == limit
    assert len(endpoint.times) >= 4.9 * limit
    # One more is tried now and then.
    assert endpoint.refused <= 8


def test_a_limit_that_falls_is_followed() -> None:
    found, endpoint = FoundSlidingWindow(), Endpoint(100)
    drive(found, endpoint, 0.0, 130.0, 10.0)
    endpoint.limit = 50
    drive(found, endpoint, 130.0, 600.0, 10.0)
    assert found.limit in (0, 50)


def test_a_limit_that_rises_is_followed() -> None:
    found, endpoint = FoundSlidingWindow(), Endpoint(100)
    drive(found, endpoint, 0.0, 130.0, 10.0)
    endpoint.limit = 103
    drive(found, endpoint, 130.0, 600.0, 10.0)
    assert found.limit == 103


def test_a_window_that_begins_anew_is_not_taken_for_one_that_slides() -> None:
    found = FoundSlidingWindow()
    for window in range(4):
        for number in range(100):
            found.begin(60.0 * window + 0.1 * number)
        found.refused(60.0 * window + 10.0, 50.0)
    assert found.limit == 0


def test_refusals_at_one_moment_are_one_mistake() -> None:
    window = FoundSlidingWindow()
    window.limit = 100
    for number in range(20):
        window.refused(10.0 + number / 100, 5.0)
    assert window.limit == 100
    for at in (20.0, 30.0):
        window.refused(at, 5.0)
    assert not window.limit, "three times in a minute it was wrong"


def test_what_was_sent_is_kept_for_some_minutes_only() -> None:
    for is_sliding in (False, True):
        found, endpoint = FoundSlidingWindow(), Endpoint(100)
        drive(found, endpoint, 0.0, 30.0, 10.0)
        drive(found, endpoint, 60.01, 1800.0, 25.0 if is_sliding else 1.0)
        assert bool(found.limit) is is_sliding
        assert len(found._sent) + len(found._past) <= 220


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0.01, 9.9)), max_size=60))
def test_short_pauses_alone_show_no_window(refusals: list[tuple[float, float]]) -> None:
    found, now = FoundSlidingWindow(), 0.0
    for passed, pause in refusals:
        now += passed
        found.begin(now)
        found.refused(now, pause)
    assert found.limit == 0


@given(
    st.lists(st.tuples(st.floats(0.0, 30.0), st.booleans(), st.one_of(st.none(), st.floats(-1.0, 90.0))), max_size=80)
)
def test_whatever_is_told_the_wait_is_at_most_a_minute(events: list[tuple[float, bool, float | None]]) -> None:
    found, now = FoundSlidingWindow(), 0.0
    for passed, is_refused, pause in events:
        now += passed
        assert 0.0 <= found.wait(now) <= MINUTE + 2.0
        found.begin(now)
        if is_refused:
            found.withdrawn(now)
            found.refused(now, pause)


@pytest.mark.parametrize(
    ("kind", "says", "seconds"),
    [
        ("fixed window 600", "everything", 126.0),
        ("fixed window 600", "text", 128.0),
        ("sliding window 600", "everything", 134.0),
        ("sliding window 600", "text", 136.0),
        ("sliding window 600", "retry-after", 136.0),
    ],
)
def test_the_amount_of_three_minutes_is_admitted_soon(kind: str, says: str, seconds: float) -> None:
    """At the earliest it would be after two minutes, each minute's amount in one moment."""
    _, measured = KINDS[kind].measure(SAYS[says])
    assert sorted(at for at, _ in measured.admitted)[1780] <= seconds


@pytest.mark.parametrize("seed", range(4))
def test_a_busy_machine_does_not_make_it_forgotten(seed: int) -> None:
    """Requests arrive 0.4 to 1.1 s after they are sent, so that some come sooner after those of a minute ago."""
    kind = KINDS["sliding window 600"]
    measured = simulate(kind.limits(), works(1), seconds=600.0, says=SAYS["text"], round_trip=1.5, seed=seed)
    assert len(measured.admitted) >= 5990
    assert measured.refused_per_thousand <= 70.0
