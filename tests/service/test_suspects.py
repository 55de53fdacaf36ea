"""Lines that end their process: tried three times, alone the last time. The real store, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples
from tests.service.support import House, Model, codes, in_house, run, texts
from tests.stores import in_memory

from batchwright.inference.inference import Call
from batchwright.service.worker.worker import Worker
from batchwright.store.records import BatchRecord, ClaimedLine, LineCounts

LEASE = 5.0
"""Seconds: workers in one process cannot see each other's end sooner."""


class Killer(Model):
    """A model whose process dies of some prompts, half a second after it has begun with them."""

    def __init__(self, poison: Sequence[str], *, slots: int = 16, seconds: float = 1.0) -> None:
        super().__init__(slots, seconds)
        self.poison = {*poison}
        self.deadly = asyncio.Event()
        self.beside: list[int] = []
        """How many lines were in progress at each death."""

    async def answer(self, call: Call) -> dict[str, Any]:
        if call.body["prompt"] in self.poison:
            self.held += 1
            self.calls[call.body["prompt"]] += 1
            await asyncio.sleep(0.5)
            self.beside.append(self.held)
            self.deadly.set()
            await asyncio.Event().wait()
        return await super().answer(call)


async def work(house: House, models: Sequence[Killer], batches: Sequence[BatchRecord], **options: Any) -> list[Worker]:
    """Each model in a process that is started again whenever it dies, until all batches have ended."""

    async def lives(model: Killer) -> None:
        while True:
            worker = house.worker(model, lease=LEASE, **options)
            await worker.start()
            try:
                await model.deadly.wait()
            finally:
                await house.die(worker)
                model.deadly.clear()
                model.held = 0

    processes = [asyncio.create_task(lives(model)) for model in models]
    try:
        for batch in batches:
            assert (await house.ended(batch)).status == "completed"
    finally:
        stats = [*house.workers]
        for process in processes:
            process.cancel()
        await asyncio.gather(*processes, return_exceptions=True)
    return stats


def prompts(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(count)]


@pytest.mark.parametrize("max_crashes", [2, 3, 5])
@in_house
async def test_a_line_that_kills_fails_in_the_end_and_the_others_succeed(house: House, max_crashes: int) -> None:
    model = Killer(["line-40"])
    batch = await house.submit(prompts("line", 100))
    [worker] = await work(house, [model], [batch], max_crashes=max_crashes)
    batch = await house.batch(batch)
    assert batch.counts == LineCounts(100, 99, 1)
    assert model.calls["line-40"] == max_crashes
    assert model.beside[-1] == 1
    assert model.beside == sorted(model.beside, reverse=True)
    [error] = await house.content(batch.error_file_id)
    assert error["error"]["code"] == "crashed"
    assert f"died {max_crashes} times" in error["error"]["message"]
    assert worker.stats.crashed == 1
    assert await house.store.count_lines() == {"pending": 0, "claimed": 0, "suspect": 0}


@in_house
async def test_a_batch_of_one_line_that_kills(house: House) -> None:
    model = Killer(["x"])
    batch = await house.submit(["x"])
    await work(house, [model], [batch])
    assert model.calls["x"] == 3
    # A retry tries it again as often.
    again = await house.jobs.retry("default", batch.id)
    await work(house, [model], [again])
    assert model.calls["x"] == 6


@in_house
async def test_lines_of_another_tenant_are_not_held_up_by_those_that_kill(house: House) -> None:
    poison = prompts("bad", 12)
    model = Killer(poison)
    bad = await house.submit(poison, tenant="bad")
    good = await house.submit(prompts("good", 200), tenant="good")
    before = house.clock.now()
    task = asyncio.create_task(work(house, [model], [bad, good]))
    ended = await house.ended(good)
    assert ended.counts == LineCounts(200, 200, 0)
    # 200 lines take 13 seconds with 16 slots; what the others' deaths cost is a lease each.
    assert house.clock.now() - before <= 60.0
    await task
    assert (await house.batch(bad)).counts == LineCounts(12, 0, 12)
    # The first death may come in any company, the later ones only among lines of the same tenant.
    assert max(model.calls[each] for each in prompts("good", 200)) <= 2
    assert {model.calls[each] for each in poison} == {3}


