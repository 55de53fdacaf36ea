"""Processes that tell each other once a second what they use keep limits together: with providers, in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from benchmarks.provider.amounts import Quantity
from benchmarks.provider.limits import Concurrency, Limits, TokenBucket
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.pacing.limits import ConfiguredLimit, Use, configured_limits
from batchwright.pacing.pacer import Pacer
from batchwright.pacing.sharing import ALL, Sharing, fair_part

from .simulation import Client, Clock, Measured, Says, simulate, works

REQUESTS = Quantity.REQUESTS
MANY = 1000
"""Requests that wait where there is no end of them."""
FAIR = 0.95
"""Least of Jain's index."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process, and when it has something to send."""

    starts: float = 0.0
    ends: float = math.inf
    wanted: float = math.inf
    """Requests a second."""


@dataclass(slots=True)
class Together:
    """What came of several processes."""

    each: list[Measured]

    def admitted(self, member: int, start: float, end: float) -> int:
        return sum(start <= at < end for at, _ in self.each[member].admitted)

    def shares(self, start: float, end: float) -> list[int]:
        return [self.admitted(member, start, end) for member in range(len(self.each))]

    def most_in(self, window: float) -> int:
        times = sorted(at for measured in self.each for at, _ in measured.admitted)
        first, most = 0, 0
        for last, at in enumerate(times):
            while times[first] <= at - window:
                first += 1
            most = max(most, last - first + 1)
        return most

    def refused(self, start: float, end: float) -> float:
        """Refusals for each thousand requests."""
        times = [at for measured in self.each for at in measured.refused_at]
        return per_thousand(times, sum(self.shares(start, end)), start, end)


def per_thousand(refused_at: Sequence[float], admitted: int, start: float, end: float) -> float:
    refusals = sum(start <= at < end for at in refused_at)
    return 1000.0 * refusals / max(1, refusals + admitted)


def refused(alone: Measured, start: float, end: float) -> float:
    return Together([alone]).refused(start, end)


def together(
    limits: Limits, members: Sequence[Member], *, seconds: float, told: Sequence[ConfiguredLimit] = (), seed: int = 0
) -> Together:
    """Let processes send to one provider, that exchange what they publish about once a second."""
    clock, draw = Clock(), random.Random(seed)
    clients: dict[int, Client] = {}
    published: dict[int, dict[str, float]] = {}
    results = [Measured() for _ in members]
    since: dict[int, float] = {}

    def exchange(number: int) -> None:
        if number not in published:
            return
        client = clients.get(number)
        others = [note for other, note in published.items() if other != number]
        if others:
            since.setdefault(number, clock.now)
        else:
            since.pop(number, None)
        if client is not None:
            waiting = len(client.waiting) if client.wanted < math.inf else MANY
            published[number] = client.pacer.note(clock.now, waiting)
            client.pacer.share([each for each in others if each], clock.now, since=since.get(number))
            client.go()
        clock.at(1.0 + 0.1 * draw.random(), lambda: exchange(number))

    def begin(number: int) -> None:
        member = members[number]
        published[number] = {}
        pacer = Pacer(1000, told, rank=number + 1.0)
        client = Client(clock, limits, works(number), pacer, Says(), 0.05, number, member.wanted)
        clients[number], client.measured = client, results[number]
        exchange(number)
        client.go()

    def end(number: int) -> None:
        clients[number].end()
        del published[number]

    for number, member in enumerate(members):
        clock.at(member.starts + draw.random(), lambda number=number: begin(number))  # type: ignore[misc]
        if member.ends < math.inf:
            clock.at(member.ends, lambda number=number: end(number))  # type: ignore[misc]
    clock.run(seconds)
    return Together(results)


