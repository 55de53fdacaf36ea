"""The pacer against each kind of limit: how much of it is used, and how many requests are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

import pytest
from tests.long_form import examples

from batchwright.pacing.limits import ConfiguredLimit

from .kinds import KINDS
from .simulation import Says, simulate, works

Bar = tuple[float, float]
"""Least share of what a client gets that knows everything, and most refusals for each thousand requests."""

HEADERS: Bar = (0.97, 5.0)
NO_HEADERS: Bar = (0.9, 40.0)

WITH_HEADERS: Mapping[str, Bar] = dict.fromkeys(KINDS, HEADERS) | {
    "bucket 6000": (0.96, 5.0),
    "tokens 300k of 5 s": (0.97, 8.0),
    "requests and tokens": (0.97, 8.0),
    # What the seconds allow is not stated.
    "a minute's, by the second": (0.8, 15.0),
    # How many may go at once is no header's matter.
    "16 at once": (0.94, 10.0),
    "100 at once": (0.9, 5.0),
    "at once, drifting": (0.7, 15.0),
    "slope": (0.85, 20.0),
}
"""With headers and `retry-after`. Where a bar is lower than the usual one, that is what is reached today."""
WITH_NOTHING: Mapping[str, Bar] = dict.fromkeys(KINDS, NO_HEADERS) | {
    # A few refusals at the beginning are many of so few requests.
    "bucket 60": (0.9, 65.0),
    "tokens, as they come": (0.75, 40.0),
    "Anthropic's three": (0.9, 60.0),
    "sliding window 600": (0.6, 60.0),
    "fixed window 600": (0.85, 60.0),
    "fixed window of tokens": (0.9, 60.0),
    # Nothing tells when a second ends.
    "10 in each second": (0.65, 40.0),
    "100 in each 10 s": (0.85, 50.0),
    "at once, drifting": (0.7, 40.0),
    "slope": (0.45, 40.0),
}
"""Where neither headers nor refusals say anything."""
JOBS = {"Anthropic's three": 5, "100 in each 10 s": 5}
"""Jobs of which the median counts, for limits that are found sooner or later as chance has it."""


LARGE = {"bucket 6000", "tokens 3M"}
"""Kinds which differ from others only in that more requests go."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind in LARGE else kind for kind in KINDS]
)
def test_with_headers(kind: str) -> None:
    share, refused = WITH_HEADERS[kind]
    got, measured = KINDS[kind].measure(Says(headers=KINDS[kind].headers, retry_after=True))
    assert got >= share
    assert measured.refused_per_thousand <= refused


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind == "tokens 3M" else kind for kind in KINDS]
)
def test_without_headers(kind: str) -> None:
    share, refused = WITH_NOTHING[kind]
    jobs = [KINDS[kind].measure(Says(), seed=1 + seed) for seed in range(JOBS.get(kind, 1))]
    assert median(got for got, _ in jobs) >= share
    assert median(measured.refused_per_thousand for _, measured in jobs) <= refused


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.told])
def test_who_is_told_the_limit_is_never_refused_for_it(kind: str) -> None:
    """Of a bucket that is full at first, what it holds then stays unused, since a sliding window would not have it."""
    _, measured = KINDS[kind].measure(Says(), KINDS[kind].told)
    assert measured.refused == 0
    (told,) = KINDS[kind].told
    even = told.limit * KINDS[kind].seconds / told.window
    assert measured.charged(KINDS[kind].quantity) >= 0.95 * even - 1.0


def test_what_is_measured_is_repeatable() -> None:
    kind = replace(KINDS["bucket 600"], seconds=30.0)
    first, second = (kind.measure(Says(headers="openai")) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("kind", "share", "refused"),
    [
        ("tokens, adjusted", 0.97, 40.0),
        ("tokens, drifting", 0.96, 20.0),
        ("bucket, drifting", 0.97, 20.0),
        ("slope", 0.97, 20.0),
        ("10 in each second", 0.95, 10.0),
        ("100 in each 10 s", 0.97, 10.0),
        ("sliding window 600", 0.97, 20.0),
    ],
)
def test_the_text_of_refusals_tells_much(kind: str, share: float, refused: float) -> None:
    """It says what is to blame, when to ask again, and hints at a rate, but not what is counted over which time."""
    got, measured = KINDS[kind].measure(Says(text=True))
    assert got >= share
    assert measured.refused_per_thousand <= refused


@pytest.mark.parametrize(("kind", "refused"), [("fixed window 600", 16.0), ("sliding window 600", 8.0)])
def test_requests_that_overtake_one_another_are_hardly_refused(kind: str, refused: float) -> None:
    """They arrive 0.1 to 0.4 s after they were sent, so what the headers of one say holds for others in part."""
    says = Says(headers="openai", retry_after=True)
    for seed in range(examples(1, long=2)):
        measured = simulate(KINDS[kind].limits(), works(seed), seconds=600.0, says=says, round_trip=0.5, seed=seed)
        assert len(measured.admitted) >= 5980
        assert measured.refused_per_thousand <= refused


def test_the_last_request_of_a_window_that_slides_is_used() -> None:
    """A job of ten windows' requests takes nine minutes and what is sent in the last of them."""
    says = Says(headers="openai", retry_after=True)
    kind = KINDS["sliding window 600"]
    for seed in range(examples(1, long=3)):
        measured = simulate(
            kind.limits(),
            works(seed),
            seconds=580.0,
            says=says,
            told=(ConfiguredLimit("requests", 600, 60.0),),
            seed=seed,
        )
        assert len(measured.admitted) >= 6000


@pytest.mark.parametrize(
    ("round_trip", "when_ready"),
    [(0.1, False), pytest.param(0.3, False, marks=pytest.mark.long), (0.5, False), (0.1, True)],
)
def test_stated_windows_of_a_second_are_used_though_requests_take_unlike_times_to_arrive(
    round_trip: float, when_ready: bool
) -> None:
    """They arrive after a quarter to three quarters of a round trip."""
    says = Says(headers="openai", retry_after=True, when_ready=when_ready)
    kind, told = KINDS["10 in each second"], (ConfiguredLimit("requests", 600, 60.0),)
    for seed in range(examples(1, long=2)):
        measured = simulate(
            kind.limits(), works(seed), seconds=300.0, says=says, told=told, round_trip=round_trip, seed=seed
        )
        assert len(measured.admitted) >= 0.98 * 3000
        assert measured.refused_per_thousand <= 5.0


def test_windows_of_a_second_do_not_grow_by_requests_that_come_too_late_for_them() -> None:
    """Requests arrive 0.05 to 0.15 s after they were sent, so that now and then a window seems to admit one more."""
    kind = KINDS["10 in each second"]
    for seed in range(examples(1, long=2)):
        measured = simulate(kind.limits(), works(seed), seconds=300.0, says=Says(text=True), round_trip=0.2, seed=seed)
        assert len(measured.admitted) >= 0.95 * 3000
        assert measured.refused_per_thousand <= 10.0
