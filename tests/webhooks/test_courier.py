"""The way of messages from the outbox to their receivers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
import stamina
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.webhooks import BatchFailedWebhookEvent
from standardwebhooks import Webhook as StandardWebhook
from tests.webhooks.outbox import START, Scripted, end_batch, in_event_loop, opened
from tests.webhooks.receiver import OK, Received, answer, listening

from batchwright.clock import ManualClock
from batchwright.errors import StoreUnavailable
from batchwright.service.webhooks import courier
from batchwright.service.webhooks.addresses import AllowList
from batchwright.service.webhooks.courier import GIVE_UP_AFTER, Courier, next_try
from batchwright.service.webhooks.sender import Answer, Sender
from batchwright.service.webhooks.webhook_service import Webhooks
from batchwright.store import Store, open_store
from batchwright.store.records import Delivery, Webhook

TAKEN, BROKEN, SILENT, GONE = (
    Answer(200, "HTTP 200"),
    Answer(500, "HTTP 500"),
    Answer(None, "no answer"),
    Answer(410, "HTTP 410"),
)


def loopback() -> Sender:
    return Sender(AllowList.parse(["127.0.0.0/8"]))


def courier_of(store: Store, sender: Sender, clock: ManualClock) -> Courier:
    return Courier(store, sender, now=clock.now, luck=lambda: 0.5, poll=0.001)


def assert_signed(secret: str, request: Received, now: int) -> None:
    """The signature is what the official package makes of the message, at this time."""
    assert request.headers["webhook-timestamp"] == str(now)
    at = datetime.fromtimestamp(now, UTC)
    right = StandardWebhook(secret).sign(request.headers["webhook-id"], at, request.body.decode())
    assert right in request.headers["webhook-signature"].split()


async def left(store: Store) -> tuple[int, int]:
    counts = await store.count_deliveries()
    return counts["pending"], counts["failed"]


@in_event_loop
async def test_a_message_arrives_signed_with_what_the_tenant_was_given(tmp_path: Path) -> None:
    clock, sender = ManualClock(START + 0.7), loopback()
    async with opened(tmp_path, clock) as (store, worker), listening() as receiver:
        webhooks = Webhooks(store, sender, now=clock.now)
        webhook = await webhooks.create("default", f"http://127.0.0.1:{receiver.port}/hook")
        await webhooks.create("other", f"http://127.0.0.1:{receiver.port}/other")
        await end_batch(store, worker, "1", callback=f"http://127.0.0.1:{receiver.port}/callback")
        assert await courier_of(store, sender, clock).run_once(worker) == 2
        assert await left(store) == (0, 0)
        by_path = {request.line.split()[1]: request for request in receiver.received}
        assert by_path.keys() == {"/hook", "/callback"}
        secrets = {"/hook": webhook.secrets[0], "/callback": await webhooks.callback_secret("default")}
        for path, request in by_path.items():
            assert_signed(secrets[path], request, int(clock.now()))
            event = json.loads(request.body)
            assert event == {
                "id": request.headers["webhook-id"],
                "object": "event",
                "type": "batch.failed",
                "created_at": int(START),
                "data": {"id": "batch_1"},
            }
            assert request.headers["content-type"] == "application/json"
            assert request.headers["user-agent"].startswith("batchwright/")


@in_event_loop
async def test_the_packages_of_receivers_accept_what_arrives(tmp_path: Path) -> None:
    sender = loopback()
    async with opened(tmp_path, ManualClock(START)) as (store, worker), listening() as receiver:
        webhooks = Webhooks(store, sender)
        old = await webhooks.create("default", f"http://127.0.0.1:{receiver.port}/")
        new = await webhooks.rotate("default", old.id)
        await end_batch(store, worker, "1")
        assert await Courier(store, sender).run_once(worker) == 1
        request = receiver.received[0]
        for secret in (old.secrets[0], new.secrets[0]):
            assert StandardWebhook(secret).verify(request.body, dict(request.headers))["data"] == {"id": "batch_1"}
            client = OpenAI(api_key="none", webhook_secret=secret)
            event = client.webhooks.unwrap(request.body, request.headers)
            assert isinstance(event, BatchFailedWebhookEvent)
            assert event.data.id == "batch_1"


@in_event_loop
async def test_a_receiver_that_fails_gets_the_same_again(tmp_path: Path) -> None:
    clock, sender = ManualClock(START), loopback()
    said = [answer(500), answer(302), answer(404), OK]
    async with opened(tmp_path, clock) as (store, worker), listening(lambda number: said[number]) as receiver:
        await end_batch(store, worker, "1", callback=f"http://127.0.0.1:{receiver.port}/")
        courier = courier_of(store, sender, clock)
        secret = await Webhooks(store, sender).callback_secret("default")
        for pause in (5.0, 15.0, 45.0):
            assert await courier.run_once(worker) == 1
            clock.advance(pause - 0.01)
            assert await courier.run_once(worker) == 0
            clock.advance(0.02)
        assert await courier.run_once(worker) == 1
        assert await left(store) == (0, 0)
        assert len({(request.headers["webhook-id"], request.body) for request in receiver.received}) == 1
        assert len({request.headers["webhook-timestamp"] for request in receiver.received}) == 4
        last = receiver.received[-1]
        assert_signed(secret, last, int(clock.now()))


@in_event_loop
async def test_410_turns_a_webhook_off_and_it_can_be_turned_on_again(tmp_path: Path) -> None:
    clock, sender = ManualClock(START), Scripted({"gone.example": [GONE], "there.example": [TAKEN]})
    async with opened(tmp_path, clock) as (store, worker):
        webhooks = Webhooks(store, loopback(), now=clock.now)
        gone = await webhooks.create("default", "http://127.0.0.1:1/")
        await store.update_webhook("default", gone.id, {"url": "https://gone.example/"})
        for name in ("1", "2"):
            await end_batch(store, worker, name, callback="https://there.example/")
        assert await courier_of(store, sender, clock).run_once(worker) == 4
        assert await left(store) == (0, 2)
        assert sum(url == "https://gone.example/" for url, *_ in sender.sent) == 1
        reasons = {reason for _, reason in await webhooks.failed("default")}
        assert reasons == {"HTTP 410: the receiver wants no more", "the webhook was turned off"}
        [webhook] = await webhooks.webhooks("default")
        assert webhook.disabled_at == START
        await end_batch(store, worker, "3")
        assert await left(store) == (0, 2)
        await webhooks.enable("default", gone.id)
        await end_batch(store, worker, "4")
        assert await left(store) == (1, 2)


@in_event_loop
async def test_a_secret_that_is_rotated_while_a_webhook_is_turned_off_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sender = ManualClock(START), Scripted({"127.0.0.1:1": [GONE]})
    async with opened(tmp_path, clock) as (store, worker):
        webhooks = Webhooks(store, loopback(), now=clock.now)
        made = await webhooks.create("default", "http://127.0.0.1:1/")
        await end_batch(store, worker, "1")
        read, count = store.webhooks, 0

        async def rotated_meanwhile(tenant: str) -> list[Webhook]:
            nonlocal count
            count += 1
            found = await read(tenant)
            await store.rotate_webhook(tenant, made.id, f"whsec_{count}")
            return found

        monkeypatch.setattr(store, "webhooks", rotated_meanwhile)
        assert await courier_of(store, sender, clock).run_once(worker) == 1
        [webhook] = await read("default")
        assert (webhook.disabled_at, webhook.secrets) == (START, ("whsec_2", "whsec_1"))
        webhook = await webhooks.enable("default", made.id)
        assert (webhook.disabled_at, webhook.secrets) == (None, ("whsec_2", "whsec_1"))
        webhook = await webhooks.disable("default", made.id)
        assert (webhook.disabled_at, webhook.secrets) == (START, ("whsec_3", "whsec_2"))


@in_event_loop
async def test_what_waits_for_a_webhook_that_was_deleted_is_not_sent(tmp_path: Path) -> None:
    clock, sender = ManualClock(START), Scripted({"127.0.0.1:1": [TAKEN]})
    async with opened(tmp_path, clock) as (store, worker):
        webhooks = Webhooks(store, loopback(), now=clock.now)
        webhook = await webhooks.create("default", "http://127.0.0.1:1/")
        await end_batch(store, worker, "1")
        await webhooks.delete("default", webhook.id)
        assert await courier_of(store, sender, clock).run_once(worker) == 0
        assert sender.sent == []
        assert await left(store) == (0, 1)


@in_event_loop
async def test_a_message_is_tried_for_72_hours_and_then_kept_with_its_reason(tmp_path: Path) -> None:
    clock, sender = ManualClock(START), Scripted({"broken.example": [BROKEN]})
    async with opened(tmp_path, clock) as (store, worker):
        await end_batch(store, worker, "1", callback="https://broken.example/")
        courier = courier_of(store, sender, clock)
        tried_at: list[float] = []
        while await left(store) == (1, 0):
            if await courier.run_once(worker):
                tried_at.append(clock.now() - START)
            clock.advance(600.0)
        assert len(tried_at) == len(sender.sent)
        assert tried_at[0] == 0
        assert tried_at[-1] == pytest.approx(GIVE_UP_AFTER, abs=600)
        assert 15 <= len(tried_at) <= 25
        [(delivery, reason)] = await store.failed_deliveries("default", 10)
        assert reason == "not delivered within 72 hours; at last: HTTP 500"
        assert courier.given_up == 1
        assert delivery.batch_id == "batch_1"


@in_event_loop
async def test_what_waited_longer_than_72_hours_is_tried_once(tmp_path: Path) -> None:
    """The service was away."""
    clock, sender = ManualClock(START), Scripted({"there.example": [TAKEN], "broken.example": [BROKEN]})
    async with opened(tmp_path, clock) as (store, worker):
        await end_batch(store, worker, "1", callback="https://there.example/")
        await end_batch(store, worker, "2", callback="https://broken.example/")
        clock.advance(GIVE_UP_AFTER * 2)
        assert await courier_of(store, sender, clock).run_once(worker) == 2
        assert await left(store) == (0, 1)


@in_event_loop
async def test_what_else_waits_for_a_silent_receiver_is_put_off_without_trying(tmp_path: Path) -> None:
    clock, sender = ManualClock(START), Scripted({"dead.example": [SILENT], "there.example": [TAKEN]})
    async with opened(tmp_path, clock) as (store, worker):
        for number in range(10):
            await end_batch(store, worker, f"d{number}", callback="https://dead.example/hook")
            await end_batch(store, worker, f"t{number}", callback="https://there.example/hook")
        assert await courier_of(store, sender, clock).run_once(worker) == 20
        sent = [url for url, *_ in sender.sent]
        assert sent.count("https://dead.example/hook") == 1
        assert sent.count("https://there.example/hook") == 10
        assert await left(store) == (10, 0)


@in_event_loop
async def test_a_receiver_that_does_not_answer_holds_up_nobody_else(tmp_path: Path) -> None:
    clock, sender = ManualClock(START), loopback()
    async with (
        opened(tmp_path, clock) as (store, worker),
        listening(lambda number: None) as slow,
        listening() as quick,
    ):
        for number in range(5):
            await end_batch(store, worker, f"s{number}", callback=f"http://127.0.0.1:{slow.port}/")
        running = asyncio.create_task(courier_of(store, sender, clock).run(lambda: worker))
        await slow.came.wait()
        await end_batch(store, worker, "q", callback=f"http://127.0.0.1:{quick.port}/")
        await quick.came.wait()
        assert slow.connections == 1
        running.cancel()
        await asyncio.wait([running])
        # What it held goes back when its worker retires.
        await store.retire_worker(worker)
        other = await store.register_worker("other", 60)
        assert len(await store.take_deliveries(other, 10)) >= 5


@pytest.mark.parametrize("slow", [1, 2])
@in_event_loop
async def test_thousands_of_messages_to_slow_receivers_keep_out_no_others(tmp_path: Path, slow: int) -> None:
    clock, arrived = ManualClock(START), asyncio.Event()

    class Stuck(Scripted):
        async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
            if ".slow.example" in url:
                await asyncio.Event().wait()
            arrived.set()
            return await super().send(url, headers, body)

    async with opened(tmp_path, clock) as (store, worker):
        for number in range(9 * slow):
            await end_batch(store, worker, f"s{number}", callback=f"https://{number % slow}.slow.example/")
        clock.advance(1.0)
        await end_batch(store, worker, "q", callback="https://quick.example/")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("_TAKEN_AT_ONCE", 2), ("_MOST_HELD", 4), ("_MOST_OF_ADDRESS", 2)):
                patch.setattr(courier, name, value)
            sender = Stuck({"quick.example": [TAKEN]})
            running = asyncio.create_task(courier_of(store, sender, clock).run(lambda: worker))
            async with asyncio.timeout(60.0):
                await arrived.wait()
            running.cancel()
            await asyncio.wait([running])
        # Of each, one is being sent, two wait; the others come back in turn, as if nobody had taken them.
        other = await store.register_worker("other", 1e9)
        came_back: list[Delivery] = []
        for _ in range(6):
            assert await store.take_deliveries(other, 10) == []
            clock.advance(10.0 if not came_back else 5.0)
            came_back += await store.take_deliveries(other, 10)
        assert [delivery.tries for delivery in came_back] == [0] * 6 * slow


@in_event_loop
async def test_it_delivers_as_a_worker_of_its_own_until_it_is_stopped(tmp_path: Path) -> None:
    clock, sender = ManualClock(START), loopback()
    async with opened(tmp_path, clock) as (store, worker), listening() as receiver:
        await end_batch(store, worker, "1", callback=f"http://127.0.0.1:{receiver.port}/")
        serving = asyncio.create_task(courier_of(store, sender, clock).serve())
        await receiver.came.wait()
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()
        # Noted as delivered or not: nothing stays taken.
        pending, _ = await left(store)
        assert len(await store.take_deliveries(worker, 10)) == pending


@in_event_loop
async def test_messages_of_a_worker_that_lost_its_lease_are_left_to_others(tmp_path: Path) -> None:
    clock = ManualClock(START)
    sender = Scripted({"a.example": [TAKEN]})
    async with opened(tmp_path, clock) as (store, keeper):
        worker = await store.register_worker("short", 10)
        for number in range(3):
            await end_batch(store, keeper, str(number), callback="https://a.example/")
        clock.advance(11)
        await store.reap()
        assert await courier_of(store, sender, clock).run_once(worker) == 0
        assert sender.sent == []
        assert await courier_of(store, sender, clock).run_once(keeper) == 3


@in_event_loop
async def test_a_defect_costs_its_own_message_only(tmp_path: Path) -> None:
    clock, sender = ManualClock(START), Scripted({"a.example": [TAKEN]})
    async with opened(tmp_path, clock) as (store, worker):
        await end_batch(store, worker, "1", callback="https://unscripted.example/")
        await end_batch(store, worker, "2", callback="https://a.example/")
        assert await courier_of(store, sender, clock).run_once(worker) == 2
        assert await left(store) == (1, 0)


def test_what_came_of_a_message_is_written_down_when_the_database_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        clock, sender = ManualClock(START), Scripted({"a.example": [TAKEN]})
        async with opened(tmp_path, clock) as (store, worker):
            await end_batch(store, worker, "1", callback="https://a.example/")
            real, failures = store.delivered, 3

            async def delivered(worker: str, delivery_id: str) -> bool:
                nonlocal failures
                failures -= 1
                if failures >= 0:
                    raise StoreUnavailable("the disk is full")
                return await real(worker, delivery_id)

            monkeypatch.setattr(store, "delivered", delivered)
            assert await courier_of(store, sender, clock).run_once(worker) == 1
            assert failures < 0
            assert len(sender.sent) == 1
            assert await left(store) == (0, 0)

    with stamina.set_testing(True, attempts=10):  # without pauses
        asyncio.run(main())


DELIVER = """
import asyncio, sys
from batchwright.store import open_store
from batchwright.service.webhooks.addresses import AllowList
from batchwright.service.webhooks.courier import Courier
from batchwright.service.webhooks.sender import Sender