@in_house
async def test_a_worker_that_was_only_slow_leaves_no_suspects_behind(house: House) -> None:
    slow, other = Model(slots=4, seconds=5.0), Model(slots=0)
    stopped = house.worker(slow, lease=10.0)
    await stopped.start()
    batch = await house.submit("abcdefgh")
    await house.until(lambda: slow.held == 4)
    house.clock.advance(60.0)
    async with house.worker(other):
        await house.until(lambda: stopped.stats.leases_lost == 1)
        await house.until(lambda: slow.held == 4)
        lines = await house.store.count_lines()
        assert lines["suspect"] == 0
        assert (await house.ended(batch)).counts == LineCounts(8, 8, 0)
    await stopped.stop()


@in_house
async def test_a_busy_worker_makes_room_for_suspects_when_nobody_else_sees_to_them(house: House) -> None:
    killed, busy = Killer(["bad-0"], slots=4), Model(slots=4)
    bad = await house.submit(["bad-0", "bad-1", "bad-2"], tenant="bad")
    doomed = house.worker(killed, lease=LEASE)
    await doomed.start()
    await killed.deadly.wait()
    good = await house.submit(prompts("good", 400), tenant="good")
    await house.worker(busy, lease=LEASE).start()
    await house.until(lambda: busy.held == 4)
    await house.die(doomed)
    # It computes the suspects, which do not kill here, before its own work is done.
    assert (await house.ended(bad)).counts == LineCounts(3, 3, 0)
    assert (await house.batch(good)).status == "in_progress"
    assert (await house.ended(good)).counts == LineCounts(400, 400, 0)
    for worker in [*house.workers]:
        await worker.stop()


@in_house
async def test_a_worker_that_ends_when_idle_sees_to_suspects_first(house: House) -> None:
    model = Killer(["x-3"], slots=8)
    doomed = house.worker(model, lease=LEASE)
    await doomed.start()
    batch = await house.submit(prompts("x", 8))
    await model.deadly.wait()
    await house.die(doomed)
    async with house.worker(Model(slots=8)) as worker:
        await worker.until_idle()
        assert (await house.batch(batch)).counts == LineCounts(8, 8, 0)


@in_house
async def test_a_claim_begun_before_suspects_were_known_does_not_show_that_nothing_is_left(house: House) -> None:
    claim = house.store.claim

    async def slowly(worker: str, limit: int) -> list[ClaimedLine]:
        lines: list[ClaimedLine] = await claim(worker, limit)
        await asyncio.sleep(3.0)
        return lines

    model = Killer(["x-3"], slots=8)
    doomed = house.worker(model, lease=LEASE)
    await doomed.start()
    batch = await house.submit(prompts("x", 8))
    await model.deadly.wait()
    await house.die(doomed)
    house.store.claim = slowly
    async with house.worker(Model(slots=8)) as worker:
        await worker.until_idle()
        assert (await house.batch(batch)).counts == LineCounts(8, 8, 0)


@settings(max_examples=examples(6, long=12))
@given(
    st.integers(0, 2**32), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 2), st.integers(1, 12)
)
def test_exactly_the_lines_that_kill_end_as_crashed(seed: int, sizes: list[int], processes: int, slots: int) -> None:
    draw = random.Random(seed)
    inputs = [prompts(f"{tenant}", size) for tenant, size in enumerate(sizes)]
    poison = [prompt for each in inputs for prompt in each if draw.random() < 0.06]

    async def main(house: House) -> None:
        models = [Killer(poison, slots=slots, seconds=draw.uniform(0.1, 2.0)) for _ in range(processes)]
        batches = [await house.submit(each, tenant=str(tenant)) for tenant, each in enumerate(inputs)]
        await work(house, models, batches)
        for tenant, (batch, each) in enumerate(zip(batches, inputs, strict=True)):
            ended = await house.batch(batch)
            good = [prompt for prompt in each if prompt not in poison]
            output = await house.content(ended.output_file_id, tenant=str(tenant)) if good else []
            errors = await house.content(ended.error_file_id, tenant=str(tenant)) if len(good) < len(each) else []
            assert {*texts(output)} == {f"id-{prompt}" for prompt in good}
            assert codes(errors) == {f"id-{prompt}": "crashed" for prompt in each if prompt in poison}
            assert ended.counts == LineCounts(len(each), len(good), len(each) - len(good))
        calls = sum((model.calls for model in models), start=models[0].calls.__class__())
        assert all(calls[prompt] <= 3 for prompt in poison)

    with in_memory() as folder:
        run(folder, main)
