"""Claims shared between tenants, and lines that were in progress when a process died, on both databases."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.store.support import World, played, result

from batchwright.policies.suspects import REST
from batchwright.store.records import ClaimedLine


async def done(world: World, worker: str, lines: int) -> None:
    """So many lines are claimed, and succeed."""
    claimed = await world.store.claim(worker, lines)
    assert await world.store.commit(worker, [result(line) for line in claimed]) == [True] * lines


@played
async def test_who_comes_later_gets_every_other_line_from_then_on(world: World) -> None:
    worker = await world.worker()
    early = await world.running(worker, 60, "early", window=100)
    await done(world, worker, 20)
    held = await world.store.claim(worker, 10)
    late = await world.running(worker, 20, "late", window=200)
    claimed = await world.store.claim(worker, 8)
    assert Counter(line.batch_id for line in claimed) == {early.id: 4, late.id: 4}
    # In turns, not one tenant after the other.
    assert Counter(line.batch_id for line in claimed[:4]) == {early.id: 2, late.id: 2}
    await world.store.release(worker, [*held, *claimed])


@played
async def test_nothing_is_saved_up_by_having_nothing_to_compute(world: World) -> None:
    worker = await world.worker()
    rare = await world.running(worker, 1, "rare")
    await done(world, worker, 1)
    steady = await world.running(worker, 100, "steady")
    await done(world, worker, 50)
    rare = await world.running(worker, 30, "rare")
    for _ in range(3):
        claimed = await world.store.claim(worker, 10)
        assert Counter(line.batch_id for line in claimed) == {rare.id: 5, steady.id: 5}
        await world.store.commit(worker, [result(line) for line in claimed])


@played
async def test_shares_go_by_weight_and_over_all_workers(world: World) -> None:
    workers = [await world.worker() for _ in range(3)]
    heavy = await world.running(workers[0], 90, "heavy")
    light = await world.running(workers[0], 90, "light")
    await world.store.set_tenant_weight("heavy", 2.0)
    claimed: list[ClaimedLine] = []
    for number in range(12):
        claimed += await world.store.claim(workers[number % 3], 5)
    assert Counter(line.batch_id for line in claimed) == {heavy.id: 40, light.id: 20}


@played
async def test_tenants_that_join_and_leave_at_once_in_several_processes(world: World) -> None:
    workers = [await world.worker() for _ in range(4)]
    batches = [await world.running(workers[0], 10, f"tenant {number}") for number in range(6)]

    async def work(worker: str) -> int:
        finished = 0
        while claimed := await world.store.claim(worker, 4):
            assert all(await world.store.commit(worker, [result(line) for line in claimed]))
            finished += len(claimed)
        return finished

    assert sum(await asyncio.gather(*map(work, workers))) == 60
    for batch in batches:
        assert (await world.batch(batch)).ending == "completed"


@played
async def test_tenants_take_turns_to_have_a_batch_validated(world: World) -> None:
    store, worker = world.store, await world.worker()
    many = [await world.create("many") for _ in range(4)]
    late = [await world.create("late") for _ in range(2)]
    taken = []
    for _ in range(6):
        world.later(1)
        batch = await store.take_validation(worker)
        assert batch is not None
        assert await store.take_validation(worker) == batch  # it failed, and starts over
        await store.reject(worker, batch.id, [])
        taken.append(batch.id)
    assert taken == [batch.id for batch in (many[0], late[0], many[1], late[1], many[2], many[3])]
    assert await store.take_validation(worker) is None


@played
async def test_tenants_take_turns_to_have_a_batch_finished(world: World) -> None:
    store, worker = world.store, await world.worker()
    batches = [await world.running(worker, 0, tenant) for tenant in ("many", "many", "many", "late")]
    taken = []
    for _ in batches:
        world.later(1)
        batch = await store.take_finishing(worker)
        assert batch is not None
        assert await store.take_finishing(worker) == batch
        assert await store.finish(worker, batch.id, output=None, errors=None, unfinished=0)
        taken.append(batch.id)
    assert taken == [batches[number].id for number in (0, 3, 1, 2)]


async def killed(world: World, worker: str) -> str:
    """Its process died; another one takes its place."""
    await world.store.worker_died(worker, max_crashes=3)
    return await world.worker()


@played
async def test_suspects_are_claimed_in_ever_smaller_companies_and_fail_in_the_end(world: World) -> None:
    store, worker = world.store, await world.worker()
    await world.running(worker, 20)
    assert len(await store.claim(worker, 9)) == 9
    worker = await killed(world, worker)
    company = await store.claim(worker, 9)
    assert [(line.crashes, line.given_up) for line in company] == [(1, False)] * 3
    assert await store.claim(worker, 9) == []
    assert await store.count_lines() == {"pending": 11, "claimed": 3, "suspect": 6}
    # Another suspect takes the place of one that is cleared.
    await store.commit(worker, [result(company[0])])
    [following] = await store.claim(worker, 9)
    assert following.crashes == 1
    worker = await killed(world, worker)
    # The others that were in progress at the first death come first: they have waited for longer.
    while (claimed := await store.claim(worker, 9))[0].crashes == 1:
        assert len(claimed) <= 3
        await store.commit(worker, [result(line) for line in claimed])
    [alone] = claimed
    worker = await killed(world, worker)
    [again, *_] = await store.claim(worker, 9)
    assert (again.number, again.crashes, again.given_up) == (alone.number, 3, True)
    assert await store.commit(worker, [result(again, False)]) == [True]


@played
async def test_after_a_death_among_suspects_their_tenant_comes_last_for_a_while(world: World) -> None:
    store, worker = world.store, await world.worker()
    bad = await world.running(worker, 4, "bad")
    await store.claim(worker, 4)
    worker = await killed(world, worker)
    assert {line.crashes for line in await store.claim(worker, 4)} == {1}
    worker = await killed(world, worker)
    good = await world.running(worker, 6, "good")
    claimed = await store.claim(worker, 3)
    assert {line.batch_id for line in claimed} == {good.id}
    await store.commit(worker, [result(line) for line in claimed])
    world.later(REST)
    assert {line.batch_id for line in await store.claim(worker, 3)} == {bad.id}


@played
async def test_a_worker_that_was_taken_for_dead_clears_its_lines(world: World) -> None:
    store, slow, other = world.store, await world.worker(lease=10), await world.worker(lease=1000)
    await world.running(slow, 9)
    assert len(await store.claim(slow, 9)) == 9
    world.later(11)
    assert await store.reap() == 9
    company = await store.claim(other, 9)
    assert len(company) == 3
    assert await store.count_lines() == {"pending": 0, "claimed": 3, "suspect": 6}
    back = await store.register_worker("back", 1000, former=slow)
    assert await store.count_lines() == {"pending": 6, "claimed": 3, "suspect": 0}
    assert [line.crashes for line in await store.claim(back, 9)] == [0] * 6
    assert await store.commit(other, [result(line) for line in company]) == [True] * 3
