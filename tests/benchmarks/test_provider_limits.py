"""The models of providers' limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from benchmarks.provider.amounts import Charge, Quantity, Schedule, Usage, duration
from benchmarks.provider.headers import anthropic_headers, openai_headers
from benchmarks.provider.limits import (
    Concurrency,
    FixedWindow,
    Limit,
    Limits,
    SlidingWindow,
    Slope,
    TokenBucket,
    per_day,
    per_second,
)
from benchmarks.provider.plan import Work, best_plan
from hypothesis import given
from hypothesis import strategies as st

ONE = Usage()
REQUESTS, TOKENS = Quantity.REQUESTS, Quantity.TOKENS


def admitted(limits: Limits, times: list[float], usage: Usage = ONE) -> list[float]:
    """The times at which a request was admitted that ended at once."""
    through = []
    for now in times:
        if limits.admit(now, usage) is None:
            limits.settle(now, usage, usage)
            through.append(now)
    return through


def retry_after(limits: Limits, now: float, usage: Usage = ONE) -> float:
    refusal = limits.admit(now, usage)
    assert refusal is not None
    assert refusal.retry_after is not None
    return refusal.retry_after


def test_a_bucket_is_refilled_continuously() -> None:
    limits = Limits(TokenBucket("rpm", REQUESTS, 60, burst=2))
    assert admitted(limits, [0, 0, 0, 0.5, 1.0, 1.5, 2.0]) == [0, 0, 1.0, 2.0]
    assert retry_after(limits, 2.25) == pytest.approx(0.75)


def test_a_full_bucket_holds_a_minute() -> None:
    limits = Limits(TokenBucket("rpm", REQUESTS, 60))
    assert len(admitted(limits, [0.0] * 100)) == 60
    assert len(admitted(limits, [1000.0] * 100)) == 60


def test_a_fixed_window_begins_again_at_once() -> None:
    limits = Limits(FixedWindow("rpm", REQUESTS, 3))
    assert admitted(limits, [50, 50, 50, 59, 60, 60, 60, 60]) == [50, 50, 50, 60, 60, 60]
    assert retry_after(limits, 61) == pytest.approx(59)


def test_a_sliding_window_never_holds_more() -> None:
    limits = Limits(SlidingWindow("rpm", REQUESTS, 2))
    assert admitted(limits, [50, 59, 60, 109, 110, 118, 119]) == [50, 59, 110, 119]
    assert retry_after(limits, 120) == pytest.approx(50)


def test_a_limit_per_minute_can_be_enforced_per_second() -> None:
    limits = Limits(per_second("rpm", 60_000))
    assert len(admitted(limits, [0.2] * 2000)) == 1000
    assert retry_after(limits, 0.4) == pytest.approx(0.6)
    azure = Limits(per_second("rpm", 600, seconds=10))
    assert len(admitted(azure, [0.0] * 200)) == 100


def test_a_day_is_refilled_in_a_day() -> None:
    limits = Limits(per_day("rpd", 10_000, stated=True))
    assert len(admitted(limits, [0.0] * 10_001)) == 10_000
    assert retry_after(limits, 0.0) == pytest.approx(8.64)


def test_concurrency_frees_a_place_at_each_end() -> None:
    limits = Limits(Concurrency("under way", 1))
    assert limits.admit(0, ONE) is None
    refusal = limits.admit(1, ONE)
    assert refusal is not None
    assert refusal.retry_after is None
    limits.settle(2, ONE, ONE)
    assert limits.admit(2, ONE) is None


def test_usage_may_rise_by_a_half() -> None:
    limits = Limits(Slope("slope", REQUESTS, 10, growth=1.5, seconds=1, memory=2, status=529))
    counts = [len(admitted(limits, [second + 0.5] * 100)) for second in range(4)]
    assert counts == [10, 15, 22, 33]
    refusal = limits.admit(3.5, ONE)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (529, "slow_down")
    assert len(admitted(limits, [6.5] * 100)) == 10


@pytest.mark.parametrize(
    ("charge", "after"), [(Charge.ESTIMATE, 0), (Charge.ADJUSTED, 2), (Charge.ACTUAL, 3)], ids=lambda each: str(each)
)
def test_what_a_request_may_take_and_what_it_took(charge: Charge, after: int) -> None:
    """Of 300 tokens a window, three requests may take 100 each, and take 30 when they have ended."""
    limits = Limits(FixedWindow("tpm", TOKENS, 300, charge=charge))
    estimate, actual = Usage(1, 20, 80), Usage(1, 20, 10)
    for _ in range(3):
        assert limits.admit(0, estimate) is None
    assert (limits.admit(0, estimate) is None) == (charge is Charge.ACTUAL)
    for _ in range(3):
        limits.settle(1, estimate, actual)
    remaining = sum(limits.admit(1, estimate) is None for _ in range(3))
    assert remaining == after


def test_input_read_from_the_cache_does_not_count() -> None:
    limit = TokenBucket("itpm", Quantity.INPUT_TOKENS, 6000, burst=1, charge=Charge.ADJUSTED)
    limits = Limits(limit)
    estimate = Usage(1, 100, 0)
    assert limits.admit(0, estimate) is None
    assert limits.admit(0, estimate) is not None
    limits.settle(0, estimate, Usage(1, 100, 0, cached_tokens=80))
    assert limit.remaining(0) == pytest.approx(80)


def test_a_request_that_is_refused_can_count_too() -> None:
    patient = Limits(TokenBucket("rpm", REQUESTS, 60, burst=1), count_refused=True)
    hammering = Limits(TokenBucket("rpm", REQUESTS, 60, burst=1), count_refused=True)
    assert admitted(patient, [0, 1, 2, 3]) == [0, 1, 2, 3]
    assert admitted(hammering, [0, 0.5, 1, 1.5, 2]) == [0]


def test_what_is_larger_than_the_limit_is_never_admitted() -> None:
    limits = Limits(TokenBucket("tpm", TOKENS, 600, burst=60))
    refusal = limits.admit(0, Usage(1, 601))
    assert refusal is not None
    assert refusal.retry_after == math.inf
    assert refusal.message == "Request too large on tpm: Limit 600, Requested 601."


def test_limits_change_at_their_time() -> None:
    limits = Limits(TokenBucket("rpm", REQUESTS, Schedule(60, (10, 30), (20, 120)), burst=1))
    assert [limits.drift(now)["rpm"] for now in (0, 10, 19.9, 20)] == [60, 30, 30, 120]
    every = [number / 10 for number in range(300)]
    through = admitted(limits, every)
    counts = [sum(start <= time < start + 10 for time in through) for start in (0, 10, 20)]
    assert counts == pytest.approx([10, 5, 20], abs=1)


def test_openai_headers() -> None:
    limits = Limits(TokenBucket("rpm", REQUESTS, 60), FixedWindow("tpm", TOKENS, 150_000, seconds=360))
    assert limits.admit(0, Usage(1, 10, 6)) is None
    assert openai_headers(limits, 0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "150000",
        "x-ratelimit-remaining-tokens": "149984",
        "x-ratelimit-reset-tokens": "6m0s",
    }


def test_anthropic_headers() -> None:
    limits = Limits(
        TokenBucket("rpm", REQUESTS, 60),
        TokenBucket("itpm", Quantity.INPUT_TOKENS, 60_000),
        TokenBucket("otpm", Quantity.OUTPUT_TOKENS, 12_000, charge=Charge.ACTUAL),
        Concurrency("hidden", 8),
    )
    estimate = Usage(1, 1_600, 300)
    assert limits.admit(0, estimate) is None
    limits.settle(0, estimate, estimate)
    headers = anthropic_headers(limits, 0, 1_800_000_000.5)
    assert headers["anthropic-ratelimit-requests-remaining"] == "59"
    assert headers["anthropic-ratelimit-input-tokens-remaining"] == "58000"
    assert headers["anthropic-ratelimit-input-tokens-reset"] == "2027-01-15T08:00:03Z"
    assert headers["anthropic-ratelimit-output-tokens-limit"] == "12000"
    assert headers["anthropic-ratelimit-tokens-limit"] == "60000"
    assert len(headers) == 12


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (0.12, "120ms"), (1, "1s"), (7.66, "7.66s"), (360, "6m0s"), (179.56, "2m59.56s"), (3600, "1h0m0s")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


SCHEDULES = st.builds(
    lambda first, second, third: Schedule(first, (7, second), (19, third)),
    *(st.integers(20, 600) for _ in range(3)),
)
LIMITS: list[Callable[[Schedule], Limit]] = [
    lambda schedule: TokenBucket("bucket", REQUESTS, schedule, burst=3),
    lambda schedule: FixedWindow("fixed", REQUESTS, schedule.scaled(1 / 20), seconds=5),
    lambda schedule: SlidingWindow("sliding", REQUESTS, schedule.scaled(1 / 20), seconds=5),
    lambda schedule: per_second("quantized", schedule.scaled(10)),
]


@given(schedule=SCHEDULES, make=st.sampled_from(LIMITS), waits=st.lists(st.floats(0, 2), max_size=80))
def test_nobody_gets_more_than_the_most_by_a_time(
    schedule: Schedule, make: Callable[[Schedule], Limit], waits: list[float]
) -> None:
    limits = Limits(make(schedule))
    now, through = 0.0, 0
    for wait in waits:
        now += wait
        through += limits.admit(now, ONE) is None
        assert through <= make(schedule).most(now) + 1e-6


@given(rate=st.integers(20, 600), make=st.sampled_from(LIMITS), waits=st.lists(st.floats(0, 2), max_size=80))
def test_a_request_is_admitted_after_what_it_was_told_to_wait_and_not_before(
    rate: int, make: Callable[[Schedule], Limit], waits: list[float]
) -> None:
    limits = Limits(make(Schedule(rate)))
    now = 0.0
    for wait in waits:
        now += wait
        refusal = limits.admit(now, ONE)
        if refusal is not None:
            assert refusal.retry_after is not None
            if refusal.retry_after > 1e-3:
                assert limits.admit(now + refusal.retry_after * 0.99, ONE) is not None
            now += refusal.retry_after
            assert limits.admit(now, ONE) is None


def test_the_best_plan_uses_up_a_bucket() -> None:
    work = [Work(ONE, Usage(1, 50, 50), seconds=2.0)] * 100
    plan = best_plan(Limits(TokenBucket("rpm", REQUESTS, 600, burst=1)), work)
    assert plan.makespan == pytest.approx(90 / 10 + 2)
    assert plan.delivered(2.0) == 10 * 100
    assert plan.delivered(plan.makespan, REQUESTS) == 100


def test_the_best_plan_keeps_all_places_taken() -> None:
    work = [Work(ONE, ONE, seconds=3.0)] * 40
    assert best_plan(Limits(Concurrency("under way", 8)), work).makespan == pytest.approx(15)


def test_the_best_plan_rises_as_fast_as_it_may() -> None:
    slope = Slope("slope", REQUESTS, 10, growth=2, seconds=1)
    plan = best_plan(Limits(slope, TokenBucket("rpm", REQUESTS, 60 * 40, burst=0.1)), [Work(ONE, ONE, 0.0)] * 150)
    counts = [sum(second <= time < second + 1 for time in plan.admitted) for second in range(4)]
    assert counts == pytest.approx([10, 20, 40, 40], abs=4)


@given(schedule=SCHEDULES, make=st.sampled_from(LIMITS), count=st.integers(1, 120))
def test_no_plan_is_better_than_the_bound(schedule: Schedule, make: Callable[[Schedule], Limit], count: int) -> None:
    plan = best_plan(Limits(make(schedule)), [Work(ONE, ONE, 0.5)] * count)
    last = plan.admitted[-1]
    assert count <= Limits(make(schedule)).most(last, ONE) + 1e-6


def test_a_plan_names_a_request_that_is_never_admitted() -> None:
    with pytest.raises(ValueError, match="request 1 is never admitted: Request too large on tpm"):
        best_plan(Limits(TokenBucket("tpm", TOKENS, 60)), [Work(ONE, ONE, 1), Work(Usage(1, 61), ONE, 1)])


def test_a_schedule_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="the times must grow"):
        Schedule(1, (5, 2), (4, 3))
