"""Replicas in virtual time: everything ends, nothing is faster than its cost model, and the router has its effect."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.engine_config import EngineConfig
from batchwright.scheduling.sizes import EngineSizes
from batchwright.scheduling.slo import StepShape
from batchwright.scheduling.step_costs import StepCosts
from batchwright.simulation.fleet import Fleet, simulate
from batchwright.simulation.outcome import outcome_of, percentile, times_of
from batchwright.simulation.replica import Served
from batchwright.simulation.requests import SimulatedRequest
from batchwright.simulation.traces import drawn_lengths, poisson

COSTS = StepCosts((10e-3, 0.3e-3, 4e-7, 0.2e-3, 2e-6, 0.1e-3, 0.1e-3, 0.1e-3), ratios=(0.9, 1.0, 1.1))
SIZES = EngineSizes(max_batch_tokens=64, max_num_seqs=8, max_model_len=512, num_blocks=60)


def fleet(replicas: int = 1, **options: object) -> Fleet:
    return Fleet(replicas, SIZES, EngineConfig(**options), COSTS, seed=None)  # type: ignore[arg-type]


def ask(prompt: int, output: int, at: float = 0.0, **more: object) -> SimulatedRequest:
    return SimulatedRequest(prompt_tokens=prompt, output_tokens=output, arrived_at=at, **more)  # type: ignore[arg-type]


requests = st.lists(
    st.builds(
        ask,
        st.integers(1, 400) | st.integers(450, 2000),
        st.integers(1, 40),
        st.floats(0.0, 5.0),
        traffic=st.sampled_from(("online", "batch")),
        blocks=st.lists(st.integers(0, 2), max_size=3).map(tuple),
        block_tokens=st.just(64),
    ),
    max_size=25,
)


def shared(request: SimulatedRequest) -> tuple[int, ...]:
    """Blocks of its prompt, which others may have, too; the rest is its own."""
    return request.blocks[: request.prompt_tokens // 64]


def least_computed(served: Served) -> int:
    """Tokens that were computed for a request at least, and exactly if it was never preempted.

    After a preemption it may find what others have computed of their common prefix meanwhile.
    """
    asked = served.request
    found = 64 * len(shared(asked)) if served.preemptions else served.cached_tokens
    return asked.prompt_tokens - found + asked.output_tokens - 1


@settings(max_examples=examples(25, long=60))
@given(requests, requests, st.integers(1, 3), st.booleans())
def test_all_requests_end_once_in_time_that_only_goes_forward(
    online: list[SimulatedRequest], job: list[SimulatedRequest], replicas: int, paced: bool
) -> None:
    goals = {"ttft_ms": 300.0, "tpot_ms": 50.0} if paced else {}
    result = simulate(fleet(replicas, **goals), online, job)
    assert len(result.served) == len(online) + len(job)
    assert len({each.serial for each in result.served}) == len(result.served)
    for each in result.served:
        asked = each.request
        assert each.refused == (asked.prompt_tokens + asked.output_tokens > 512)
        if not each.refused:
            assert asked.arrived_at < each.first_token_at <= each.ended_at <= result.seconds
            assert (
                each.ended_at - asked.arrived_at >= asked.output_tokens * COSTS.seconds(StepShape(0, 0, 1, 1, 1)) * 0.99
            )
    computed = sum(each.computed_tokens for each in result.replicas)
    answered = [each for each in result.served if not each.refused]
    assert computed >= sum(map(least_computed, answered))
    # What is found in a cache was computed for somebody.
    asked_for = [each.request for each in answered]
    own = sum(each.prompt_tokens - 64 * len(shared(each)) + each.output_tokens - 1 for each in asked_for)
    prefixes = {blocks[: at + 1] for blocks in map(shared, asked_for) for at in range(len(blocks))}
    assert computed >= own + 64 * len(prefixes)
    if not any(each.preemptions for each in answered):
        assert computed == sum(map(least_computed, answered))
    assert all(each.busy_seconds <= result.seconds + 1e-9 for each in result.replicas)


def test_one_request_takes_what_the_cost_model_says() -> None:
    [served] = simulate(fleet(), [ask(100, 3, at=2.0)]).served
    first = COSTS.seconds(StepShape(64, 64 * 65 // 2)) + COSTS.seconds(StepShape(36, 36 * 64 + 36 * 37 // 2, 0, 0, 1))
    later = [COSTS.seconds(StepShape(0, 0, 1, keys, 1)) for keys in (101, 102)]
    assert served.ttft == pytest.approx(first)
    assert served.tpot == pytest.approx(sum(later) / 2)
    assert served.ended_at == pytest.approx(2.0 + first + sum(later))


def test_the_same_seed_is_the_same_future() -> None:
    online = poisson(drawn_lengths(100, 60.0, 10.0, 1), 3.0, 2)
    one = Fleet(2, SIZES, EngineConfig(), COSTS, seed=5)
    first, again = (outcome_of(one, simulate(one, online)) for _ in range(2))
    assert first == again
    other = replace(one, seed=6)
    assert outcome_of(other, simulate(other, online)) != first


def test_more_replicas_keep_an_slo_that_one_cannot() -> None:
    online = poisson(drawn_lengths(300, 80.0, 20.0, 1), 12.0, 2)
    shares = []
    for replicas in (1, 2, 4):
        found = outcome_of(fleet(replicas), simulate(fleet(replicas), online), ttft_ms=300, tpot_ms=60)
        assert found.slo_attainment is not None
        shares.append(found.slo_attainment)
    assert shares[0] < 0.5 < 0.95 < shares[2]
    assert shares == sorted(shares)


def test_a_job_beside_an_slo_takes_longer_and_keeps_it() -> None:
    online = poisson(drawn_lengths(200, 40.0, 20.0, 1), 2.0, 2)
    job = drawn_lengths(150, 100.0, 30.0, 3)
    free = outcome_of(fleet(), simulate(fleet(), online, job))
    kept = outcome_of(fleet(tpot_ms=25.0), simulate(fleet(tpot_ms=25.0), online, job))
    assert free.job_seconds is not None
    assert kept.job_seconds is not None
    assert free.tpot_ms is not None
    assert kept.tpot_ms is not None
    assert kept.job_seconds > free.job_seconds
    assert kept.tpot_ms.p99 < free.tpot_ms.p99
    assert free.job_lines == 150


def test_prompts_that_begin_alike_meet_in_a_cache() -> None:
    draw = random.Random(1)
    shared = [ask(200, 5, blocks=(draw.randrange(4),) * 3, block_tokens=64) for _ in range(100)]
    apart = [ask(200, 5) for _ in range(100)]
    for replicas in (1, 3):
        found = outcome_of(fleet(replicas), simulate(fleet(replicas), [], shared))
        assert found.cached_tokens > 0.6 * found.prompt_tokens
        assert outcome_of(fleet(replicas), simulate(fleet(replicas), [], apart)).cached_tokens == 0


@pytest.mark.parametrize("planned", [False, True])
def test_what_is_refused_keeps_nothing_else_waiting(planned: bool) -> None:
    job = [ask(2000, 5)] * 2 + [ask(10, 5)] * 50
    for replicas in (1, 2, 3):
        served = simulate(fleet(replicas), [], job, planned=planned).served
        assert sorted(each.refused for each in served) == [False] * 50 + [True] * 2
    assert len(simulate(fleet(2), [], [ask(2000, 5)] * 200, planned=planned).served) == 200


def test_a_job_of_refused_lines_is_not_done_at_any_time() -> None:
    refused = outcome_of(fleet(), simulate(fleet(), [ask(10, 5)], [ask(1000, 5)]))
    assert (refused.job_lines, refused.refused, refused.job_seconds) == (1, 1, None)
    both = simulate(fleet(), [], [ask(1000, 5), ask(10, 5)])
    assert outcome_of(fleet(), both).job_seconds == both.seconds > 0.0


def test_an_engine_with_nothing_but_a_planned_job_keeps_no_answers() -> None:
    # Six long answers come between two prompts that begin alike: more than the cache holds.
    job = [
        ask(20, 250) if number % 7 else ask(200, 5, blocks=(1, 2, 3), block_tokens=64, max_tokens=250)
        for number in range(70)
    ]

    def cached(replicas: int = 1, *online: SimulatedRequest, planned: bool = True) -> int:
        narrow = replace(fleet(replicas), sizes=replace(SIZES, max_num_seqs=1))
        return sum(each.cached_tokens for each in simulate(narrow, online, job, planned=planned).served)

    assert cached() == 9 * 192
    # Online requests may go on with what was answered, replicas are told of no plan, and an unplanned run keeps all.
    assert cached(1, ask(1, 1, at=1e6)) == 0
    assert cached(2) < 5 * 192
    assert cached(planned=False) == 0


def test_figures_of_nothing_and_of_money() -> None:
    empty = outcome_of(fleet(), simulate(fleet(), []))
    assert (empty.slo_attainment, empty.ttft_ms, empty.job_seconds, empty.seconds) == (None, None, None, 0.0)
    told = outcome_of(fleet(2), simulate(fleet(2), [ask(10, 5), ask(1000, 5)]), price_per_hour=3.6)
    assert told.refused == 1
    assert told.slo_attainment == 0.5
    assert told.cost_per_hour == 7.2
    assert told.cost == pytest.approx(told.seconds * 0.002)
    assert told.cost_per_million_tokens == pytest.approx(told.seconds * 0.002 / 5 * 1e6)
    with pytest.raises(ValueError, match="replicas=0"):
        simulate(fleet(0), [])


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_percentiles_lie_between_values(values: list[float], share: float) -> None:
    ordered = sorted(values)
    assert ordered[0] <= percentile(ordered, share) <= ordered[-1] * (1 + 1e-12)
    times = times_of(values)
    assert times is not None
    assert times.p50 <= times.p90 <= times.p99