def jain(shares: Sequence[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def bucket(rpm: float, burst: float = 5.0) -> Limits:
    return Limits(TokenBucket("requests", REQUESTS, rpm, burst=burst))


def unlimited() -> Limits:
    return bucket(1e9)


members = st.builds(
    lambda starts, lasts, wanted: Member(starts, starts + lasts, wanted),
    st.one_of(st.just(0.0), st.floats(0.0, 90.0)),
    st.one_of(st.just(math.inf), st.floats(2.0, 80.0)),
    st.sampled_from([math.inf, math.inf, 1.0, 4.0]),
)


@settings(max_examples=examples(8, long=25))
@given(st.sampled_from([300.0, 900.0]), st.lists(members, min_size=2, max_size=5), st.integers(0, 100))
def test_all_together_never_exceed_a_told_limit_in_any_window(rpm: float, each: list[Member], seed: int) -> None:
    found = together(unlimited(), each, seconds=150.0, told=configured_limits(rpm=rpm), seed=seed)
    assert found.most_in(60.0) <= rpm


@pytest.mark.parametrize("count", [2, 5])
def test_a_told_limit_is_used_to_the_full_and_divided_evenly(count: int) -> None:
    found = together(unlimited(), [Member()] * count, seconds=120.0, told=configured_limits(rpm=600))
    assert jain(found.shares(15.0, 30.0)) >= FAIR
    assert jain(found.shares(60.0, 120.0)) >= 0.99
    assert sum(found.shares(60.0, 120.0)) >= 0.95 * 600


def test_who_needs_less_than_its_part_leaves_the_rest_to_the_others() -> None:
    found = together(
        unlimited(), [Member(), Member(wanted=1.0), Member()], seconds=120.0, told=configured_limits(rpm=600)
    )
    first, second, third = found.shares(60.0, 120.0)
    assert 58 <= second <= 62
    assert first + second + third >= 0.95 * 600
    assert jain([first, third]) >= 0.99


def test_a_newcomer_gets_its_part_of_a_told_limit_in_seconds_and_leaves_it_in_seconds() -> None:
    each = [Member(), Member(starts=90.0, ends=150.0)]
    found = together(unlimited(), each, seconds=180.0, told=configured_limits(rpm=600))
    # Of the five a second that are its part.
    assert found.admitted(1, 95.0, 100.0) >= 0.8 * 25
    assert found.admitted(0, 95.0, 100.0) >= 0.8 * 25
    assert found.admitted(0, 155.0, 165.0) >= 0.9 * 100


@pytest.mark.parametrize("count", [2, 4])
def test_a_rate_that_refusals_show_is_shared(count: int) -> None:
    alone = simulate(bucket(600), works(0), seconds=180.0, says=Says())
    found = together(bucket(600), [Member()] * count, seconds=180.0)
    assert sum(found.shares(60.0, 180.0)) >= 0.95 * 1200
    assert jain(found.shares(15.0, 60.0)) >= FAIR
    assert jain(found.shares(60.0, 180.0)) >= 0.99
    assert found.refused(60.0, 180.0) <= 1.5 * refused(alone, 60.0, 180.0)


def test_a_newcomer_goes_on_at_its_part_of_a_rate_that_was_found() -> None:
    found = together(bucket(600), [Member(), Member(starts=90.0, ends=150.0)], seconds=180.0)
    assert found.admitted(1, 95.0, 100.0) >= 0.8 * 25
    assert found.each[1].refused <= 8
    assert found.admitted(0, 155.0, 165.0) >= 0.9 * 100


@pytest.mark.parametrize("count", [2, 4])
def test_a_number_at_once_that_refusals_show_is_shared(count: int) -> None:
    found = together(Limits(Concurrency("requests under way", 40)), [Member()] * count, seconds=150.0)
    # Each takes two seconds.
    assert sum(found.shares(90.0, 150.0)) >= 0.9 * 20 * 60
    assert jain(found.shares(15.0, 90.0)) >= FAIR
    assert found.refused(60.0, 150.0) <= 10.0


def test_a_newcomer_takes_its_part_of_a_number_at_once_when_it_is_free() -> None:
    limits = Limits(Concurrency("requests under way", 40))
    found = together(limits, [Member(), Member(starts=90.0, ends=150.0)], seconds=210.0)
    assert found.admitted(1, 95.0, 100.0) >= 0.8 * 50
    assert found.admitted(1, 100.0, 120.0) >= 0.9 * 200
    assert found.refused(90.0, 210.0) <= 10.0
    assert found.admitted(0, 170.0, 210.0) >= 0.9 * 800


@given(st.floats(0.0, 1e6), st.lists(st.floats(0.0, 1e6), max_size=8))
def test_parts_are_max_min_fair(total: float, wanted: list[float]) -> None:
    part = fair_part(total, wanted)
    assert part * (len(wanted) + 1) >= total * (1 - 1e-9), "nobody gets less than an equal part who wants it"
    assert part + sum(min(want, part) for want in wanted) == pytest.approx(total), "and nothing is left"


@given(st.integers(1, 200), st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_places_are_never_more_than_there_are(total: int, wanted: list[int]) -> None:
    """If each has heard of all, which have no request under way yet."""
    each = [Sharing(rank + 1.0) for rank in range(len(wanted))]
    notes = [one.note(1.0, 0.0, 0, waiting, is_held_back=True) for one, waiting in zip(each, wanted, strict=True)]
    for number, one in enumerate(each):
        one.learn([note for other, note in enumerate(notes) if other != number], 1.0)
    places = [one.places(total) for one in each]
    assert sum(places) <= max(total, len(wanted))
    if total >= len(wanted):
        assert sum(places) >= min(total, sum(wanted)) - len(wanted)


def test_who_is_silent_leaves_its_part_and_what_it_used_is_forgotten_later() -> None:
    sharing = Sharing()
    note = {"rank": 2.0, "beat": 1.0, "requests": 30.0, "requests oldest": 60.0, "requests wanted": ALL}
    sharing.learn([note], 0.0)
    assert (sharing.part(10.0, "requests"), sharing.used("requests", 60.0)) == (5.0, 30.0)
    sharing.learn([note], 6.0)
    assert sharing.part(10.0, "requests") == 10.0, "it is taken for ended"
    assert 27.0 <= sharing.used("requests", 60.0) <= 30.0
    sharing.learn([], 30.0)
    assert 15.0 <= sharing.used("requests", 60.0) <= 16.0
    sharing.learn([], 61.0)
    assert sharing.used("requests", 60.0) == 0.0


def test_notes_that_lack_anything_are_borne() -> None:
    pacer = Pacer(10, configured_limits(rpm=60.0))
    for note in ({}, {"rank": 2.0}, {"cap": 5.0}, {"cap epoch": 3.0}, {"rate": 5.0}, {"places": 1.0}, {"known": 1.0}):
        pacer.share([note], 1.0)
        assert math.isfinite(pacer.wait(Use(1.0, 1.0), 1.0))
    pacer.share([], 2.0)
    assert pacer.wait(Use(1.0, 1.0), 2.0) == 0.0


def test_a_window_that_was_found_is_shared_as_a_rate() -> None:
    pacer, use = Pacer(100), Use(100.0, 100.0)
    for window in range(2):
        for number in range(11):
            now = window + 0.03 * number
            attempt = pacer.begin(use, now)
            if number < 10:
                pacer.succeeded(attempt, now + 0.01, input_tokens=100, output_tokens=100)
        pacer.refused(attempt, now, retry_after=window + 0.999 - now, cause="rate")
    assert pacer.figures(2.0).found_per_minute == 600.0
    other = Pacer(100)
    other.begin(use, 2.0)
    pacer.share([other.note(2.0)], 2.1)
    assert pacer.figures(2.1).found_per_minute == 600.0