async def main():
    async with open_store(sys.argv[1]) as store:
        worker = await store.register_worker("dies", 30)
        await Courier(store, Sender(AllowList.parse(["127.0.0.1"]))).run_once(worker)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("place", "times"), [("courier.before_send", 1), ("courier.after_send", 2), ("courier.after_write", 1)]
)
@in_event_loop
async def test_a_crash_loses_no_message_and_a_repeated_one_can_be_known(place: str, times: int, tmp_path: Path) -> None:
    database = tmp_path / "batchwright.db"
    async with listening() as receiver:
        async with open_store(database) as store:
            worker = await store.register_worker("first", 30)
            await end_batch(store, worker, "1", callback=f"http://127.0.0.1:{receiver.port}/")
        command = [sys.executable, "-c", DELIVER, str(database)]
        died = await asyncio.create_subprocess_exec(
            *command, env=os.environ | {"BATCHWRIGHT_CRASH_AT": place}, stderr=subprocess.PIPE
        )
        _, complaint = await died.communicate()
        assert died.returncode == -signal.SIGKILL, complaint
        later = ManualClock(time.time() + 60)
        async with open_store(database, now=later.now) as store:
            await store.reap()
            worker = await store.register_worker("second", 30)
            await Courier(store, loopback(), now=later.now).run_once(worker)
            assert await left(store) == (0, 0)
        assert len(receiver.received) == times
        assert len({(request.headers["webhook-id"], request.body) for request in receiver.received}) == 1


@given(st.floats(0, 1e6), st.integers(0, 1000), st.floats(0, 1))
def test_the_next_try_is_later_and_within_the_72_hours(age: float, tries: int, luck: float) -> None:
    created_at = START
    now = created_at + age
    until = next_try(created_at=created_at, tries=tries, now=now, luck=luck)
    if age >= GIVE_UP_AFTER:
        assert until is None
    else:
        assert until is not None
        assert now < until <= created_at + GIVE_UP_AFTER
        assert until - now <= 1.25 * 6 * 3600 + 0.001


def test_pauses_grow_and_are_spread() -> None:
    def pause(tries: int, luck: float) -> float:
        until = next_try(created_at=0, tries=tries, now=0, luck=luck)
        assert until is not None
        return until

    assert [pause(tries, 0.5) for tries in range(4)] == [5, 15, 45, 135]
    assert pause(50, 0.5) == 6 * 3600
    assert (pause(0, 0), pause(0, 1)) == (3.75, 6.25)
