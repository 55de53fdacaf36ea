"""Whatever an endpoint states and refuses, a pacer goes on, keeps its numbers, and names waits that come true."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.pacing.attempt import Attempt
from batchwright.pacing.expected_use import ExpectedUse
from batchwright.pacing.limits import ConfiguredLimit, Use
from batchwright.pacing.pacer import Pacer
from batchwright.pacing.retry_budget import RetryBudget
from batchwright.wire.rate_limits import RateKind, StatedLimit

KINDS: list[RateKind] = ["requests", "tokens", "input_tokens", "output_tokens"]
LONGEST = 2 * 3600.0
"""Seconds within which a request goes: what is stated below speaks of windows of an hour at most."""

counts = st.one_of(st.integers(0, 50), st.integers(0, 10**15))
stated_limits = st.builds(
    StatedLimit,
    st.sampled_from(KINDS),
    counts.map(lambda count: max(1, count)),
    st.one_of(st.none(), counts),
    st.one_of(st.none(), st.sampled_from([0.0, 0.001, 1.0, 60.0]), st.floats(0.0, 1e5)),
    st.sampled_from([None, None, 1.0, 60.0]),
)
Event = Literal["send", "answer", "refuse", "overload", "fail", "guide"]
events = st.tuples(
    st.sampled_from(["send", "send", "send", "answer", "answer", "refuse", "overload", "fail", "guide"]),
    st.sampled_from([0.0, 0.001, 0.3, 10.0, 100.0]),
    st.lists(stated_limits, max_size=3),
    st.one_of(st.none(), st.floats(0.0, 100.0)),
    st.tuples(st.integers(0, 5000), st.integers(0, 5000)),
)


@settings(max_examples=examples(100, long=300))
@given(
    st.integers(1, 50),
    st.lists(st.sampled_from([ConfiguredLimit("requests", 30.0), ConfiguredLimit("tokens", 1e4)]), max_size=2),
    st.lists(events, max_size=60),
)
def test_any_history_leaves_sound_numbers(
    most: int,
    told: list[ConfiguredLimit],
    history: list[tuple[Event, float, list[StatedLimit], float | None, tuple[int, int]]],
) -> None:
    pacer, now, under_way = Pacer(most, told), 0.0, list[Attempt]()
    refused = sent = 0
    for event, pause, stated, after, (first, second) in history:
        now += pause
        use = Use(float(first), float(second))
        wait = pacer.wait(use, now)
        assert wait >= 0.0
        assert math.isfinite(wait) or len(under_way) >= pacer.concurrency
        if event == "send":
            if wait <= 1e-4:
                under_way.append(pacer.begin(use, now))
                sent += 1
        elif event == "guide":
            pacer.guide(first, second, now)
        elif under_way:
            attempt = under_way.pop(first % len(under_way))
            match event:
                case "answer":
                    pacer.succeeded(attempt, now, input_tokens=first, output_tokens=second, stated=stated)
                case "refuse":
                    pacer.refused(attempt, now, retry_after=after, stated=stated)
                    refused += 1
                case "overload":
                    pacer.overloaded(attempt, now, after)
                case "fail":
                    pacer.failed(attempt)
        figures = pacer.figures(now)
        assert (figures.sent, figures.refused, figures.under_way) == (sent, refused, len(under_way))
        assert 1 <= figures.concurrency <= most
        assert all(math.isfinite(each.left) for each in figures.limits)


small = st.builds(
    StatedLimit,
    st.sampled_from(KINDS),
    st.integers(100, 5000),
    st.one_of(st.none(), st.integers(0, 5000)),
    st.one_of(st.none(), st.floats(0.0, 60.0)),
    st.sampled_from([None, 1.0, 60.0]),
)


@settings(max_examples=examples(70, long=200))
@given(st.lists(st.tuples(st.lists(small, max_size=3), st.booleans()), min_size=1, max_size=30))
def test_a_request_always_goes_in_the_end(answers: Sequence[tuple[list[StatedLimit], bool]]) -> None:
    """One after the other, each after the answer or refusal of the one before."""
    pacer, now = Pacer(64), 0.0
    for stated, is_refused in answers:
        use, began = Use(50.0, 50.0), now
        for _ in range(100):
            wait = pacer.wait(use, now)
            if wait <= 1e-4:
                break
            now += wait
            assert now - began <= LONGEST
        else:
            pytest.fail("waits that are named are never enough")
        attempt = pacer.begin(use, now)
        now += 0.5
        if is_refused:
            pacer.refused(attempt, now, stated=stated)
        else:
            pacer.succeeded(attempt, now, input_tokens=50, output_tokens=50, stated=stated)


def test_urgent_requests_need_not_come_in_turn_but_keep_limits() -> None:
    pacer = Pacer(1000, first=1000)
    use = Use(1.0, 1.0)
    for _ in range(500):
        pacer.begin(use, 0.0)
    assert pacer.wait(use, 0.0) > 0.0
    assert pacer.wait(use, 0.0, is_urgent=True) == 0.0
    told = Pacer(1000, [ConfiguredLimit("requests", 60.0)], first=1000)
    told.begin(use, 0.0)
    assert told.wait(use, 0.0, is_urgent=True) > 0.5


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=100))
def test_what_is_expected_is_within_what_was_seen(answers: list[tuple[float, int, int]]) -> None:
    expected = ExpectedUse()
    for estimate, first, second in answers:
        use = expected.of(estimate, None)
        expected.learn(use, first, second)
        assert math.isfinite(use.input_tokens)
        assert use.input_tokens >= 0.0
    outputs = [second for _, _, second in answers]
    if outputs:
        assert min(outputs) * (1 - 1e-9) <= expected.of(1.0, None).output_tokens <= max(outputs) * (1 + 1e-9)
    assert expected.of(1.0, 5).output_tokens <= 5.0


def test_expected_use_converges() -> None:
    expected = ExpectedUse()
    for _ in range(300):
        expected.learn(expected.of(100.0, None), 130, 40)
    use = expected.of(200.0, 1000)
    assert use.input_tokens == pytest.approx(260.0, rel=0.01)
    assert use.output_tokens == pytest.approx(40.0)


def test_answers_to_requests_of_one_time_teach_the_same_ratio() -> None:
    """What the others have taught meanwhile does not change what an answer says."""
    expected = ExpectedUse()
    together = [expected.of(100.0, None) for _ in range(100)]
    for use in together:
        expected.learn(use, 200, 40)
    assert expected.of(100.0, None).input_tokens == pytest.approx(200.0)


def test_the_delivered_rate_decides_once_the_engine_has_stopped_reporting_its_queue() -> None:
    pacer, now = Pacer(64, first=16), 0.0
    pacer.guide(8.0, 40.0, now)
    low = pacer.concurrency
    for _ in range(400):
        attempts = list[Attempt]()
        while len(attempts) < pacer.concurrency:
            attempts.append(pacer.begin(Use(10.0, 100.0), now))
        now += 1.0
        for attempt in attempts:
            pacer.succeeded(attempt, now, input_tokens=10, output_tokens=100)
    assert low == 1 < 4 < pacer.concurrency


def test_usage_rises_from_what_was_accepted_and_not_from_what_the_endpoint_was_too_busy_for() -> None:
    def gap(overloads: int) -> float:
        """Return the seconds between two requests after a refusal that says that usage rose too fast."""
        pacer, use = Pacer(1000, first=1000), Use(1.0, 1.0)
        for number in range(10 + overloads):
            attempt = pacer.begin(use, 0.0)
            if number < 10:
                pacer.succeeded(attempt, 0.1, input_tokens=1, output_tokens=1)
            else:
                pacer.overloaded(attempt, 0.1)
        pacer.refused(pacer.begin(use, 0.2), 0.3, cause="rise")
        now = 0.3 + pacer.wait(use, 0.3)
        pacer.begin(use, now)
        return pacer.wait(use, now)

    assert gap(40) == gap(0) == pytest.approx(0.35)


def test_a_limit_stated_without_what_remains_leaves_the_configured_one_in_force() -> None:
    pacer, use = Pacer(1000, [ConfiguredLimit("tokens", 6000.0)], first=1000), Use(100.0, 0.0)
    sent = 0
    for tick in range(600):
        now = tick * 0.1
        while pacer.wait(use, now, is_urgent=True) <= 0.0:
            attempt = pacer.begin(use, now)
            sent += 100
            stated = [StatedLimit("tokens", 6000, None, None, 60.0)]
            pacer.succeeded(attempt, now, input_tokens=100, output_tokens=0, stated=stated)
    assert sent <= 6000


@given(st.lists(st.booleans(), max_size=600))
def test_retries_are_at_most_the_budget_and_two_for_each_success(outcomes: list[bool]) -> None:
    budget = RetryBudget()
    spent = successes = 0
    for is_success in outcomes:
        if is_success:
            budget.succeeded()
            successes += 1
        elif budget.spend():
            spent += 1
        else:
            assert spent >= 200
        assert spent <= 200 + 2 * successes


def test_the_share_of_calls_that_are_not_answered_is_known() -> None:
    budget = RetryBudget()
    assert budget.failing == 1.0, "nothing was answered yet"
    for _ in range(100):
        budget.succeeded()
    assert budget.failing < 0.01
    for _ in range(200):
        budget.succeeded()
        budget.succeeded()
        budget.spend()
    assert budget.failing == pytest.approx(1 / 3, abs=0.05)
    for _ in range(100):
        budget.spend()
    assert budget.failing > 0.99


def test_limits_of_a_minute_and_of_a_day_are_kept_side_by_side() -> None:
    pacer = Pacer(8)
    attempt = pacer.begin(Use(10.0, 10.0), 0.0)
    minute, day = StatedLimit("requests", 60, 59, 1.0, 60.0), StatedLimit("requests", 1000, 0, 8e4, 86_400.0)
    pacer.succeeded(attempt, 1.0, input_tokens=10, output_tokens=10, stated=[minute, day])
    assert [(each.limit, each.window) for each in pacer.figures(1.0).limits] == [(60.0, 60.0), (1000.0, 86_400.0)]
    assert pacer.wait(Use(10.0, 10.0), 1.0) > 60.0, "the day's is used up"
