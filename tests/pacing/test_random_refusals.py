"""Refusals that come at random, whatever the rate."""

from __future__ import annotations

import random

import pytest
from benchmarks.provider.amounts import Quantity
from benchmarks.provider.limits import Limit, Limits

from batchwright.pacing.random_refusals import RandomRefusals

from .simulation import Says, simulate, works


class AtRandom(Limit):
    """Refuses a share of requests."""

    def __init__(self, share: float) -> None:
        super().__init__("capacity", Quantity.REQUESTS, stated=False)
        self._share = share
        self._draw = random.Random(1)

    def seconds_until(self, now: float, amount: float) -> float:
        return 0.5 if self._draw.random() < self._share else 0.0

    def take(self, now: float, amount: float) -> None:
        pass

    def limit(self, now: float) -> float:
        return 1e9

    remaining = limit

    def reset(self, now: float) -> float:
        return 0.0

    def most(self, until: float) -> float:
        return 1e9


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_they_do_not_slow_a_job_down(share: float) -> None:
    free, refused = (
        len(simulate(Limits(AtRandom(each)), works(0), seconds=300.0, says=Says(), most=60).admitted)
        for each in (0.0, share)
    )
    assert refused >= 0.6 * free


def falling(refusals: RandomRefusals) -> None:
    for number in range(10):
        for _ in range(20):
            refusals.accepted()
        refusals.refused(float(number))
        refusals.found(10.0 * 0.9**number, float(number))
        if refusals.is_on_trial:
            return


def test_a_trial_tells_them_from_a_limit() -> None:
    at_limit, at_random = RandomRefusals(), RandomRefusals()
    for each in (at_limit, at_random):
        falling(each)
        assert each.is_on_trial
        assert not each.holds
    for _ in range(10):
        at_limit.accepted()
        at_limit.refused(20.0)
    assert not at_limit.is_on_trial
    assert not at_limit.holds
    falling(at_limit)
    assert not at_limit.is_on_trial, "it is believed for some minutes"
    for _ in range(16):
        at_random.accepted()
    assert at_random.holds
    for _ in range(30):
        at_random.refused(30.0)
    assert not at_random.holds, "most are refused now"


def test_a_rate_that_stays_is_none_of_them() -> None:
    refusals = RandomRefusals()
    for number in range(200):
        for _ in range(100):
            refusals.accepted()
        refusals.refused(float(number))
        refusals.found(10.0 + number % 3, float(number))
        assert not refusals.is_on_trial
