"""Delivery of the messages of the outbox to their receivers, each at least once.

Messages lie in the store from the transaction that ended their batch until a receiver has taken them, so a crash loses
none; one that falls between the answer and the note of it makes the message go out again, with the same `webhook-id`
and the same body, by which the receiver knows it.

Messages to one address go one after the other, those to different addresses at once: a receiver that is slow holds up
nobody else. When one does not answer at all, what else waits for it is put off without trying each in turn.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import ParamSpec, TypeVar

import msgspec
import stamina

from batchwright.backoff import Backoff
from batchwright.crash_points import crash_point
from batchwright.errors import LeaseLost, StoreUnavailable
from batchwright.service.webhooks.sender import CONCURRENCY, Sender
from batchwright.service.webhooks.signing import new_secret, signed_headers
from batchwright.store.records import Delivery, Webhook
from batchwright.store.store import Store
from batchwright.version import __version__

GIVE_UP_AFTER = 72 * 3600.0
"""Seconds from the event for which a message is tried."""
_BACKOFF = Backoff(first=5.0, longest=6 * 3600.0, factor=3.0, jitter=(0.75, 1.25))


def next_try(*, created_at: float, tries: int, now: float, luck: float) -> float | None:
    """Return when to try again, in Unix seconds; None: it is time to give up.

    `tries`: how many came before the one that just failed. The pauses are 5 s, 15 s, 45 s and so on up to 6 hours, each
    up to a quarter longer or shorter by `luck` (from 0 to 1), so that messages that failed together come back apart.
    The last try is at the end of the 72 hours, or right then when the service itself was away for longer.
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
"""Messages in memory, so many that one address with a long queue does not keep the others from being taken."""
_GONE = 410


