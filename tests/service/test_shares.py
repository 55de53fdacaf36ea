"""Tenants share what is computed: with the real store and worker, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from tests.service.support import House, Model, in_house

from batchwright.errors import InvalidRequest
from batchwright.service.worker.claimed_lines import ClaimPlan
from batchwright.store.records import BatchRecord


def prompts(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(count)]


class Begun:
    """Which tenant's lines a model began, in order."""

    def __init__(self, *models: Model) -> None:
        self._models = models
        self._before = self._counts()

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for model in self._models:
            for prompt, calls in model.calls.items():
                counts[prompt.partition("-")[0]] += calls
        return counts

    def since(self) -> Counter[str]:
        return self._counts() - self._before


async def done(house: House, batch: BatchRecord) -> float:
    """Seconds until it has ended."""
    before = house.clock.now()
    assert (await house.ended(batch)).status == "completed"
    return house.clock.now() - before


@pytest.mark.parametrize("workers", [1, 2])
@in_house
async def test_a_small_batch_beside_a_huge_one_of_another_tenant(house: House, workers: int) -> None:
    """The attack: by the time that 15 lines of one were done, 618 of the other had been, though theirs expire later."""
    models = [Model(slots=8 // workers, seconds=1.0) for _ in range(workers)]
    for model in models:
        await house.worker(model).start()
    huge = await house.submit(prompts("huge", 2000), tenant="a", completion_window="1h")
    await house.until(lambda: sum(model.calls.total() for model in models) >= 100)
    small = await house.submit(prompts("small", 15), tenant="b")
    await house.reaches(small, "in_progress")
    begun = Begun(*models)
    seconds = await done(house, small)
    beside = begun.since()["huge"]
    # Half of eight slots are four: 15 lines take four turns of a second; the rest is what was claimed ahead.
    assert seconds <= 8.0
    assert beside <= 3 * 15
    assert (await house.batch(huge)).status == "in_progress"
    for worker in [*house.workers]:
        await worker.stop(grace=0.0)


@in_house
async def test_of_ten_thousand_running_lines_and_fifteen_each_tenant_begins_half(house: House) -> None:
    """The model is fast, so that thousands of lines wait in memory when the other tenant comes."""
    model = Model(slots=64, seconds=0.05)
    worker = house.worker(model)
    await worker.start()
    await house.submit(prompts("huge", 10_000), tenant="a")
    await house.until(lambda: model.calls.total() >= 4000)
    small = await house.submit(prompts("small", 15), tenant="b")
    await house.reaches(small, "in_progress")
    before = house.clock.now()
    await house.until(lambda: model.calls["small-0"] > 0)
    # A second's work waits at most.
    assert house.clock.now() - before <= 2.0
    begun = Begun(model)
    await house.until(lambda: all(model.calls[each] for each in prompts("small", 15)))
    assert begun.since()["huge"] <= 400
    await worker.stop(grace=0.0)


@in_house
async def test_lines_that_wait_are_given_back_when_the_model_becomes_slow(house: House) -> None:
    model = Model(slots=16, seconds=0.02)
    async with house.worker(model) as worker:
        huge = await house.submit(prompts("huge", 4000), tenant="a")
        await house.until(lambda: model.calls.total() >= 2000)
        model.seconds = 60.0
        small = await house.submit(prompts("small", 8), tenant="b")
        await house.reaches(small, "in_progress")
        # Hundreds of lines waited ahead of it, 16 a minute.
        assert await done(house, small) <= 240.0
        model.seconds = 0.02
        assert (await house.ended(huge)).counts.completed == 4000
    assert set(model.calls.values()) == {1}
    assert worker.stats.succeeded == 4008


@in_house
async def test_a_share_is_of_tokens_and_of_weight(house: House) -> None:
    """Lines of one tenant take ten times as long as those of the others, one of whom has twice their weight."""
    model = Model(slots=12)
    model.delays = dict.fromkeys(prompts("long", 150), 10.0)
    model.tokens = dict.fromkeys(prompts("long", 150), 1000)
    model.default_tokens = 100
    await house.store.set_tenant_weight("double", 2.0)
    assert await house.store.tenant_weights() == {"double": 2.0}
    for name, count in (("long", 150), ("short", 1500), ("double", 2500)):
        batch = await house.submit(prompts(name, count), tenant=name)
    worker = house.worker(model)
    await worker.start()
    await house.reaches(batch, "in_progress")
    await asyncio.sleep(30.0)
    begun = Begun(model)
    await asyncio.sleep(200.0)
    lines = begun.since()
    assert lines["double"] / lines["short"] == pytest.approx(2.0, rel=0.15)
    assert lines["short"] / lines["long"] == pytest.approx(10.0, rel=0.15)
    assert lines["short"] + lines["double"] + 10 * lines["long"] == pytest.approx(12 * 200, rel=0.05)
    await worker.stop(grace=0.0)


@in_house
async def test_what_a_tenant_does_not_use_the_others_get(house: House) -> None:
    model = Model(slots=10)
    async with house.worker(model):
        batches = [
            await house.submit(prompts("a", 100), tenant="a"),
            await house.submit(prompts("b", 5), tenant="b"),
            await house.submit(prompts("c", 1), tenant="c"),
        ]
        before = house.clock.now()
        for batch in batches:
            await house.ended(batch)
    assert house.clock.now() - before <= 106 / 10 + 4.0
    assert model.peak == 10


@in_house
async def test_a_weight_must_be_a_number_above_zero(house: House) -> None:
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="weight"):
            await house.store.set_tenant_weight("t", weight)


def test_a_plan_gives_back_what_would_wait_for_long_but_not_at_once() -> None:
    plan, now = ClaimPlan(0.0), 0.0
    for _ in range(100):
        now += 0.05
        for _ in range(50):
            plan.ended()
        plan.wanted(now, room=0, waiting=900)
        assert plan.excess(now, waiting=900) == 0
    given: list[int] = []
    for _ in range(400):
        now += 0.05
        plan.wanted(now, room=0, waiting=900 - sum(given))
        given += [count] if (count := plan.excess(now, waiting=900 - sum(given))) else []
    assert given
    assert 900 - sum(given) < 40
