"""Windows of a second or ten that an endpoint does not state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.pacing.found_window import FoundWindow


class Endpoint:
    """Admits `limit` requests in each window; it and the client that it has agree on the time."""

    def __init__(self, limit: int, length: float, start: float = 0.3) -> None:
        self.limit, self.length, self.start = limit, length, start
        self._window, self._used = -1, 0
        self.refused = 0
        self.admitted = 0

    def ends(self, at: float) -> float:
        """Return the seconds until the present window ends."""
        return self.length - (at - self.start) % self.length

    def admit(self, at: float) -> bool:
        window = int((at - self.start) // self.length)
        if window != self._window:
            self._window, self._used = window, 0
        if self._used >= self.limit:
            self.refused += 1
            return False
        self._used += 1
        self.admitted += 1
        return True


def drive(found: FoundWindow, endpoint: Endpoint, start: float, end: float, rate: float) -> None:
    """Send from one time to another, at `rate` until a window is known, then as it says."""
    now, until = start, -1.0
    while now < end:
        wait = max(found.wait(now), until - now)
        if wait > 1e-9:
            now += wait
            continue
        found.begin(now)
        if not endpoint.admit(now):
            found.withdrawn(now)
            found.refused(now, endpoint.ends(now))
            until = now + endpoint.ends(now)
        now += 1e-4 if found.length else 1.0 / rate


@pytest.mark.parametrize(("limit", "length"), [(10, 1.0), (100, 10.0), (3, 1.0), (200, 1.0)])
def test_windows_are_found_and_used_up(limit: int, length: float) -> None:
    found, endpoint = FoundWindow(), Endpoint(limit, length)
    drive(found, endpoint, 0.0, 60.0 * length, 2.0 * limit / length)
    assert (found.length, found.limit) == (length, limit)
    assert endpoint.admitted >= 0.97 * 60 * limit
    assert endpoint.refused <= 12


@pytest.mark.parametrize(("limit", "length"), [(10, 1.0), (100, 10.0)])
def test_windows_are_found_by_a_client_that_hardly_exceeds_them(limit: int, length: float) -> None:
    """Each refusal comes just before its window ends, so its pause is as short as those of a limit that is refilled."""
    found, endpoint = FoundWindow(), Endpoint(limit, length)
    drive(found, endpoint, 0.0, 120.0 * length, 1.03 * limit / length)
    assert (found.length, found.limit) == (length, limit)


@pytest.mark.parametrize("more", [1.003, 1.03, 1.07, 1.13])
def test_a_limit_that_is_refilled_shows_no_window(more: float) -> None:
    found, tokens, now = FoundWindow(), 5.0, 0.0
    refused = 0
    for _ in range(20_000):
        found.begin(now)
        if tokens >= 1.0:
            tokens -= 1.0
        else:
            refused += 1
            found.withdrawn(now)
            found.refused(now, (1.0 - tokens) / 10.0)
        assert found.length is None
        now += 0.1 / more
        tokens = min(5.0, tokens + 1.0 / more)
    assert refused > 50


def test_a_limit_that_rises_is_followed() -> None:
    found, endpoint = FoundWindow(), Endpoint(10, 1.0)
    drive(found, endpoint, 0.0, 20.0, 13.0)
    endpoint.limit, before = 20, endpoint.admitted
    drive(found, endpoint, 20.0, 60.0, 1.0)
    assert found.limit >= 18
    assert endpoint.admitted - before >= 0.8 * 20 * 40


def test_a_limit_that_falls_is_followed() -> None:
    found, endpoint = FoundWindow(), Endpoint(20, 1.0)
    drive(found, endpoint, 0.0, 20.0, 26.0)
    endpoint.limit, before = 10, endpoint.refused
    drive(found, endpoint, 20.0, 60.0, 1.0)
    assert found.limit == 10
    assert endpoint.refused - before <= 10


@given(st.lists(st.tuples(st.floats(0.05, 3.0), st.floats(0.001, 0.09)), min_size=3, max_size=5))
def test_a_few_pauses_of_a_rate_show_no_window(refusals: list[tuple[float, float]]) -> None:
    """A bucket that gets ten requests a second names pauses of less than a tenth of one."""
    found, now = FoundWindow(), 0.0
    for apart, pause in refusals:
        for _ in range(max(2, round(10 * apart))):
            now += 0.1
            found.begin(now)
        found.refused(now, pause)
        assert found.length is None


def test_windows_that_foretell_nothing_are_forgotten() -> None:
    found, endpoint = FoundWindow(), Endpoint(10, 1.0)
    drive(found, endpoint, 0.0, 20.0, 13.0)
    assert found.length is not None
    for number in range(3):
        found.refused(20.0 + 0.37 * number, None)
    assert found.length is None
    assert found.wait(21.0) == 0.0
