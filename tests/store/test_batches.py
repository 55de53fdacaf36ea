"""Batches as their owner sees them, and the stages of their life, on both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.store.support import CHAT, World, new_lines, numbers, played, result

from batchwright.errors import Conflict, LeaseLost, NotFound, QuotaExceeded
from batchwright.limiting.quotas import Quotas
from batchwright.store.records import BatchProblem, BatchRecord, LineCounts, TokenUsage


@played
async def test_a_batch_comes_back_as_it_was_made(world: World) -> None:
    file = await world.upload()
    batch = BatchRecord(
        id="batch_1",
        tenant="t",
        endpoint=CHAT,
        input_file_id=file.id,
        completion_window="24h",
        created_at=1.5,
        expires_at=2e9,
        metadata={"a": "1\u0000\ud800", "b": "é"},
        model="m",
        output_expires_after=3600.0,
        idempotency_key="k",
        callback_url="https://example.com",
        simple=True,
        paused=True,
        errors=(BatchProblem("c", "m", "p", 3), BatchProblem("c", "m")),
    )
    assert await world.store.create_batch(batch) == batch
    assert await world.store.batch("t", "batch_1") == batch
    assert await world.store.batch("t", "batch_2") is None


@played
async def test_the_same_idempotency_key_gives_the_same_batch(world: World) -> None:
    store, file = world.store, await world.upload()
    made = await asyncio.gather(*(store.create_batch(world.new_batch(file, key="k")) for _ in range(5)))
    assert len({batch.id for batch in made}) == 1
    assert await store.batches("t", limit=9) == [made[0]]
    other = await world.upload("u")
    assert (await store.create_batch(world.new_batch(other, key="k"))).id != made[0].id


@played
async def test_a_batch_and_its_input_are_added_together(world: World) -> None:
    store, files = world.store, [world.new_file() for _ in range(5)]
    made = await asyncio.gather(*(store.create_batch(world.new_batch(each, key="k"), file=each) for each in files))
    assert len({batch.id for batch in made}) == 1
    [file] = await store.files("t", limit=9)
    assert file.id == made[0].input_file_id
    assert await store.batch_of_idempotency_key("t", "k") == made[0]
    assert await store.batch_of_idempotency_key("u", "k") is None
    large = world.new_file()
    await store.set_tenant_quotas("t", Quotas(storage_bytes=file.bytes))
    with pytest.raises(QuotaExceeded):
        await store.create_batch(world.new_batch(large), file=large)
    assert await store.files("t", limit=9) == [file]
    assert await store.batches("t", limit=9) == [made[0]]


@played
async def test_a_batch_needs_its_file(world: World) -> None:
    store = world.store
    deleted, expired = await world.upload(), await world.upload(expires_at=world.now + 1)
    await store.delete_file("t", deleted.id)
    world.later(1)
    for file in (deleted, expired, world.new_file(), replace(await world.upload("u"), tenant="t")):
        with pytest.raises(NotFound, match=file.id):
            await store.create_batch(world.new_batch(file))
    assert await store.batches("t", limit=9) == []


@played
async def test_pages(world: World) -> None:
    store, file = world.store, await world.upload()
    made = [await store.create_batch(world.new_batch(file)) for _ in range(5)]
    simple = await store.create_batch(replace(world.new_batch(file), simple=True))
    await store.request_cancel("t", made[1].id)
    ids = [batch.id for batch in made]
    assert [batch.id for batch in await store.batches("t", limit=2)] == ids[:2:-1]
    assert [batch.id for batch in await store.batches("t", limit=9, after=ids[3])] == ids[2::-1]
    with pytest.raises(NotFound, match="after='batch_0'") as caught:
        await store.batches("t", limit=9, after="batch_0")
    assert caught.value.param == "after"
    assert await store.batches("t", limit=9, simple=True) == [simple]
    assert [batch.id for batch in await store.batches("t", limit=9, status="cancelling")] == [ids[1]]
    assert await store.count_batches("t") == {"validating": 5, "cancelling": 1}
    assert await store.count_batches("t", simple=True) == {"validating": 1}
    assert await store.count_batches() == {"validating": 5, "cancelling": 1}


@played
async def test_validation(world: World) -> None:
    store, worker, other = world.store, await world.worker(), await world.worker()
    third = await world.worker()
    first = await world.create()
    world.later(1)
    second = await world.create()
    taken = await store.take_validation(worker)
    assert taken == first
    assert await store.take_validation(other) == second
    assert await store.take_validation(third) is None
    assert await store.add_lines(worker, first.id, new_lines([2]))
    assert await store.take_validation(worker) == first  # it failed, and starts over
    assert await store.add_lines(worker, first.id, new_lines([1, 3]))
    assert await store.add_lines(worker, first.id, new_lines([4]))
    assert not await store.add_lines(other, first.id, new_lines([5]))
    assert not await store.begin(other, first.id, total=1, model="m")
    assert not await store.reject(other, first.id, [])
    assert await store.claim(worker, 9) == []
    world.later(1)
    assert await store.begin(worker, first.id, total=3, model="m")
    assert not await store.begin(worker, first.id, total=3, model="m")
    assert not await store.add_lines(worker, first.id, new_lines([6]))
    now = await world.batch(first)
    assert (now.status, now.in_progress_at, now.model) == ("in_progress", world.now, "m")
    assert now.counts == LineCounts(total=3)
    claimed = await store.claim(worker, 9)
    assert numbers(claimed) == [1, 3, 4]
    assert (claimed[1].custom_id, claimed[1].offset, claimed[1].length) == ("c3", 300, 99)
    assert (claimed[0].input_file_id, claimed[0].endpoint) == (first.input_file_id, CHAT)
    assert claimed[0].expires_at == first.expires_at


@played
async def test_a_batch_without_lines_ends_at_once(world: World) -> None:
    worker = await world.worker()
    batch = await world.running(worker, 0)
    assert (batch.status, batch.ending, batch.finalizing_at) == ("finalizing", "completed", world.now)


@played
async def test_the_lines_of_a_validation_that_was_cut_short_are_removed(world: World) -> None:
    store, batch = world.store, await world.create()
    first, second = await world.worker(lease=10), await world.worker()
    await store.take_validation(first)
    await store.add_lines(first, batch.id, new_lines([1, 2]))
    world.later(10)
    assert await store.take_validation(second) is None
    assert await store.reap() == 0
    assert await store.take_validation(second) is not None
    assert not await store.add_lines(first, batch.id, new_lines([3]))
    assert await store.add_lines(second, batch.id, new_lines([1]))
    assert not await store.begin(first, batch.id, total=2, model="m")
    assert await store.begin(second, batch.id, total=1, model="m")
    assert numbers(await store.claim(second, 9)) == [1]


@played
async def test_rejection(world: World) -> None:
    store, worker = world.store, await world.worker()
    batch = await world.create(callback_url="https://example.com")
    await store.take_validation(worker)
    await store.add_lines(worker, batch.id, new_lines([1]))
    problems = (BatchProblem("bad_line", "no JSON", None, 7),)
    world.later(2)
    assert await store.reject(worker, batch.id, problems)
    now = await world.batch(batch)
    assert (now.status, now.failed_at, now.errors, now.ending) == ("failed", world.now, problems, None)
    assert await store.lines(batch.id, after=0, limit=9) == []
    [delivery] = await store.take_deliveries(worker, 9)
    assert (delivery.type, delivery.batch_id) == ("batch.failed", batch.id)
    assert await store.take_finishing(worker) is None
    assert await store.request_cancel("t", batch.id) == now
    assert await store.ending_among([batch.id]) == {batch.id}


@played
async def test_cancelling_while_it_is_validated(world: World) -> None:
    store, worker, batch = world.store, await world.worker(), await world.create()
    await store.take_validation(worker)
    await store.add_lines(worker, batch.id, new_lines([1]))
    cancelled = await store.request_cancel("t", batch.id)
    assert cancelled is not None
    assert (cancelled.status, cancelled.ending, cancelled.cancelling_at) == ("cancelling", "cancelled", world.now)
    assert not await store.add_lines(worker, batch.id, new_lines([2]))
    assert not await store.begin(worker, batch.id, total=1, model="m")
    assert not await store.reject(worker, batch.id, [])
    assert await store.lines(batch.id, after=0, limit=9) == []
    assert await store.take_finishing(worker) == cancelled
    assert await store.finish(worker, batch.id, output=None, errors=None, unfinished=0)
    now = await world.batch(batch)
    assert (now.status, now.cancelled_at, now.counts) == ("cancelled", world.now, LineCounts())


@played
async def test_cancelling_while_it_runs_keeps_what_was_done(world: World) -> None:
    store, worker = world.store, await world.worker()
    batch = await world.running(worker, 4)
    claimed = await store.claim(worker, 3)
    assert await store.commit(worker, [result(claimed[0])]) == [True]
    await store.request_cancel("t", batch.id)
    world.later(1)
    again = await store.request_cancel("t", batch.id)
    assert again is not None
    assert again.cancelling_at == world.now - 1
    assert await store.claim(worker, 9) == []
    assert await store.commit(worker, [result(line) for line in claimed]) == [True, False, False]
    assert await store.ending_among([batch.id, "batch_0"]) == {batch.id, "batch_0"}
    assert await store.count_lines() == {"pending": 0, "claimed": 0, "suspect": 0}
    assert await store.take_finishing(worker) is not None
    output, errors = world.new_file(purpose="batch_output"), world.new_file(purpose="batch_output")
    assert await store.finish(worker, batch.id, output=output, errors=errors, unfinished=3)
    now = await world.batch(batch)
    assert (now.status, now.ending, now.cancelled_at, now.completed_at) == ("cancelled", None, world.now, None)
    assert (now.output_file_id, now.error_file_id) == (output.id, errors.id)
    assert now.counts == LineCounts(total=4, completed=1, failed=3)
    assert await store.file("t", output.id) == output
    found = await store.lines(batch.id, after=0, limit=9)
    assert [line.state for line in found] == ["succeeded", "pending", "pending", "pending"]


@played
async def test_expiry(world: World) -> None:
    store, worker = world.store, await world.worker(lease=1e6)
    running = await world.running(worker, 2, window=100)
    longer = await world.running(worker, 1, window=101)
    waiting = await world.create(window=100)
    world.later(99.5)
    assert await store.expire_batches() == []
    world.later(0.5)
    assert [line.batch_id for line in await store.claim(worker, 9)] == [longer.id]
    assert await store.take_validation(worker) is None
    assert set(await store.expire_batches()) == {running.id, waiting.id}
    assert await store.expire_batches() == []
    assert (await world.batch(running)).status == "in_progress"
    for _ in range(2):
        taken = await store.take_finishing(worker)
        assert taken is not None
        assert taken.ending == "expired"
        assert await store.request_cancel("t", taken.id) == taken
        unfinished = taken.counts.total
        assert await store.finish(worker, taken.id, output=None, errors=None, unfinished=unfinished)
        now = await world.batch(taken)
        assert (now.status, now.expired_at, now.counts.failed) == ("expired", world.now, unfinished)
    assert await store.take_finishing(worker) is None


@played
async def test_pausing(world: World) -> None:
    store, worker = world.store, await world.worker()
    batch = await world.running(worker, 2)
    [line] = await store.claim(worker, 1)
    paused = await store.set_paused("t", batch.id, True)
    assert paused is not None
    assert paused.paused
    assert await store.claim(worker, 1) == []
    assert await store.commit(worker, [result(line)]) == [True]
    assert await store.count_lines() == {"pending": 1, "claimed": 0, "suspect": 0}
    await store.set_paused("t", batch.id, False)
    assert numbers(await store.claim(worker, 9)) == [2]
    await store.request_cancel("t", batch.id)
    late = await store.set_paused("t", batch.id, True)
    assert late is not None
    assert not late.paused
    assert await store.set_paused("t", "batch_0", True) is None


@played
async def test_finishing_is_for_one_worker(world: World) -> None:
    store, worker, other = world.store, await world.worker(lease=10), await world.worker()
    batch = await world.running(worker, 1)
    await store.commit(worker, [result(line) for line in await store.claim(worker, 1)])
    ended = await store.take_finishing(worker)
    assert ended is not None
    assert (ended.status, ended.ending, ended.finalizing_at) == ("finalizing", "completed", world.now)
    assert ended.counts == LineCounts(1, 1, 0)
    assert ended.usage == TokenUsage(3, 1, 2, 1)
    assert await store.take_finishing(other) is None
    assert await store.take_finishing(worker) == ended  # it failed, and starts over
    output = world.new_file(purpose="batch_output")
    assert not await store.finish(other, batch.id, output=output, errors=None, unfinished=0)
    world.later(10)
    await store.reap()
    assert await store.take_finishing(other) is not None
    assert not await store.finish(worker, batch.id, output=output, errors=None, unfinished=0)
    assert await store.file("t", output.id) is None
    assert (await world.batch(batch)).status == "finalizing"
    assert await store.finish(other, batch.id, output=output, errors=None, unfinished=0)
    assert not await store.finish(other, batch.id, output=output, errors=None, unfinished=0)
    now = await world.batch(batch)
    assert (now.status, now.output_file_id, now.error_file_id) == ("completed", output.id, None)
    assert await store.ending_among([batch.id]) == {batch.id}
    assert not await store.finish(other, "batch_0", output=None, errors=None, unfinished=0)


@played
async def test_retry(world: World) -> None:
    store, worker = world.store, await world.worker()
    batch = await world.ended(worker, 5, failed=2)
    new = world.new_batch(await world.upload(), key="again")
    world.later(1)
    made = await store.retry_batch("t", batch.id, new)
    assert (made.status, made.in_progress_at, made.parent_id) == ("in_progress", world.now, batch.id)
    assert (made.input_file_id, made.model, made.counts) == (batch.input_file_id, "m", LineCounts(total=2))
    assert await world.batch(made) == made
    assert await store.retry_batch("t", batch.id, world.new_batch(await world.upload(), key="again")) == made
    claimed = await store.claim(worker, 9)
    assert numbers(claimed) == [1, 2]
    assert {(line.batch_id, line.attempt, line.custom_id) for line in claimed} == {
        (made.id, 1, "c1"),
        (made.id, 1, "c2"),
    }
    assert await store.commit(worker, [result(line) for line in claimed]) == [True, True]
    assert (await world.batch(made)).ending == "completed"
    assert (await world.batch(batch)) == batch


@played
async def test_what_cannot_be_retried(world: World) -> None:
    store, worker = world.store, await world.worker()
    whole, partial = await world.ended(worker, 2), await world.ended(worker, 2, failed=1)
    running = await world.running(worker, 1)
    new = world.new_batch(await world.upload())
    with pytest.raises(Conflict, match="all of them succeeded"):
        await store.retry_batch("t", whole.id, new)
    with pytest.raises(Conflict, match="has not ended"):
        await store.retry_batch("t", running.id, new)
    with pytest.raises(NotFound):
        await store.retry_batch("t", "batch_0", new)
    unread = await world.create()
    await store.request_cancel("t", unread.id)
    assert await store.take_finishing(worker) is not None
    await store.finish(worker, unread.id, output=None, errors=None, unfinished=0)
    with pytest.raises(Conflict, match=f"cancelled before its input was read.* of {unread.input_file_id}"):
        await store.retry_batch("t", unread.id, new)
    refused = await world.create()
    assert await store.take_validation(worker) is not None
    await store.reject(worker, refused.id, [])
    with pytest.raises(Conflict, match="its input was not valid"):
        await store.retry_batch("t", refused.id, new)
    await store.delete_file("t", partial.input_file_id)
    with pytest.raises(NotFound, match=partial.input_file_id):
        await store.retry_batch("t", partial.id, new)
    assert await store.batch("t", new.id) is None


@played
async def test_a_worker_without_a_lease_takes_nothing(world: World) -> None:
    store, worker = world.store, await world.worker(lease=5)
    await world.create()
    world.later(5)
    for take in (store.take_validation(worker), store.take_finishing(worker), store.take_finishing("wrk_0")):
        with pytest.raises(LeaseLost, match="register again"):
            await take
    with pytest.raises(LeaseLost):
        await store.claim(worker, 1)
    with pytest.raises(LeaseLost):
        await store.take_deliveries(worker, 1)
