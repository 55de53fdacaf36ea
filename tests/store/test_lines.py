"""Claims, leases and results, on both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.store.support import World, numbers, played, result

from batchwright.errors import LeaseLost
from batchwright.store import Store
from batchwright.store.operations.batches import PAGE_BYTES
from batchwright.store.records import BatchRecord, LineCounts, TokenUsage


@played
async def test_lines_of_the_batch_that_expires_first_are_claimed_first(world: World) -> None:
    store, worker = world.store, await world.worker()
    late = await world.running(worker, 3, window=200)
    soon = await world.running(worker, 2, window=100)
    assert await store.claim(worker, 0) == []
    claimed = await store.claim(worker, 4)
    assert [(line.batch_id, line.number) for line in claimed] == [
        (soon.id, 1),
        (soon.id, 2),
        (late.id, 1),
        (late.id, 2),
    ]
    assert [line.attempt for line in claimed] == [1] * 4
    assert await store.count_lines() == {"pending": 1, "claimed": 4, "suspect": 0}
    assert numbers(await store.claim(worker, 4)) == [3]
    assert await store.claim(worker, 4) == []


@played
async def test_lines_of_a_batch_are_claimed_by_position(world: World) -> None:
    store, worker, other = world.store, await world.worker(), await world.worker()
    positions = {1: 7, 2: 0, 3: 4, 4: 0, 5: 7}
    await world.running(worker, 5, position=positions.__getitem__)
    claimed = await store.claim(worker, 3)
    assert numbers(claimed) == [2, 4, 3]
    assert [line.custom_id for line in claimed] == ["c2", "c4", "c3"]
    await store.release(worker, claimed[1:])
    assert numbers(await store.claim(other, 9)) == [4, 3, 1, 5]


@played
async def test_many_small_batches(world: World) -> None:
    worker = await world.worker()
    for _ in range(7):
        await world.running(worker, 1)
    assert [len(await world.store.claim(worker, 3)) for _ in range(4)] == [3, 3, 1, 0]


@played
async def test_released_lines_are_claimed_again_with_a_new_attempt(world: World) -> None:
    store, worker, other = world.store, await world.worker(), await world.worker()
    await world.running(worker, 3)
    claimed = await store.claim(worker, 3)
    await store.release(other, claimed)
    await store.release(worker, [])
    assert await store.claim(other, 3) == []
    await store.release(worker, [claimed[0], claimed[2]])
    again = await store.claim(other, 3)
    assert [(line.number, line.attempt) for line in again] == [(1, 2), (3, 2)]
    await store.release(worker, claimed)
    assert numbers(await store.claim(other, 3)) == [2]
    assert await store.commit(worker, [result(line) for line in claimed]) == [False] * 3
    assert await store.commit(other, [result(line) for line in again]) == [True] * 2


@played
async def test_counts_usage_and_the_end(world: World) -> None:
    store, worker = world.store, await world.worker()
    batch = await world.running(worker, 3)
    first, second, third = await store.claim(worker, 3)
    assert await store.commit(worker, [result(second), result(third, False)]) == [True, True]
    now = await world.batch(batch)
    assert (now.counts, now.usage) == (LineCounts(3, 1, 1), TokenUsage(6, 2, 4, 2))
    assert (now.status, now.ending) == ("in_progress", None)
    world.later(1)
    assert await store.commit(worker, [result(first)]) == [True]
    now = await world.batch(batch)
    assert (now.counts, now.usage) == (LineCounts(3, 2, 1), TokenUsage(9, 3, 6, 3))
    assert (now.status, now.ending, now.finalizing_at) == ("finalizing", "completed", world.now)
    found = await store.lines(batch.id, after=0, limit=9)
    assert [(line.number, line.state, line.sequence) for line in found] == [
        (1, "succeeded", 3), (2, "succeeded", 1), (3, "failed", 2),
    ]  # fmt: skip
    assert found[0].output == result(first).output
    assert await store.lines(batch.id, after=1, limit=1) == found[1:2]
    assert await store.lines("batch_0", after=0, limit=9) == []


@played
async def test_a_result_is_counted_once_however_often_it_is_committed(world: World) -> None:
    store, worker = world.store, await world.worker()
    batch = await world.running(worker, 2)
    first, second = await store.claim(worker, 2)
    assert await store.commit(worker, [result(first), result(first, False)]) == [True, True]
    assert await store.commit(worker, [result(first), result(second)]) == [True, True]
    assert await store.commit(worker, [result(first), result(second)]) == [True, True]
    now = await world.batch(batch)
    assert (now.counts, now.usage) == (LineCounts(2, 2, 0), TokenUsage(6, 2, 4, 2))
    found = await store.results("t", batch.id, after=0, limit=9)
    assert found is not None
    assert [(line.number, line.sequence) for line in found] == [(1, 1), (2, 2)]


@played
async def test_results_that_are_not_taken(world: World) -> None:
    store, worker = world.store, await world.worker()
    batch = await world.running(worker, 3)
    first, second = await store.claim(worker, 2)
    strange = [
        replace(result(first), batch_id="batch_0"),
        replace(result(first), number=9),
        replace(result(first), attempt=2),
        replace(result(first), attempt=0),
        replace(result(first), number=3, attempt=0),
        result(second),
    ]
    assert await store.commit(worker, strange) == [False] * 5 + [True]
    assert await store.commit(worker, []) == []
    assert (await world.batch(batch)).counts == LineCounts(3, 1, 0)


@played
async def test_results_of_several_batches_in_one_call(world: World) -> None:
    store, worker = world.store, await world.worker()
    first, second = await world.running(worker, 2), await world.running(worker, 2)
    claimed = await store.claim(worker, 9)
    assert await store.commit(worker, [result(line) for line in reversed(claimed)]) == [True] * 4
    for batch in (first, second):
        found = await store.results("t", batch.id, after=0, limit=9)
        assert found is not None
        assert [(line.number, line.sequence) for line in found] == [(2, 1), (1, 2)]
        assert (await world.batch(batch)).ending == "completed"


@played
async def test_a_worker_that_does_not_renew_loses_its_lines(world: World) -> None:
    store, slow, other = world.store, await world.worker(lease=10), await world.worker(lease=100)
    batch = await world.running(slow, 2)
    old = await store.claim(slow, 2)
    assert await store.commit(slow, [result(old[0])]) == [True]
    world.later(9)
    assert await store.renew_lease(slow, 10)
    world.later(9)
    assert await store.reap() == 0
    world.later(1)
    with pytest.raises(LeaseLost):
        await store.commit(slow, [result(old[1])])
    assert not await store.renew_lease(slow, 10)
    assert await store.claim(other, 9) == []
    assert await store.reap() == 1
    [new] = await store.claim(other, 9)
    assert (new.number, new.attempt) == (2, 2)
    back = await world.worker()
    assert await store.commit(back, [result(old[1])]) == [False]
    assert await store.commit(other, [result(new)]) == [True]
    assert (await world.batch(batch)).counts == LineCounts(2, 2, 0)
    assert await store.reap() == 0


@played
async def test_a_retired_worker_gives_everything_back(world: World) -> None:
    store, worker, other = world.store, await world.worker(), await world.worker()
    done = await world.running(worker, 1, callback_url="https://example.com")
    await store.commit(worker, [result(line) for line in await store.claim(worker, 1)])
    await store.take_finishing(worker)
    await store.finish(worker, done.id, output=None, errors=None, unfinished=0)
    ended = await world.running(worker, 1)
    await store.commit(worker, [result(line) for line in await store.claim(worker, 1)])
    running = await world.running(worker, 2)
    waiting = await world.create()
    assert await store.take_validation(worker) is not None
    assert await store.take_finishing(worker) is not None
    assert len(await store.claim(worker, 2)) == 2
    [delivery] = await store.take_deliveries(worker, 9)
    await store.retire_worker(worker)
    await store.retire_worker(worker)
    validation, finishing = await store.take_validation(other), await store.take_finishing(other)
    assert validation is not None
    assert finishing is not None
    assert (validation.id, finishing.id) == (waiting.id, ended.id)
    assert [line.batch_id for line in await store.claim(other, 9)] == [running.id] * 2
    [again] = await store.take_deliveries(other, 9)
    assert again == delivery
    assert not await store.delivered(worker, delivery.id)
    with pytest.raises(LeaseLost):
        await store.commit(worker, [])


async def _work(store: Store, worker: str, limit: int) -> list[tuple[str, int]]:
    """Until nothing is left."""
    done = []
    while claimed := await store.claim(worker, limit):
        keep, back = claimed[: limit - 1], claimed[limit - 1 :]
        await store.release(worker, back)
        assert all(await store.commit(worker, [result(line) for line in reversed(keep)]))
        done += [(line.batch_id, line.number) for line in keep]
    return done


async def _follow(world: World, batch: BatchRecord) -> list[int]:
    """The lines that `results` shows page by page while they come."""
    seen: list[int] = []
    while len(seen) < batch.counts.total:
        page = await world.store.results("t", batch.id, after=len(seen), limit=7)
        assert page is not None
        assert [line.sequence for line in page] == [*range(len(seen) + 1, len(seen) + len(page) + 1)]
        seen += [line.number for line in page]
    return seen


@played
async def test_a_page_of_large_results_is_short_and_never_empty(world: World) -> None:
    store, worker = world.store, await world.worker()
    batch = await world.running(worker, 5)
    claimed = await store.claim(worker, 4)
    sizes = [PAGE_BYTES // 2, PAGE_BYTES // 2, 1, PAGE_BYTES + 1]
    outputs = [replace(result(line), output=b"x" * size) for line, size in zip(claimed, sizes, strict=True)]
    await store.commit(worker, outputs)
    found = await store.results("t", batch.id, after=0, limit=9)
    assert found is not None
    assert [line.sequence for line in found] == [1, 2]
    assert [line.number for line in await store.lines(batch.id, after=0, limit=9)] == [1, 2]
    assert [line.number for line in await store.lines(batch.id, after=2, limit=9)] == [3]
    assert [line.number for line in await store.lines(batch.id, after=3, limit=9)] == [4]
    assert [line.number for line in await store.lines(batch.id, after=4, limit=9)] == [5]
    assert await store.lines(batch.id, after=5, limit=9) == []


@played
async def test_many_workers_at_once(world: World) -> None:
    workers = [await world.worker() for _ in range(4)]
    batches = [await world.running(workers[0], 40) for _ in range(3)]
    parts = asyncio.gather(*(_work(world.store, worker, 3 + place) for place, worker in enumerate(workers)))
    followed = asyncio.gather(*(_follow(world, batch) for batch in batches))
    done = [place for part in await parts for place in part]
    assert len(done) == len(set(done)) == 120
    assert all(sorted(seen) == [*range(1, 41)] for seen in await followed)
    for batch in batches:
        now = await world.batch(batch)
        assert (now.counts, now.ending) == (LineCounts(40, 40, 0), "completed")


@played
async def test_no_deadlock_between_commits_reaping_and_cancelling(world: World) -> None:
    """Each locks several lines of several batches, in whatever order."""
    store = world.store
    first = await world.worker(lease=1e6)
    batches = [await world.running(first, 30, window=100 + place) for place in range(4)]
    await store.retire_worker(first)

    async def crash_and_go_on() -> None:
        for _ in range(10):
            worker = await world.worker(lease=1e6)
            claimed = await store.claim(worker, 25)
            await store.commit(worker, [result(line) for line in claimed[::-2]])
            await store.retire_worker(worker)

    async def expire_and_cancel() -> None:
        for batch in batches:
            world.later(101 if batch is batches[0] else 1)
            await store.expire_batches()
            await store.request_cancel("t", batch.id)

    async def finish() -> None:
        worker = await world.worker(lease=1e6)
        for _ in range(20):
            await store.reap()
            batch = await store.take_finishing(worker)
            if batch is not None:
                assert await store.finish(worker, batch.id, output=None, errors=None, unfinished=0)

    await asyncio.gather(crash_and_go_on(), crash_and_go_on(), expire_and_cancel(), finish(), finish())
    assert await store.ending_among([batch.id for batch in batches]) == {batch.id for batch in batches}
