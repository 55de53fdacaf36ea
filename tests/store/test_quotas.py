"""Quotas in the store, on both databases: nothing is added beyond them, however many add at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.store.support import Play, World, new_lines, played, result

from batchwright.errors import InvalidRequest, QuotaExceeded
from batchwright.limiting.quotas import UNLIMITED, Quotas
from batchwright.limiting.rates import Change
from batchwright.store import open_store
from batchwright.store.records import ApiKey, BatchRecord, QuotaUse


def _queued(world: World, batch: BatchRecord, lines: int, key_id: str | None = None) -> BatchRecord:
    return replace(batch, enqueued_lines=lines, enqueued_tokens=lines * 10, key_id=key_id)


async def _tried(*adding: object) -> int:
    """How many of these were added; the others were over their quota."""
    came = await asyncio.gather(*adding, return_exceptions=True)  # type: ignore[call-overload]
    assert all(isinstance(each, QuotaExceeded) for each in came if isinstance(each, BaseException)), came
    return sum(not isinstance(each, BaseException) for each in came)


@played
async def test_the_quotas_of_tenants(world: World) -> None:
    store = world.store
    assert await store.tenant_quotas() == {}
    await store.set_tenant_quotas("b", Quotas(storage_bytes=5))
    await store.set_tenant_quotas("a", Quotas(requests_per_minute=1))
    await store.set_tenant_quotas("a", Quotas(tokens_per_minute=2**53))
    assert await store.tenant_quotas() == {"a": Quotas(tokens_per_minute=2**53), "b": Quotas(storage_bytes=5)}
    await store.set_tenant_quotas("b", UNLIMITED)
    assert list(await store.tenant_quotas()) == ["a"]


@played
async def test_quotas_and_weight_are_set_together_or_not_at_all(world: World) -> None:
    store = world.store
    await store.set_tenant_quotas("t", Quotas(storage_bytes=5), 2.0)
    assert await store.tenant_weights() == {"t": 2.0}
    with pytest.raises(InvalidRequest, match="weight=5000"):
        await store.set_tenant_quotas("t", UNLIMITED, 5000.0)
    assert await store.tenant_quotas() == {"t": Quotas(storage_bytes=5)}


def test_processes_that_add_at_once_do_not_overshoot(play: Play, url: str) -> None:
    async def scenario(world: World) -> None:
        store = world.store
        files = [await world.upload() for _ in range(2)]  # of 10 bytes each
        async with open_store(url, now=lambda: world.now) as other:
            stores = (store, other) * 10
            await store.set_tenant_quotas("t", Quotas(storage_bytes=75, enqueued_lines=10, enqueued_tokens=65))
            assert await _tried(*[each.add_file(world.new_file()) for each in stores]) == 5
            assert await _tried(*[each.add_file(world.new_file("u"), defaults=UNLIMITED) for each in stores]) == 20
            batches = [_queued(world, world.new_batch(files[0]), 2) for _ in stores]
            made = [each.create_batch(batch) for each, batch in zip(stores, batches, strict=True)]
            assert await _tried(*made) == 3  # 60 tokens; four have 80
        assert await store.quota_use("t") == QuotaUse(70, 6, 60)

    play(scenario)


@played
async def test_what_is_deleted_or_over_makes_room(world: World) -> None:
    store, worker = world.store, await world.worker()
    defaults = Quotas(storage_bytes=20, enqueued_lines=4)
    first = world.new_file()
    await store.add_file(first, defaults=defaults)
    await store.add_file(world.new_file(expires_at=world.now + 5), defaults=defaults)
    with pytest.raises(QuotaExceeded, match="tenant t stores 20 bytes of at most 20, and the file has 10"):
        await store.add_file(world.new_file(), defaults=defaults)
    world.later(5)
    await store.add_file(world.new_file(), defaults=defaults)
    batch = await store.create_batch(_queued(world, world.new_batch(first), 3), defaults=defaults)
    assert await store.quota_use("t") == QuotaUse(20, 3, 30)
    more = _queued(world, world.new_batch(first), 2)
    with pytest.raises(QuotaExceeded, match=r"3 lines .* of at most 4.*wait until others") as refused:
        await store.create_batch(more, defaults=defaults)
    assert refused.value.passing
    # Its lines were estimated; once they are read they are known, and what has a result does not wait.
    assert await store.take_validation(worker) is not None
    await store.add_lines(worker, batch.id, new_lines(range(1, 4)))
    await store.begin(worker, batch.id, total=3, model="m")
    [line] = await store.claim(worker, 1)
    await store.commit(worker, [result(line)])
    assert await store.quota_use("t") == QuotaUse(20, 2, 20)
    await store.create_batch(more, defaults=defaults)
    # The same request again finds its batch, though there is no room.
    again = replace(more, id="batch_again", idempotency_key=None)
    with pytest.raises(QuotaExceeded):
        await store.create_batch(again, defaults=defaults)
    await store.request_cancel("t", batch.id)
    assert await store.quota_use("t") == QuotaUse(20, 2, 20)


@played
async def test_a_batch_that_was_made_before_is_found_although_there_is_no_room(world: World) -> None:
    file = await world.upload()
    defaults = Quotas(enqueued_lines=2)
    made = _queued(world, world.new_batch(file, key="same"), 2)
    assert (await world.store.create_batch(made, defaults=defaults)).id == made.id
    again = _queued(world, world.new_batch(file, key="same"), 2)
    assert (await world.store.create_batch(again, defaults=defaults)).id == made.id


@played
async def test_a_retry_counts_the_lines_that_it_tries_again(world: World) -> None:
    store, worker = world.store, await world.worker()
    old = await world.ended(worker, 4, failed=3)
    for most, fits in ((2, False), (3, True)):
        new = replace(world.new_batch(world.new_file()), tenant="t")
        retrying = store.retry_batch("t", old.id, new, defaults=Quotas(enqueued_lines=most))
        assert await _tried(retrying) == fits
    assert (await store.quota_use("t")).enqueued_lines == 3


@played
async def test_a_key_has_its_own_quotas_beside_those_of_its_tenant(world: World) -> None:
    store = world.store
    await store.add_key(ApiKey("key_1", "t", "n", "bw-", 0.0, quotas=Quotas(storage_bytes=10)), b"1" * 32)
    defaults = Quotas(storage_bytes=30)
    assert await _tried(*[store.add_file(replace(world.new_file(), key_id="key_1"), defaults=defaults)]) == 1
    with pytest.raises(QuotaExceeded, match="key key_1 stores 10 bytes"):
        await store.add_file(replace(world.new_file(), key_id="key_1"), defaults=defaults)
    others = [store.add_file(replace(world.new_file(), key_id="key_2"), defaults=defaults) for _ in range(3)]
    assert await _tried(*others) == 2
    assert (await store.quota_use("t", "key_1")).storage_bytes == 10
    assert (await store.quota_use("t")).storage_bytes == 30


def test_rates_are_counted_together_and_forgotten(play: Play, url: str) -> None:
    async def scenario(world: World) -> None:
        store = world.store
        async with open_store(url, now=lambda: world.now) as other:
            changes = [Change("a", 1, 5), Change("a", 2, -1), Change("b", 2, 7)]
            await asyncio.gather(*[each.share_rates(changes, ["a"], oldest=0, since=9) for each in (store, other) * 5])
            now, counted = await other.share_rates([], ["a", "c"], oldest=0, since=9)
        assert now == world.now
        assert sorted(counted) == [("a", 1, 50), ("a", 2, -10)]
        assert (await store.share_rates([Change("c", 3, 1)], ["a", "c"], oldest=3, since=9))[1] == [("c", 3, 1)]
        assert (await store.share_rates([], ["a", "b", "c"], oldest=0, since=9))[1] == [("c", 3, 1)]
        # Of what was not asked for by its name, what is new.
        assert (await store.share_rates([], [], oldest=0, since=3))[1] == [("c", 3, 1)]
        assert (await store.share_rates([], [], oldest=0, since=4))[1] == []

    play(scenario)


@played
async def test_processes_tell_each_other_of_themselves_while_their_leases_hold(world: World) -> None:
    store = world.store
    one, two = await store.register_worker("one", 10), await store.register_worker("two", 20)
    await store.publish(one, '{"online": 1}')
    assert [(peer.worker, peer.name, peer.snapshot) for peer in await store.peers()] == [
        (one, "one", '{"online": 1}'),
        (two, "two", None),
    ]
    world.later(10)
    await store.publish(one, "late")
    assert [peer.name for peer in await store.peers()] == ["two"]


@played
async def test_what_is_kept_of_all_is_told_beside_its_limits(world: World) -> None:
    store = world.store
    assert await store.kept_quotas(Quotas(requests_per_minute=3)) == []
    await store.set_tenant_quotas("t", Quotas(storage_bytes=1000, enqueued_lines=50, tokens_per_minute=9))
    await store.add_key(ApiKey("key_1", "t", "n", "bw-", 0.0, quotas=Quotas(storage_bytes=500)), b"1" * 32)
    file = await world.upload()
    await store.add_file(replace(world.new_file(), key_id="key_1"))
    await world.upload("u")
    for key_id in (None, "key_1"):
        await store.create_batch(_queued(world, world.new_batch(file), 3, key_id))
    assert await store.kept_quotas(UNLIMITED) == [
        ("tenant:t/storage_bytes", 1000, 20),
        ("tenant:t/enqueued_lines", 50, 6),
        ("key:key_1/storage_bytes", 500, 10),
    ]
    assert ("tenant:u/storage_bytes", 20, 10) in await store.kept_quotas(Quotas(storage_bytes=20))
