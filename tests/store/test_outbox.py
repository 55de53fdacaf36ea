"""Webhooks, their messages, and keys, on both databases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.store.support import World, played

from batchwright.errors import Conflict
from batchwright.limiting.quotas import Quotas
from batchwright.store.records import ApiKey, BatchRecord, Delivery, Webhook


async def _finished(world: World, worker: str, callback_url: str | None = None) -> BatchRecord:
    batch = await world.running(worker, 0, callback_url=callback_url)
    assert await world.store.take_finishing(worker) is not None
    assert await world.store.finish(worker, batch.id, output=None, errors=None, unfinished=0)
    return batch


def _webhook(name: str, tenant: str = "t") -> Webhook:
    return Webhook(f"wh_{name}", tenant, f"https://{name}.example.com", ("whsec_new", "whsec_old"), 1.0)


@played
async def test_webhooks_come_back_as_they_were_added(world: World) -> None:
    store, first, second = world.store, _webhook("a"), replace(_webhook("b"), created_at=2.0)
    await store.add_webhook(second)
    await store.add_webhook(first)
    with pytest.raises(Conflict):
        await store.add_webhook(first)
    assert await store.webhooks("t") == [first, second]
    changes = {"url": "https://new.example.com", "disabled_at": 5.0}
    changed = replace(first, url="https://new.example.com", disabled_at=5.0)
    assert await store.update_webhook("t", first.id, changes) == changed
    assert await store.webhooks("t") == [changed, second]
    assert await store.update_webhook("t", "wh_c", changes) is None
    changed = replace(changed, secrets=("whsec_newer", "whsec_new"))
    assert await store.rotate_webhook("t", first.id, "whsec_newer") == changed
    assert await store.rotate_webhook("t", "wh_c", "whsec_newer") is None
    assert await store.webhooks("t") == [changed, second]
    assert await store.delete_webhook("t", first.id)
    assert not await store.delete_webhook("t", first.id)
    assert await store.webhooks("t") == [second]


@played
async def test_one_event_goes_to_each_webhook_and_to_the_callback(world: World) -> None:
    store, worker = world.store, await world.worker()
    for webhook in (_webhook("a"), _webhook("b"), replace(_webhook("off"), disabled_at=1.0), _webhook("u", "u")):
        await store.add_webhook(webhook)
    batch = await _finished(world, worker, "https://callback.example.com")
    assert await store.count_deliveries() == {"pending": 3, "failed": 0}
    found = await store.take_deliveries(worker, 9)
    assert len({delivery.event_id for delivery in found}) == 1
    assert len({delivery.id for delivery in found}) == 3
    assert {(delivery.url, delivery.webhook_id) for delivery in found} == {
        ("https://a.example.com", "wh_a"),
        ("https://b.example.com", "wh_b"),
        ("https://callback.example.com", None),
    }
    assert {(d.tenant, d.type, d.batch_id, d.created_at, d.tries) for d in found} == {
        ("t", "batch.completed", batch.id, world.now, 0)
    }
    assert await store.take_deliveries(worker, 9) == []


@played
async def test_a_message_is_put_off_and_arrives(world: World) -> None:
    store, worker, other = world.store, await world.worker(1000), await world.worker(1000)
    await _finished(world, worker, "https://example.com")
    [first] = await store.take_deliveries(worker, 9)
    assert not await store.put_off(other, first.id, until=0, reason="x")
    assert not await store.delivered(other, first.id)
    assert await store.put_off(worker, first.id, until=world.now + 5, reason="500")
    assert not await store.put_off(worker, first.id, until=world.now + 5, reason="500")
    world.later(4.5)
    assert await store.take_deliveries(other, 9) == []
    world.later(0.5)
    [second] = await store.take_deliveries(other, 9)
    assert second == replace(first, tries=1)
    assert await store.delivered(other, second.id)
    assert not await store.delivered(other, second.id)
    assert await store.count_deliveries() == {"pending": 0, "failed": 0}


@played
async def test_messages_that_were_given_up_are_kept(world: World) -> None:
    store, worker = world.store, await world.worker(1000)
    given_up: list[Delivery] = []
    for reason in ("first", "second"):
        await _finished(world, worker, "https://example.com")
        [delivery] = await store.take_deliveries(worker, 1)
        assert await store.put_off(worker, delivery.id, until=None, reason=reason)
        given_up.append(replace(delivery, tries=1))
        world.later(1)
    assert await store.take_deliveries(worker, 9) == []
    assert await store.failed_deliveries("t", 9) == [(given_up[1], "second"), (given_up[0], "first")]
    assert len(await store.failed_deliveries("t", 1)) == 1
    assert await store.count_deliveries() == {"pending": 0, "failed": 2}


@played
async def test_messages_that_were_given_up_long_ago_are_forgotten(world: World) -> None:
    store, worker = world.store, await world.worker(1000)
    for number in range(4):
        await _finished(world, worker, "https://example.com")
        [delivery] = await store.take_deliveries(worker, 1)
        assert await store.put_off(worker, delivery.id, until=None, reason=str(number))
        world.later(10)
    await _finished(world, worker, "https://example.com")
    # They were given up 40, 30, 20 and 10 seconds ago.
    assert await store.forget_deliveries(1, age=25)
    assert await store.forget_deliveries(1, age=25)
    assert not await store.forget_deliveries(1, age=25)
    assert {reason for _, reason in await store.failed_deliveries("t", 9)} == {"2", "3"}
    assert not await store.forget_deliveries(9, age=0)
    assert await store.count_deliveries() == {"pending": 1, "failed": 0}


@played
async def test_messages_follow_their_webhook(world: World) -> None:
    store, worker = world.store, await world.worker(1000)
    moved, off, deleted = _webhook("moved"), _webhook("off"), _webhook("deleted")
    for webhook in (moved, off, deleted):
        await store.add_webhook(webhook)
    await _finished(world, worker)
    await store.update_webhook("t", moved.id, {"url": "https://new.example.com"})
    await store.update_webhook("t", off.id, {"disabled_at": world.now})
    await store.delete_webhook("t", deleted.id)
    [delivery] = await store.take_deliveries(worker, 9)
    assert (delivery.webhook_id, delivery.url) == ("wh_moved", "https://new.example.com")
    failed = await store.failed_deliveries("t", 9)
    assert {(delivery.webhook_id, reason) for delivery, reason in failed} == {
        ("wh_off", "the webhook was turned off"),
        ("wh_deleted", "the webhook was deleted"),
    }
    await store.update_webhook("t", moved.id, {"disabled_at": world.now})
    assert not await store.delivered(worker, delivery.id)


@played
async def test_the_secret_of_a_tenant_is_made_once(world: World) -> None:
    assert await world.store.tenant_secrets("t", "whsec_1") == ("whsec_1",)
    assert await world.store.tenant_secrets("t", "whsec_2") == ("whsec_1",)
    assert await world.store.tenant_secrets("u", "whsec_3") == ("whsec_3",)


@played
async def test_a_new_secret_of_a_tenant_stands_before_the_last_one(world: World) -> None:
    for number in range(3):
        await world.store.rotate_tenant_secret("t", f"whsec_{number}")
    assert await world.store.tenant_secrets("t", "whsec_9") == ("whsec_2", "whsec_1")
    await world.store.rotate_tenant_secret("u", "whsec_3")
    assert await world.store.tenant_secrets("u", "whsec_9") == ("whsec_3",)


@played
async def test_keys(world: World) -> None:
    store = world.store
    first, second = ApiKey("key_1", "t", "ci", "bw_1", 1.0), ApiKey("key_2", "u", "dev", "bw_2", 2.0)
    await store.add_key(first, b"1" * 32)
    await store.add_key(second, b"2" * 32)
    with pytest.raises(Conflict):
        await store.add_key(replace(first, id="key_3"), b"1" * 32)
    assert await store.key(b"1" * 32) == first
    assert await store.key(b"3" * 32) is None
    assert await store.keys() == [second, first]
    assert await store.keys("t") == [first]
    assert await store.revoke_key("key_1")
    assert await store.key(b"1" * 32) is None
    revoked = replace(first, revoked_at=world.now)
    assert await store.keys("t") == [revoked]
    world.later(1)
    assert await store.revoke_key("key_1")
    assert await store.keys("t") == [revoked]
    assert not await store.revoke_key("key_0")


@played
async def test_a_key_has_all_that_it_was_given_and_ends_with_its_time(world: World) -> None:
    store = world.store
    assert not await store.any_key()
    key = ApiKey(
        "key_1", "t", "ci", "bw_1", world.now, None, world.now + 50, ("online", "admin"), 0.25, -3,
        quotas=Quotas(storage_bytes=2**40, requests_per_minute=7),
    )  # fmt: skip
    await store.add_key(key, b"1" * 32)
    assert await store.any_key()
    assert await store.key(b"1" * 32) == key
    assert await store.keys() == [key]
    key = replace(
        key, name="other", weight=2.0, scopes=("metrics",), best_priority=None,
        quotas=Quotas(storage_bytes=2**40, concurrent_requests=3),
    )  # fmt: skip
    changes: dict[str, Any] = {name: getattr(key, name) for name in ("name", "weight", "scopes", "best_priority")}
    changes["quotas"] = {"requests_per_minute": None, "concurrent_requests": 3}
    assert await store.update_key("key_1", changes) == key
    assert await store.update_key("key_0", changes) is None
    assert await store.keys() == [key]
    await store.note_key_uses({"key_1": world.now + 1, "key_0": 5.0})
    await store.note_key_uses({"key_1": world.now})
    key = replace(key, last_used_at=world.now + 1)
    assert await store.keys() == [key]
    world.later(49)
    assert await store.key(b"1" * 32) == key
    world.later(1)
    assert await store.key(b"1" * 32) is None
    assert await store.any_key()


@played
async def test_a_rotated_key_has_two_secrets_until_the_overlap_is_over(world: World) -> None:
    store = world.store
    key = ApiKey("key_1", "t", "ci", "bw_1", world.now)
    await store.add_key(key, b"1" * 32)
    rotated = replace(key, prefix="bw_2", previous_until=world.now + 10)
    assert await store.rotate_key("key_1", b"2" * 32, "bw_2", 10.0) == rotated
    assert await store.key(b"2" * 32) == rotated
    assert await store.key(b"1" * 32) == replace(rotated, expires_at=world.now + 10)
    world.later(10)
    assert await store.key(b"1" * 32) is None
    assert await store.key(b"2" * 32) == rotated
    assert await store.revoke_key("key_1")
    assert await store.rotate_key("key_1", b"3" * 32, "bw_3", 10.0) is None
    assert await store.rotate_key("key_0", b"3" * 32, "bw_3", 10.0) is None


@played
async def test_nothing_of_another_tenant_is_found(world: World) -> None:
    store, worker = world.store, await world.worker()
    await store.add_webhook(_webhook("a"))
    batch = await world.ended(worker, 2, failed=1)
    [delivery] = await store.take_deliveries(worker, 9)
    await store.put_off(worker, delivery.id, until=None, reason="x")
    file = await world.upload()
    running = await world.running(worker, 1)
    before = await world.batch(batch), await world.batch(running)

    assert await store.file("u", file.id) is None
    assert await store.files("u", limit=9) == []
    with pytest.raises(LookupError):
        await store.files("u", limit=9, after=file.id)
    assert not await store.delete_file("u", file.id)
    assert await store.batch("u", batch.id) is None
    assert await store.batches("u", limit=9) == []
    with pytest.raises(LookupError):
        await store.batches("u", limit=9, after=batch.id)
    assert await store.request_cancel("u", running.id) is None
    assert await store.set_paused("u", running.id, True) is None
    assert await store.results("u", batch.id, after=0, limit=9) is None
    with pytest.raises(LookupError):
        await store.retry_batch("u", batch.id, world.new_batch(await world.upload("u")))
    with pytest.raises(LookupError):
        await store.create_batch(replace(world.new_batch(file), tenant="u"))
    assert await store.count_batches("u") == {}
    assert await store.webhooks("u") == []
    assert await store.update_webhook("u", "wh_a", {"disabled_at": 1.0}) is None
    assert await store.rotate_webhook("u", "wh_a", "whsec_u") is None
    assert not await store.delete_webhook("u", "wh_a")
    assert await store.failed_deliveries("u", 9) == []
    assert await store.keys("u") == []

    assert (await world.batch(batch), await world.batch(running)) == before
    assert await store.file("t", file.id) == file
    assert await store.webhooks("t") == [_webhook("a")]