class Courier:
    """Delivers for a worker, in whose name messages are taken from the store.

    `now` gives Unix seconds and `luck` numbers from 0 to 1; `poll`: seconds between looks into an empty outbox.
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

    async def serve(self, *, lease: float = 30.0) -> None:
        """Deliver until cancelled, as a worker of its own with a lease of `lease` seconds."""
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
                with suppress(StoreUnavailable):  # then what it holds is free when its lease runs out
                    await self._store.retire_worker(worker)

    async def run(self, worker: Callable[[], str | None]) -> None:
        """Deliver until cancelled. `worker` gives the id that the worker has now, which changes when a lease was lost;
        nothing is taken while there is none (None or empty).

        What was taken and not tried when this is cancelled stays the worker's until it retires.
        """
        async with asyncio.TaskGroup() as tasks:
            round_ = _Round(self._deliver, self._put_off, worker, tasks)
            while True:
                name = worker()
                taken = 0 if not name or round_.held >= _MOST_HELD else await self._take(name, round_)
                if taken < _TAKEN_AT_ONCE:
                    await asyncio.sleep(self._poll)

    async def run_once(self, worker: str) -> int:
        """Try all messages that are due, once each. Returns how many there were."""
        tried = 0
        while True:
            async with asyncio.TaskGroup() as tasks:
                taken = await self._take(worker, _Round(self._deliver, self._put_off, lambda: worker, tasks))
            if not taken:
                return tried
            tried += taken

    async def _take(self, worker: str, round_: _Round) -> int:
        try:
            taken = await _persistently(self._store.take_deliveries, worker, _TAKEN_AT_ONCE)
        except LeaseLost:
            return 0
        for delivery in taken:
            round_.add(worker, delivery)
        return len(taken)

    async def _deliver(self, worker: str, delivery: Delivery) -> str | None:
        """Send one message and record the result. Returns the reason when there was no answer at all, else None."""
        secrets = await self._secrets(delivery)
        if not secrets:
            await self._give_up(worker, delivery, "the webhook was deleted or turned off")
            return None
        body = event_body(delivery)
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
            await self._put_off(worker, delivery, answer.reason)
        crash_point("courier.after_write")
        return answer.reason if answer.status is None else None

    async def _give_up(self, worker: str, delivery: Delivery, reason: str) -> None:
        _log.warning("webhook %s (%s) is given up: %s", delivery.event_id, delivery.batch_id, reason)
        await _persistently(self._store.put_off, worker, delivery.id, until=None, reason=reason)

    async def _put_off(self, worker: str, delivery: Delivery, reason: str) -> None:
        until = next_try(created_at=delivery.created_at, tries=delivery.tries, now=self._now(), luck=self._luck())
        if until is None:
            await self._give_up(worker, delivery, f"not delivered within 72 hours; at last: {reason}")
            return
        _log.info("webhook %s (%s) was not delivered: %s", delivery.event_id, delivery.batch_id, reason)
        await _persistently(self._store.put_off, worker, delivery.id, until=until, reason=reason)

    async def _secrets(self, delivery: Delivery) -> tuple[str, ...]:
        """Return the secrets to sign with; none when the webhook is not to be used any more."""
        if delivery.webhook_id is None:
            return await _persistently(self._store.tenant_secrets, delivery.tenant, new_secret())
        webhook = await self._webhook(delivery)
        return webhook.secrets if webhook is not None and webhook.disabled_at is None else ()

    async def _webhook(self, delivery: Delivery) -> Webhook | None:
        webhooks = await _persistently(self._store.webhooks, delivery.tenant)
        return next((webhook for webhook in webhooks if webhook.id == delivery.webhook_id), None)

    async def _turn_off(self, delivery: Delivery) -> None:
        webhook = await self._webhook(delivery)
        if webhook is not None and webhook.disabled_at is None:
            _log.warning("webhook %s of tenant %s answered 410 and is turned off", webhook.id, webhook.tenant)
            off = replace(webhook, disabled_at=self._now())
            await _persistently(self._store.update_webhook, off)


class _Round:
    """Messages in memory, by address; each address that has any has a task, and a limited number of them sends."""

    def __init__(
        self,
        deliver: Callable[[str, Delivery], Awaitable[str | None]],
        put_off: Callable[[str, Delivery, str], Awaitable[None]],
        worker: Callable[[], str | None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._deliver = deliver
        self._put_off = put_off
        self._worker = worker
        self._tasks = tasks
        self._waiting: dict[str, deque[tuple[str, Delivery]]] = {}
        self._slots = asyncio.Semaphore(CONCURRENCY)

    @property
    def held(self) -> int:
        """Number of messages that wait, without those being sent."""
        return sum(map(len, self._waiting.values()))

    def add(self, worker: str, delivery: Delivery) -> None:
        address = _address(delivery.url)
        if address not in self._waiting:
            self._waiting[address] = deque()
            self._tasks.create_task(self._serve(address))
        self._waiting[address].append((worker, delivery))

    async def _serve(self, address: str) -> None:
        """Send what waits for one address, until nothing does."""
        waiting = self._waiting[address]
        silence: str | None = None
        while waiting:
            worker, delivery = waiting.popleft()
            if worker != self._worker():
                continue  # its lease was lost, so somebody else has taken this message
            if silence is not None:
                await self._put_off(worker, delivery, f"not tried: just before, {silence}")
                continue
            async with self._slots:
                silence = await self._try(worker, delivery)
        del self._waiting[address]  # nothing is awaited between the last look at it and here

    async def _try(self, worker: str, delivery: Delivery) -> str | None:
        try:
            return await self._deliver(worker, delivery)
        except Exception:
            # A defect, and no reason to keep the messages of everybody else back.
            _log.exception("webhook %s (%s) could not be sent", delivery.event_id, delivery.batch_id)
            await self._put_off(worker, delivery, "an error within the service")
            return None


def event_body(delivery: Delivery) -> bytes:
    """Return the body of a message, as JSON: a function of the event alone, so the same bytes on each try."""
    return msgspec.json.encode(
        {
            "id": delivery.event_id,
            "object": "event",
            "type": delivery.type,
            "created_at": int(delivery.created_at),
            "data": {"id": delivery.batch_id},
        }
    )


def _address(url: str) -> str:
    """Return scheme, host and port, as they are written."""
    return "/".join(url.split("/", 3)[:3]).lower()


async def _persistently(call: Callable[_P, Awaitable[_T]], *args: _P.args, **named: _P.kwargs) -> _T:
    """Return the result of a call to the store, repeated for as long as the database does not answer.

    What became of a message must be written down, else it would stay taken for as long as this process lives.
    """
    async for attempt in stamina.retry_context(on=StoreUnavailable, attempts=None, timeout=None, wait_max=10.0):
        with attempt:
            return await call(*args, **named)
    raise StoreUnavailable("the store was not asked")
