"""The time of a job from a sample of its lines: close to that of all of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from batchwright.engine_config import EngineConfig
from batchwright.scheduling.sizes import EngineSizes
from batchwright.scheduling.step_costs import StepCosts
from batchwright.simulation.fleet import Fleet, simulate
from batchwright.simulation.job_time import job_time, lines_to_step
from batchwright.simulation.requests import SimulatedRequest

COSTS = StepCosts((10e-3, 0.3e-3, 4e-7, 0.2e-3, 2e-6, 0.1e-3, 0.1e-3, 0.1e-3))


def fleet(places: int = 8, blocks: int = 400) -> Fleet:
    return Fleet(1, EngineSizes(256, places, 1024, blocks), EngineConfig(), COSTS, seed=None)


def lines(count: int, prefixes: int, *, answers: float = 20.0) -> list[SimulatedRequest]:
    """Lines with one of some prefixes of 128 tokens, one after the other."""
    draw = random.Random(4)
    return [
        SimulatedRequest(
            prompt_tokens=130 + draw.randrange(40),
            output_tokens=min(100, 1 + int(draw.expovariate(1.0 / answers))),
            max_tokens=100,
            blocks=tuple(range(100 * (number % prefixes), 100 * (number % prefixes) + 8)),
            block_tokens=16,
        )
        for number in range(count)
    ]


def computed(job: list[SimulatedRequest], prefixes: int) -> int:
    """Tokens of prompts that are computed if each prefix of 128 tokens is computed once."""
    return sum(each.prompt_tokens for each in job) - 128 * (len(job) - prefixes)


def test_a_small_job_is_simulated_whole() -> None:
    job = lines(60, 4)
    assert job_time(fleet(), job, 60, 1e9).seconds == simulate(fleet(), [], job, planned=True).seconds
    assert job_time(fleet(), job, 60, 1e9, planned=False).seconds == simulate(fleet(), [], job).seconds


@pytest.mark.parametrize("sampled", [3, 8, 31])
def test_a_sample_that_does_not_fill_the_engine_tells_no_pace(sampled: int) -> None:
    job = lines(1200, 1200)
    whole = simulate(fleet(), [], job, planned=True).seconds
    assert job_time(fleet(), job[:sampled], 1200, computed(job, 1200)).seconds == pytest.approx(whole, rel=0.3)


@pytest.mark.parametrize("prefixes", [1, 16, 1200])
def test_a_sample_tells_the_time_of_all_lines(prefixes: int) -> None:
    job = lines(1200, prefixes)
    whole, prompts = simulate(fleet(), [], job, planned=True).seconds, computed(job, prefixes)
    assert job_time(fleet(), job[:300], 1200, prompts).seconds == pytest.approx(whole, rel=0.06)
    stepped = lines_to_step(fleet(), job, 1200, 5000)
    assert 200 < stepped < 300
    assert job_time(fleet(), job, 1200, prompts, stepped=stepped).seconds == pytest.approx(whole, rel=0.06)


def test_prefixes_that_a_sample_hardly_has_are_counted_once_all_the_same() -> None:
    # 400 prefixes of 3 lines each, of which a sample of every third line has one line each.
    job = sorted(lines(1200, 400), key=lambda each: each.blocks)
    whole = simulate(fleet(), [], job, planned=True).seconds
    assert job_time(fleet(), job[::3], 1200, computed(job, 400)).seconds == pytest.approx(whole, rel=0.12)


def test_the_work_alone_tells_the_time_of_answers_too_long_to_be_simulated() -> None:
    job = [SimulatedRequest(prompt_tokens=20, output_tokens=800, max_tokens=900) for _ in range(64)]
    whole = simulate(fleet(), [], job).seconds
    assert (lines_to_step(fleet(), job, 64), lines_to_step(fleet(), job, 64, 1000)) == (64, 0)
    assert job_time(fleet(), job, 64, 64 * 20, stepped=0).seconds == pytest.approx(whole, rel=0.1)
    assert job_time(fleet(), job[:1], 1, 20, stepped=0).seconds == pytest.approx(
        simulate(fleet(), [], job[:1]).seconds, rel=0.1
    )


def test_a_shared_prefix_is_held_in_the_cache_once() -> None:
    alone = lines(8, 8)
    together = [replace(each, blocks=alone[0].blocks) for each in alone]
    apart, shared = (job_time(fleet(), job, 8, 1e9).kv_tokens for job in (alone, together))
    assert apart is not None
    assert shared is not None
    assert 7 * 128 < apart <= sum(each.prompt_tokens + each.output_tokens + 16 for each in alone)
    assert 2 * shared < apart
    assert job_time(fleet(), alone, 8, 1e9, stepped=0).kv_tokens is None


def test_lines_in_order_take_less_time_than_as_they_come() -> None:
    # The cache holds two prefixes at most.
    job, small = lines(200, 20, answers=2.0), fleet(blocks=30)
    planned, arrived = (simulate(small, [], job, planned=each) for each in (True, False))
    assert planned.seconds < 0.8 * arrived.seconds
    assert len(planned.served) == len({each.serial for each in planned.served}) == 200


def test_a_job_has_lines_and_a_sample_is_no_more_than_it() -> None:
    for job, total in ([], 0), (lines(3, 1), 2):
        with pytest.raises(ValueError, match="must be at least one"):
            job_time(fleet(), job, total, 100)
