"""Deadlines that are nearer than the wait: beside a model that is free, they are met."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from tests.long_form import examples

from batchwright.batcher import Batcher, PriorityBatcher, SimpleBatcher, TimeBasedBatcher
from batchwright.clock import ManualClock
from batchwright.policies import Backlog, Item, LatencyModel, Urgency, Window, length_aware, simple

from .virtual import Noisy, play

_MS = 1e-3

Make = Callable[[Noisy, ManualClock], Batcher]

BATCHERS: dict[str, Make] = {
    "simple": lambda model, clock: SimpleBatcher(model, 8, 100, clock=clock),
    "window": lambda model, clock: TimeBasedBatcher(model, 100, clock=clock),
    "priority": lambda model, clock: PriorityBatcher(model, clock=clock),
    "auto that waits": lambda model, clock: Batcher(model, max_wait_ms=100, clock=clock),
    "lengths in windows": lambda model, clock: Batcher(
        model, length_aware(None, 16, order=Urgency(), timing=Window(0.1)), clock=clock
    ),
}


async def _late(batcher: Batcher, gaps: list[float], deadline: float) -> int:
    """How many of single requests, `gaps` seconds apart, miss their deadline."""
    late = 0

    async def ask(number: int) -> None:
        nonlocal late
        try:
            await batcher.compute(f"request {number}", deadline=deadline)
        except TimeoutError:
            late += 1

    async with asyncio.TaskGroup() as callers:
        for number, gap in enumerate(gaps):
            callers.create_task(ask(number))
            await asyncio.sleep(gap)
    return late


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.long), 0.2])
@pytest.mark.parametrize("slack", [2.0, 4.0], ids="{}x".format)
@pytest.mark.parametrize("make", BATCHERS.values(), ids=BATCHERS)
def test_a_deadline_shorter_than_the_wait_is_met_beside_a_free_model(make: Make, slack: float, noise: float) -> None:
    """Each request comes to a model that is free: the one before was answered, or missed its deadline, by then."""
    model = Noisy(20 * _MS, 0.0, noise, seed=3)
    gaps = [2.5 * slack * 20 * _MS] * 1000

    async def main(clock: ManualClock) -> int:
        return await _late(make(model, clock), gaps, slack * 20 * _MS)

    assert play(main) <= 10


@pytest.mark.parametrize("seed", range(examples(1, long=3)))
@pytest.mark.parametrize("make", BATCHERS.values(), ids=BATCHERS)
def test_callers_that_come_together_are_in_time(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    model = Noisy(20 * _MS, 0.2 * _MS, 0.2, seed)
    gaps = [gap for _ in range(400) for gap in (0.0, rng.uniform(0, 10) * _MS, 150 * _MS)]

    async def main(clock: ManualClock) -> int:
        return await _late(make(model, clock), gaps, 80 * _MS)

    assert play(main) <= len(gaps) / 100


def test_urgent_requests_with_deadlines_are_in_time_among_patient_ones() -> None:
    """The default batcher sets what can be had: in both, an urgent one may meet a batch that has just begun."""

    def late(make: Make) -> int:
        model = Noisy(20 * _MS, 0.5 * _MS, 0.2, seed=5)
        rng = random.Random(7)

        async def main(clock: ManualClock) -> int:
            batcher = make(model, clock)

            async def background() -> None:
                async with asyncio.TaskGroup() as callers:
                    for _ in range(1200):
                        await asyncio.sleep(rng.expovariate(40))
                        callers.create_task(batcher.compute("background", priority=9))

            patient = asyncio.create_task(background())
            missed = await _late(batcher, [rng.expovariate(10) for _ in range(300)], 80 * _MS)
            await patient
            return missed

        return play(main)

    default = late(lambda model, clock: Batcher(model, clock=clock))
    assert late(lambda model, clock: PriorityBatcher(model, clock=clock)) <= max(3, default)


def test_the_high_prediction_is_rarely_exceeded_and_not_far_above() -> None:
    rng = random.Random(1)
    model = LatencyModel()
    exceeded = 0
    for number in range(2000):
        count = rng.randint(1, 16)
        seconds = (0.02 + 0.001 * count) * max(0.2, rng.gauss(1.0, 0.2))
        high = model.predict_high(count, count)
        exceeded += number > 20 and (high is None or seconds > high)
        model.observe(count, count, seconds)
    assert exceeded <= 20
    high, expected = model.predict_high(8, 8), model.predict(8, 8)
    assert high is not None
    assert expected is not None
    assert 1.2 * expected < high < 2.0 * expected


def test_more_work_than_ever_measured_may_take_in_proportion() -> None:
    model = LatencyModel()
    for _ in range(300):
        model.observe(1, 1, 0.02)
    assert model.predict(8, 8) == pytest.approx(0.02)
    high = model.predict_high(8, 8)
    assert high is not None
    assert high >= 0.16


def test_an_outlier_does_not_widen_the_margin() -> None:
    model = LatencyModel()
    for _ in range(50):
        model.observe(4, 4, 0.02)
    before = model.predict_high(4, 4)
    model.observe(4, 4, 2.0)
    assert model.predict_high(4, 4) == before


def test_the_lateness_of_timers_is_part_of_the_margin() -> None:
    waiting = Backlog(simple(8, 10.0))
    waiting.add([Item(0.0)])
    waiting.observe(1, 1, 1, 0.02)
    before = waiting.predict_high()
    waiting.timer_was_late(0.05)
    after = waiting.predict_high()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(0.049)


def test_whose_caller_leaves_in_the_turn_of_its_dispatch_costs_nobody_else_the_answer() -> None:
    async def model(items: list[str]) -> list[str]:
        await asyncio.sleep(0)
        return items

    async def main(clock: ManualClock) -> str:
        batcher = Batcher(model, length_aware(None, 1), clock=clock)

        async def leads() -> None:
            await batcher.compute("first")
            leaves.cancel()  # before the next batch is chosen, in the same turn

        async with asyncio.TaskGroup() as callers:
            callers.create_task(leads())
            leaves = callers.create_task(batcher.compute("second", deadline=60.0))
            third = callers.create_task(batcher.compute("third", deadline=60.0))
        await batcher.close()
        answer: str = third.result()
        return answer

    assert play(main) == "third"
