"""Refusals that come at random, whatever the rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median

import pytest
from benchmarks.provider.amounts import Quantity
from benchmarks.provider.limits import AtRandom, Concurrency, Limit, Limits, TokenBucket
from tests.long_form import examples

from batchwright.pacing.limits import ConfiguredLimit
from batchwright.pacing.random_refusals import RandomRefusals

from .simulation import Says, allowed, simulate, works

REQUESTS = Quantity.REQUESTS
SILENT = Says()
RETRY_AFTER = Says(retry_after=True)


@cache
def unhindered(says: Says, seed: int) -> int:
    return len(simulate(Limits(AtRandom(0.0)), works(seed), seconds=600.0, says=says, most=60).admitted)


@pytest.mark.parametrize(
    ("share", "says"),
    [
        pytest.param(0.02, SILENT, marks=pytest.mark.long),
        pytest.param(0.05, SILENT, marks=pytest.mark.long),
        (0.1, SILENT),
        (0.02, RETRY_AFTER),
        pytest.param(0.05, RETRY_AFTER, marks=pytest.mark.long),
        pytest.param(0.1, RETRY_AFTER, marks=pytest.mark.long),
    ],
)
def test_they_do_not_slow_a_job_down(share: float, says: Says) -> None:
    """In the median of three jobs, since a few refusals at the beginning may be taken for a limit."""
    jobs = (simulate(Limits(AtRandom(share)), works(seed), seconds=600.0, says=says, most=60) for seed in range(3))
    assert median(len(job.admitted) / unhindered(says, seed) for seed, job in enumerate(jobs)) >= 0.75


HEADERS = Says(headers="openai", retry_after=True)


@pytest.mark.parametrize(
    ("limit", "says", "share", "least"),
    [
        pytest.param(
            lambda: TokenBucket("requests", REQUESTS, 600, burst=5), Says(), 0.02, 0.9, marks=pytest.mark.long
        ),
        (lambda: TokenBucket("requests", REQUESTS, 600, burst=5), Says(), 0.05, 0.9),
        (lambda: TokenBucket("requests", REQUESTS, 600, burst=5), HEADERS, 0.05, 0.9),
        pytest.param(
            lambda: TokenBucket("requests", REQUESTS, 600, burst=5), HEADERS, 0.1, 0.9, marks=pytest.mark.long
        ),
        pytest.param(lambda: Concurrency("requests under way", 16), Says(), 0.05, 0.85, marks=pytest.mark.long),
        (lambda: Concurrency("requests under way", 16), Says(), 0.1, 0.8),
    ],
)
def test_a_limit_is_found_beside_them(limit: Callable[[], Limit], says: Says, share: float, least: float) -> None:
    measured = simulate(Limits(AtRandom(share), limit()), works(0), seconds=600.0, says=says)
    all_of_it = allowed(Limits(limit()), works(0), REQUESTS, seconds=600.0, requests=9000)
    assert measured.charged(REQUESTS) >= least * all_of_it
    assert measured.refused_per_thousand <= 1000.0 * share + 80.0


@pytest.mark.parametrize("seed", range(examples(1, long=4)))
def test_beside_limits_that_are_told_and_stated_they_teach_nothing(seed: int) -> None:
    def bucket() -> Limit:
        return TokenBucket("requests", REQUESTS, 600, burst=5)

    told = [ConfiguredLimit("requests", 600, 60.0)]
    limits = Limits(AtRandom(0.05, seed=seed), bucket())
    measured = simulate(limits, works(0), seconds=300.0, says=HEADERS, told=told)
    all_of_it = allowed(Limits(bucket()), works(0), REQUESTS, seconds=300.0, requests=4000)
    assert measured.charged(REQUESTS) >= 0.97 * all_of_it


def send(refusals: RandomRefusals, requests: int, *, is_below: bool = True) -> int:
    return [refusals.sent(is_below=is_below) for _ in range(requests)][-1]


def suspected(refusals: RandomRefusals, every: int = 20) -> float:
    """Refuse every so many requests until some are taken for refused at random, and return when that was."""
    for seconds in range(10, 1000, 10):
        if refusals.refused(send(refusals, every), float(seconds), is_below=True, is_beside=False):
            return float(seconds)
    raise AssertionError(f"no refusal of one in {every} requests is taken for one at random")


def test_their_share_is_that_of_requests_below_the_limit() -> None:
    refusals = RandomRefusals()
    suspected(refusals)
    assert refusals.share == pytest.approx(1 / 20, rel=0.1)
    send(refusals, 3000)
    assert refusals.share == 0.0, "hardly any were refused of late"


def test_those_above_the_limit_are_no_evidence() -> None:
    refusals = RandomRefusals()
    for second in range(100):
        send(refusals, 100)
        number = send(refusals, 1, is_below=False)
        assert not refusals.refused(number, float(second), is_below=False, is_beside=False)
    assert refusals.share == 0.0


def test_as_many_as_are_expected_are_absorbed() -> None:
    refusals = RandomRefusals()
    suspected(refusals)
    refusals.begin_trial(1.0, 0)
    assert [refusals.absorbs() for _ in range(5)] == [True, True, True, False, True]
    send(refusals, 150)
    assert sum(refusals.absorbs() for _ in range(20)) == 8 + 3 * 3, "no more are saved than eight"


def test_a_limit_that_is_found_again_is_believed() -> None:
    refusals = RandomRefusals()
    now = suspected(refusals)
    refusals.found(8.0, 0, now)
    assert refusals.begin_trial(4.0, 0) == 8.0, "the search begins where the rate was before it fell"
    for rate in (6.0, 4.1):
        refusals.found(rate, 0, now)
    assert refusals.share == 0.0
    for seconds in range(100):
        number = send(refusals, 20)
        assert not refusals.refused(number, now + seconds, is_below=True, is_beside=False)
    assert suspected_after(refusals, now + 100.0)


def suspected_after(refusals: RandomRefusals, now: float) -> bool:
    return any(
        refusals.refused(send(refusals, 20), now + seconds, is_below=True, is_beside=False) for seconds in range(30)
    )


def test_one_that_was_far_from_the_limit_is_confirmed() -> None:
    refusals = RandomRefusals()
    now = suspected(refusals)
    refusals.begin_trial(4.0, 0)
    for rate in (9.0, 8.0, 7.0, 4.0):
        refusals.found(rate, 0, now)
    assert refusals.share > 0.0


def test_those_that_stop_are_forgotten_whatever_is_sent() -> None:
    refusals = RandomRefusals()
    suspected(refusals)
    send(refusals, 100, is_below=False)
    assert refusals.share > 0.0
    send(refusals, 100, is_below=False)
    assert refusals.share == 0.0, "ten were to come"


@pytest.mark.parametrize("says", [Says(), HEADERS], ids=["silent", "headers"])
def test_they_are_forgotten_beside_a_number_at_once_when_they_stop(says: Says) -> None:
    class Stopping(AtRandom):
        def seconds_until(self, now: float, amount: float) -> float:
            return super().seconds_until(now, amount) if now < 300.0 else 0.0

    limits = Limits(Stopping(0.3), Concurrency("requests under way", 16))
    measured = simulate(limits, works(0), seconds=900.0, says=says)
    assert sum(at > 600.0 for at in measured.refused_at) <= 0.03 * sum(at > 600.0 for at, _ in measured.admitted)


def test_those_that_follow_one_another_end_with_a_window() -> None:
    refusals = RandomRefusals()
    for second in range(100):
        number = send(refusals, 10 if second % 2 else 1)
        assert not (refusals.refused(number, float(second), is_below=True, is_beside=False) and second > 40)
    assert refusals.share == 0.0
