"""The pure parts: how many lines to claim, when to try again, how fast a batch goes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import (
    EndpointError,
    EndpointUnreachable,
    EngineClosed,
    InvalidRequest,
    Overloaded,
    StoreUnavailable,
)
from batchwright.lines.line_retries import Failures, RetryPolicy, passing
from batchwright.service.batches.batch_progress import BatchRate, BatchRates
from batchwright.service.worker.claimed_lines import LOOKAHEAD, ClaimPlan
from batchwright.service.worker.periodic import BACKOFF
from batchwright.store.records import BatchRecord, LineCounts

BATCH = BatchRecord(
    id="batch_0",
    tenant="default",
    endpoint="/v1/completions",
    input_file_id="file-0",
    completion_window="24h",
    created_at=0.0,
    expires_at=86_400.0,
    status="in_progress",
    counts=LineCounts(1000, 0, 0),
)


def test_a_slow_model_is_given_no_more_than_it_wants() -> None:
    plan = ClaimPlan(0.0)
    assert plan.wanted(0.0, room=500, waiting=0) == 500
    for number in range(1, 60):
        plan.ended()
        assert plan.wanted(3.0 * number, room=1, waiting=0) == 1


def test_a_fast_model_has_the_lines_of_the_next_moment_ready() -> None:
    plan = ClaimPlan(0.0)
    waiting, claims, now = 0, 0, 0.0
    for _ in range(2000):
        now += 0.01
        for _ in range(40):
            plan.ended()
        waiting = max(0, waiting - 40)
        wanted = plan.wanted(now, room=0, waiting=waiting)
        claims += wanted > 0
        waiting += wanted
    ready = 4000 * LOOKAHEAD
    assert ready / 3 < waiting < ready * 1.2
    assert claims < 2000 / 5


def test_hours_without_a_claim_do_not_count_as_hours_without_lines() -> None:
    plan, now = ClaimPlan(0.0), 0.0

    def ready_after(seconds: float) -> int:
        """How many lines are to be ready, when for so long a hundred ended each second."""
        nonlocal now
        for _ in range(round(seconds * 10)):
            now += 0.1
            for _ in range(10):
                plan.ended()
            ready = plan.wanted(now, room=0, waiting=0)
        return ready

    assert ready_after(20.0) == pytest.approx(100 * LOOKAHEAD, rel=0.1)
    now += 5 * 3600.0
    assert ready_after(10.0) == pytest.approx(100 * LOOKAHEAD, rel=0.3)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 99), st.integers(0, 500), st.integers(0, 2000)), max_size=30)
)
def test_a_plan_never_lets_slots_stay_empty(steps: list[tuple[float, int, int, int]]) -> None:
    plan, now = ClaimPlan(0.0), 0.0
    for elapsed, ended, room, waiting in steps:
        now += elapsed
        for _ in range(ended):
            plan.ended()
        wanted = plan.wanted(now, room=room, waiting=waiting)
        assert wanted >= 0
        assert waiting + wanted >= room or not plan.low(waiting)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Overloaded("full"), True),
        (StoreUnavailable("away"), True),
        (EndpointUnreachable("no answer"), True),
        (EndpointError("not JSON"), False),
        (EndpointError("busy", status=429), True),
        (EndpointError("down", status=503), True),
        (EndpointError("no such model", status=404), False),
        (InvalidRequest("never"), False),
        (EngineClosed("gone"), False),
        (KeyError("bug"), False),
    ],
)
def test_which_failures_pass(error: BaseException, expected: bool) -> None:
    assert passing(error) is expected


@given(st.integers(1, 10_000), st.none() | st.floats(0, 1e6), st.integers(0, 100))
def test_delays_grow_to_a_limit_and_heed_what_was_asked(failures: int, asked: float | None, seed: int) -> None:
    policy = RetryPolicy()
    delay = policy.delay(failures, asked, random.Random(seed))
    assert policy.first_delay / 2 <= delay <= policy.longest_delay
    assert delay >= min(asked or 0.0, policy.longest_delay)
    assert 0.1 <= BACKOFF.pause(failures) <= 5.0


def test_only_failures_while_others_succeed_count_but_not_for_ever() -> None:
    policy = RetryPolicy(max_tries=3, longest=100.0)
    outage = Failures()
    assert all(outage.may_go_on(policy, float(now), successes=7) for now in range(100))
    assert not outage.may_go_on(policy, 100.0, successes=7)
    poison = Failures()
    assert [poison.may_go_on(policy, 0.0, successes=number) for number in range(3)] == [True, True, False]


def test_a_pace_is_unknown_first_and_then_follows_what_is_seen() -> None:
    pace = BatchRate()
    pace.observe(0.0, 500)
    assert pace.rate is None
    pace.observe(0.5, 510)
    assert pace.rate is None
    for second in range(1, 1000):
        pace.observe(float(second), 500 + 10 * second)
    assert pace.rate == pytest.approx(10.0, rel=0.1)
    for second in range(1000, 2000):
        pace.observe(float(second), 10_500 + 40 * (second - 1000))
    assert pace.rate == pytest.approx(40.0, rel=0.01)


def test_neither_a_pause_nor_a_restart_changes_a_pace() -> None:
    pace = BatchRate()
    for second in range(100):
        pace.observe(float(second), 10 * second)
    rate = pace.rate
    pace.observe(100.0, 1000, running=False)
    pace.observe(100_000.0, 1000)
    assert pace.rate == pytest.approx(rate)
    fresh = BatchRate()
    fresh.observe(500.0, 1000)
    fresh.observe(510.0, 1100)
    assert fresh.rate == pytest.approx(10.0)


def test_progress_without_a_forecast_is_that_of_the_record() -> None:
    rates = BatchRates()
    first = rates.progress(replace(BATCH, counts=LineCounts(1000, 90, 10)), 0.0)
    assert (first.fraction, first.lines_per_second, first.eta_seconds) == (0.1, None, None)
    second = rates.progress(replace(BATCH, counts=LineCounts(1000, 190, 10)), 10.0)
    assert second.lines_per_second == pytest.approx(10.0)
    assert second.eta_seconds is None
    paused = rates.progress(replace(BATCH, counts=LineCounts(1000, 190, 10), paused=True), 20.0)
    assert (paused.fraction, paused.eta_seconds) == (0.2, None)
    ended = rates.progress(replace(BATCH, counts=LineCounts(1000, 500, 500), status="cancelled"), 30.0)
    assert (ended.fraction, ended.eta_seconds) == (1.0, 0.0)
    rejected = rates.progress(replace(BATCH, counts=LineCounts(), status="failed"), 30.0)
    assert rejected.fraction == 1.0
    validating = rates.progress(replace(BATCH, counts=LineCounts(), status="validating"), 30.0)
    assert (validating.fraction, validating.eta_seconds) == (0.0, None)


def test_a_worker_in_this_process_tells_the_pace_before_the_record_is_read_twice() -> None:
    rates = BatchRates()
    for second in range(5):
        rates.committed("batch_0", 20, float(second))
    progress = rates.progress(replace(BATCH, counts=LineCounts(1000, 100, 0)), 5.0)
    assert progress.lines_per_second == pytest.approx(20.0)


def test_paces_of_old_batches_are_forgotten() -> None:
    rates = BatchRates()
    for number in range(3000):
        rates.committed(f"batch_{number}", 1, 0.0)
        rates.progress(replace(BATCH, id=f"batch_{number}"), 0.0)
    assert len(rates._seen) == len(rates._committed) == 1000
