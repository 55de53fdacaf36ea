"""Delivery of the messages in the outbox to their receivers, each at least once.

Messages are in the store from the transaction that ended their batch until a receiver has accepted them, so a crash
loses none. After a crash between an answer and its recording, the message is sent again, with the same `webhook-id`, by
which the receiver recognizes it, and the same body, unless the outputs that it carries were deleted in the meantime.

Messages to one address are sent one after the other, those to different addresses at once, so a slow receiver delays no
others. If a receiver does not answer at all, its other waiting messages are put off without being tried. If many wait
for one address, or for all, further ones go back to the store for a while.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import msgspec
import stamina

from batchwright.backoff import Backoff
from batchwright.crash_points import crash_point
from batchwright.errors import LeaseLost, StoreUnavailable
from batchwright.service.batches.simple_batches import outputs_of
from batchwright.service.webhooks.sender import CONCURRENCY, Sender
from batchwright.service.webhooks.signing import new_secret, signed_headers
from batchwright.store.records import Delivery, Webhook
from batchwright.store.store import Store
from batchwright.version import __version__

GIVE_UP_AFTER = 72 * 3600.0
"""Seconds from the event after which a message is given up."""
MOST_OUTPUT_BYTES = 64 * 1024
"""Most bytes of the outputs, as JSON, that a message to a `callback_url` carries."""
_BACKOFF = Backoff(first=5.0, longest=6 * 3600.0, factor=3.0, jitter=(0.75, 1.25))


def next_try(*, created_at: float, tries: int, now: float, luck: float) -> float | None:
    """Return when to try a message again, in Unix seconds; None: it is time to give up. Pure.

    `tries`: number of tries before the one that just failed. The pauses are 5 s, 15 s, 45 s and so on up to 6 hours,
    each up to a quarter longer or shorter by `luck` (0..1), so that messages that failed together are retried apart.
    The last try is at the end of the 72 hours, or the first one after a longer downtime.
    """
    end = created_at + GIVE_UP_AFTER
    if now >= end:
        return None
    return min(end, now + _BACKOFF.pause(tries + 1, luck))


_P = ParamSpec("_P")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_TAKEN_AT_ONCE = 200
_MOST_HELD = 10_000
"""Most messages in memory, besides one for each address."""
_MOST_OF_ADDRESS = 500
"""Most of them for one address, so that its queue does not keep out messages to others."""
_POSTPONED = 10.0
"""Seconds until the first message over `_MOST_OF_ADDRESS` becomes due again; later ones are spaced as if the address
took that many in so many seconds, however slow it is, so that thousands are not taken in vain again and again."""
_GONE = 410


class Courier:
    """Courier that takes messages from the store on behalf of a worker and delivers them.

    `now` gives Unix seconds and `luck` numbers from 0 to 1; `poll`: seconds between checks of an empty outbox.
    """

    def __init__(
        self,
        store: Store,
        sender: Sender,
        *,
        now: Callable[[], float] = time.time,
        luck: Callable[[], float] = random.random,
        poll: float = 1.0,
    ) -> None:
        self._store = store
        self._sender = sender
        self._now = now
        self._luck = luck
        self._poll = poll
        self.given_up = 0
        """Number of messages given up since it was made."""

    async def serve(self, *, lease: float = 30.0) -> None:
        """Deliver until cancelled, as a separate worker with a lease of `lease` seconds."""
        worker: str | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.run(lambda: worker))
                while True:
                    held = worker
                    if held is None or not await _persistently(self._store.renew_lease, held, lease):
                        worker = await _persistently(self._store.register_worker, "courier", lease)
                    await asyncio.sleep(lease / 3)
        finally:
            if worker is not None:
                with suppress(StoreUnavailable):  # then its messages are free when the lease runs out
                    await self._store.retire_worker(worker)

    async def run(self, worker: Callable[[], str | None]) -> None:
        """Deliver until cancelled. `worker` returns the worker's current id, which changes when a lease is lost.

        No messages are taken while there is no id (None or empty). Messages that were taken and not tried when this is
        cancelled stay the worker's until it retires.
        """
        async with asyncio.TaskGroup() as tasks:
            round_ = _Round(self, worker, tasks)
            while True:
                name = worker()
                taken = await self._take(name, round_) if name else 0
                if taken < _TAKEN_AT_ONCE:
                    await asyncio.sleep(self._poll)

    async def run_once(self, worker: str) -> int:
        """Take all messages that are due once, and try them. Returns their number."""
        tried = 0
        while True:
            async with asyncio.TaskGroup() as tasks:
                taken = await self._take(worker, _Round(self, lambda: worker, tasks))
            if not taken:
                return tried
            tried += taken

    async def _take(self, worker: str, round_: _Round) -> int:
        try:
            taken = await _persistently(self._store.take_deliveries, worker, _TAKEN_AT_ONCE)
        except LeaseLost:
            return 0
        added = [(delivery.id, round_.add(worker, delivery, self._now())) for delivery in taken]
        if postponed := {delivery_id: until for delivery_id, until in added if until is not None}:
            await _persistently(self._store.postpone, worker, postponed)
        return len(taken)

    async def deliver(self, worker: str, delivery: Delivery) -> str | None:
        """Send one message and record the result. Returns the reason if there was no answer, else None."""
        secrets = await self._secrets(delivery)
        if not secrets:
            await self._give_up(worker, delivery, "the webhook was deleted or turned off")
            return None
        body = event_body(delivery, await self._results(delivery))
        headers = signed_headers(secrets, message_id=delivery.event_id, timestamp=int(self._now()), body=body)
        headers |= {"content-type": "application/json", "user-agent": f"batchwright/{__version__}"}
        crash_point("courier.before_send")
        answer = await self._sender.send(delivery.url, headers, body)
        crash_point("courier.after_send")
        if answer.taken:
            await _persistently(self._store.delivered, worker, delivery.id)
        elif answer.status == _GONE:
            await self._give_up(worker, delivery, f"{answer.reason}: the receiver wants no more")
            await self._turn_off(delivery)
        else:
            await self.put_off(worker, delivery, answer.reason)
        crash_point("courier.after_write")
        return answer.reason if answer.status is None else None

    async def _give_up(self, worker: str, delivery: Delivery, reason: str) -> None:
        _log.warning("webhook %s (%s) is given up: %s", delivery.event_id, delivery.batch_id, reason)
        self.given_up += await _persistently(self._store.put_off, worker, delivery.id, until=None, reason=reason)

    async def put_off(self, worker: str, delivery: Delivery, reason: str) -> None:
        """Have a message tried again later, or give it up if it is too old."""
        until = next_try(created_at=delivery.created_at, tries=delivery.tries, now=self._now(), luck=self._luck())
        if until is None:
            await self._give_up(worker, delivery, f"not delivered within 72 hours; at last: {reason}")
            return
        _log.info("webhook %s (%s) was not delivered: %s", delivery.event_id, delivery.batch_id, reason)
        await _persistently(self._store.put_off, worker, delivery.id, until=until, reason=reason)

    async def _secrets(self, delivery: Delivery) -> tuple[str, ...]:
        """Return the secrets to sign with; none if the webhook was deleted or turned off."""
        if delivery.webhook_id is None:
            return await _persistently(self._store.tenant_secrets, delivery.tenant, new_secret())
        webhook = await self._webhook(delivery)
        return webhook.secrets if webhook is not None and webhook.disabled_at is None else ()

    async def _results(self, delivery: Delivery) -> Mapping[str, Any]:
        """Return the fields about results in a message to the `callback_url` of a simple batch; none for any other."""
        if delivery.webhook_id is not None:
            return {}
        batch = await _persistently(self._store.batch, delivery.tenant, delivery.batch_id)
        if batch is None or not batch.simple:
            return {}
        try:
            outputs = await _persistently(outputs_of, self._store, batch, MOST_OUTPUT_BYTES)
        except Exception:
            # The end of the batch is reported even so.
            _log.exception("the outputs of %s cannot be read", batch.id)
            outputs = None
        texts = None if outputs is None else [each.text for each in outputs]
        fields = {"batch_id": batch.id, "outputs": texts, "url": f"/v1/batch/{batch.id}"}
        return fields if len(msgspec.json.encode(texts)) <= MOST_OUTPUT_BYTES else fields | {"outputs": None}

    async def _webhook(self, delivery: Delivery) -> Webhook | None:
        webhooks = await _persistently(self._store.webhooks, delivery.tenant)
        return next((webhook for webhook in webhooks if webhook.id == delivery.webhook_id), None)

    async def _turn_off(self, delivery: Delivery) -> None:
        webhook = await self._webhook(delivery)
        if webhook is not None and webhook.disabled_at is None:
            _log.warning("webhook %s of tenant %s answered 410 and is turned off", webhook.id, webhook.tenant)
            await _persistently(self._store.update_webhook, webhook.tenant, webhook.id, {"disabled_at": self._now()})


class _Round:
    """Messages in memory by address. Each address with messages has a task; a limited number of tasks send at once."""

    def __init__(self, courier: Courier, worker: Callable[[], str | None], tasks: asyncio.TaskGroup) -> None:
        self._courier = courier
        self._worker = worker
        self._tasks = tasks
        self._waiting: dict[str, deque[tuple[str, Delivery]]] = {}
        self._postponed: dict[str, float] = {}
        """Until when the last message to an address was postponed, if any was since its queue was empty."""
        self._held = 0
        """Number of waiting messages, without those being sent."""
        self._slots = asyncio.Semaphore(CONCURRENCY)

    def add(self, worker: str, delivery: Delivery, now: float) -> float | None:
        """Hold a message; or else return until when it is to be postponed, since others wait for its address."""
        address = _address(delivery.url)
        if address not in self._waiting:
            self._waiting[address] = deque()
            self._tasks.create_task(self._serve(address))
        waiting = self._waiting[address]
        # The first for an address is always held, so that many slow addresses do not keep it out.
        if not waiting or (len(waiting) < _MOST_OF_ADDRESS and self._held < _MOST_HELD):
            waiting.append((worker, delivery))
            self._held += 1
            return None
        until = max(self._postponed.get(address, 0.0), now + _POSTPONED)
        self._postponed[address] = until + _POSTPONED / _MOST_OF_ADDRESS
        return until

    async def _serve(self, address: str) -> None:
        """Send the messages to one address until none are left."""
        waiting = self._waiting[address]
        silence: str | None = None
        while waiting:
            worker, delivery = waiting.popleft()
            self._held -= 1
            if worker != self._worker():
                continue  # the lease was lost, so the message belongs to another worker
            if silence is not None:
                await self._courier.put_off(worker, delivery, f"not tried: just before, {silence}")
                continue
            async with self._slots:
                try:
                    silence = await self._courier.deliver(worker, delivery)
                except Exception:
                    # A defect, which must not hold up other messages.
                    _log.exception("webhook %s (%s) could not be sent", delivery.event_id, delivery.batch_id)
                    await self._courier.put_off(worker, delivery, "an error within the service")
        del self._waiting[address]  # nothing was awaited since it was found empty
        self._postponed.pop(address, None)


def event_body(delivery: Delivery, results: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Return the body of a message as JSON, with further fields for its `results`."""
    event = {
        "id": delivery.event_id,
        "object": "event",
        "type": delivery.type,
        "created_at": int(delivery.created_at),
        "data": {"id": delivery.batch_id},
    }
    return msgspec.json.encode(event | dict(results))


def _address(url: str) -> str:
    """Return scheme, host and port of a URL, as they are written."""
    return "/".join(url.split("/", 3)[:3]).lower()


async def _persistently(call: Callable[_P, Awaitable[_T]], *args: _P.args, **named: _P.kwargs) -> _T:
    """Return the result of a call to the store, repeated until the database answers.

    The fate of a message must be recorded, or it would stay taken until this process ends.
    """
    async for attempt in stamina.retry_context(on=StoreUnavailable, attempts=None, timeout=None, wait_max=10.0):
        with attempt:
            return await call(*args, **named)
    raise StoreUnavailable("the store was not asked")
