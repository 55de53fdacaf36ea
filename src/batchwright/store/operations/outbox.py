"""Operations on webhooks and on the outbox: the messages on their way to them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from batchwright.store.operations.workers import require_lease
from batchwright.store.records import Delivery, Webhook
from batchwright.store.transaction import Row, Tx


def _values(webhook: Webhook) -> Mapping[str, Any]:
    return asdict(webhook) | {"secrets": json.dumps(webhook.secrets)}


def add_webhook(tx: Tx, webhook: Webhook) -> None:
    tx.run("add_webhook", **_values(webhook))


def _as_webhook(row: Row) -> Webhook:
    webhook_id, tenant, url, secrets_, created_at, disabled_at = row
    return Webhook(webhook_id, tenant, url, tuple(json.loads(secrets_)), created_at, disabled_at)


def webhooks(tx: Tx, tenant: str) -> list[Webhook]:
    return [_as_webhook(row) for row in tx.rows("webhooks", tenant=tenant)]


def update_webhook(tx: Tx, tenant: str, webhook_id: str, changes: Mapping[str, Any]) -> Webhook | None:
    """Replace fields of a webhook by name: `url`, `disabled_at`. Others keep what they have in the store.

    Messages on their way to it go to the new URL, or are given up if it is turned off.
    Returns the webhook as it is afterwards; None if there is no such webhook.
    """
    row = tx.row("lock_webhook", tenant=tenant, id=webhook_id)
    if row is None:
        return None
    webhook = replace(_as_webhook(row), **changes)
    tx.run("update_webhook", **_values(webhook))
    if webhook.disabled_at is None:
        tx.run("redirect_deliveries", webhook_id=webhook.id, url=webhook.url)
    else:
        tx.run("give_up_deliveries", webhook_id=webhook.id, now=tx.now, reason="the webhook was turned off")
    return webhook


def rotate_webhook(tx: Tx, tenant: str, webhook_id: str, new: str) -> Webhook | None:
    """Make `new` the newest secret of a webhook. Of the earlier ones, only the newest is kept.

    Returns the webhook as it is afterwards; None if there is no such webhook.
    """
    row = tx.row("lock_webhook", tenant=tenant, id=webhook_id)
    if row is None:
        return None
    before = _as_webhook(row)
    webhook = replace(before, secrets=(new, before.secrets[0]))
    tx.run("update_webhook", **_values(webhook))
    return webhook


def delete_webhook(tx: Tx, tenant: str, webhook_id: str) -> bool:
    """Delete a webhook, and give up the messages on their way to it. False if there is no such webhook."""
    if not tx.run("delete_webhook", id=webhook_id, tenant=tenant):
        return False
    tx.run("give_up_deliveries", webhook_id=webhook_id, now=tx.now, reason="the webhook was deleted")
    return True


def tenant_secrets(tx: Tx, tenant: str, new: str) -> tuple[str, ...]:
    """The secrets that sign callbacks of this tenant, newest first; the tenant gets `new` if it has none yet."""
    tx.run("add_tenant_secret", tenant=tenant, secret=new)
    [found] = tx.rows("tenant_secrets", tenant=tenant)
    return tuple(secret for secret in found if secret is not None)


def rotate_tenant_secret(tx: Tx, tenant: str, new: str) -> None:
    """Make `new` the newest secret of a tenant's callbacks. Of the earlier ones, only the newest is kept."""
    tx.run("rotate_tenant_secret", tenant=tenant, secret=new)


def announce(tx: Tx, key: int, kind: str) -> None:
    """Put an event about the batch of this key into the outbox, once for each address to notify."""
    [(batch_id, tenant, callback_url)] = tx.rows("event_of_batch", key=key)
    addresses = tx.rows("webhooks_to_notify", tenant=tenant)
    if callback_url is not None:
        addresses.append((callback_url, None))
    event_id = f"evt_{secrets.token_hex(12)}"
    for url, webhook_id in addresses:
        message = {"event_id": event_id, "tenant": tenant, "type": kind, "batch_id": batch_id, "now": tx.now}
        tx.run("add_delivery", id=f"dlv_{secrets.token_hex(12)}", url=url, webhook_id=webhook_id, **message)


def take_deliveries(tx: Tx, worker: str, limit: int) -> list[Delivery]:
    """Take messages that are due and that no other worker is delivering, oldest first.

    Each counts as a try, unless the worker is removed before it reports the outcome. Raises `LeaseLost`.
    """
    require_lease(tx, worker)
    taken = [Delivery(*row) for row in tx.rows("take_deliveries", worker=worker, now=tx.now, limit=limit)]
    return sorted(taken, key=lambda delivery: (delivery.created_at, delivery.id))


def delivered(tx: Tx, worker: str, delivery_id: str) -> bool:
    """Remove a delivered message from the outbox. Returns False if it is no longer this worker's."""
    return tx.run("delivered", id=delivery_id, worker=worker) == 1


def put_off(tx: Tx, worker: str, delivery_id: str, *, until: float | None, reason: str) -> bool:
    """Try a failed message again at `until`, or give it up (None). Returns False if it is no longer this worker's."""
    if until is None:
        return tx.run("give_up", id=delivery_id, worker=worker, now=tx.now, reason=reason) == 1
    return tx.run("put_off", id=delivery_id, worker=worker, until=until, reason=reason) == 1


def postpone(tx: Tx, worker: str, until: Mapping[str, float]) -> None:
    """Give messages back untried, to be taken again at the given times, by their ids.

    That they were taken does not count as a try. Those that are no longer this worker's do not change.
    """
    tx.many("postpone", [{"id": each, "worker": worker, "until": until[each]} for each in sorted(until)])


def failed_deliveries(tx: Tx, tenant: str, limit: int) -> list[tuple[Delivery, str]]:
    """Messages that were given up, newest first, with the reasons."""
    return [(Delivery(*row[:9]), row[9]) for row in tx.rows("failed_deliveries", tenant=tenant, limit=limit)]


def forget_deliveries(tx: Tx, limit: int, *, age: float) -> bool:
    """Remove at most `limit` messages that were given up `age` seconds ago or earlier.

    Returns whether there may be more.
    """
    return tx.run("forget_deliveries", before=tx.now - age, limit=limit) == limit


def count_deliveries(tx: Tx) -> dict[str, int]:
    """Numbers of `pending` and `failed` messages, for the metrics."""
    [(total, failed)] = tx.rows("count_deliveries")
    return {"pending": total - failed, "failed": failed}
