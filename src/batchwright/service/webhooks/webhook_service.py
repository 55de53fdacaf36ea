"""A tenant's webhooks: creation, listing, rotation, disabling, deletion."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from batchwright.errors import Conflict, NotFound
from batchwright.service.new_ids import new_id
from batchwright.service.webhooks.sender import Sender
from batchwright.service.webhooks.signing import new_secret
from batchwright.store.records import Delivery, Webhook
from batchwright.store.store import Store

MOST = 64
"""Most webhooks of a tenant; each end of a batch is sent to all of them."""


class Webhooks:
    """Operations on webhooks, for HTTP and the command line. `now` gives Unix seconds."""

    def __init__(self, store: Store, sender: Sender, *, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._sender = sender
        self._now = now

    async def create(self, tenant: str, url: str) -> Webhook:
        """Make a webhook with a new secret. Raises `UrlRefused`, and `Conflict` when the tenant has too many."""
        await self._sender.check_host(url)
        if len(await self._store.webhooks(tenant)) >= MOST:
            raise Conflict(f"tenant {tenant!r} has {MOST} webhooks, the most there can be; delete one first")
        secrets = (new_secret(),)
        webhook = Webhook(id=new_id("wh_"), tenant=tenant, url=url, secrets=secrets, created_at=self._now())
        await self._store.add_webhook(webhook)
        return webhook

    async def webhooks(self, tenant: str) -> list[Webhook]:
        """Return all of the tenant's webhooks, disabled ones included."""
        return await self._store.webhooks(tenant)

    async def rotate(self, tenant: str, webhook_id: str) -> Webhook:
        """Give a webhook a new secret. Until the next rotation, messages are signed with the previous one too.

        Receivers can therefore switch to the new one at any time. Raises `NotFound`.
        """
        return _found(await self._store.rotate_webhook(tenant, webhook_id, new_secret()), webhook_id)

    async def disable(self, tenant: str, webhook_id: str) -> Webhook:
        """Disable a webhook, and give up its waiting messages. Raises `NotFound`."""
        webhook = await self._get(tenant, webhook_id)
        return webhook if webhook.disabled_at else await self._update(tenant, webhook_id, disabled_at=self._now())

    async def enable(self, tenant: str, webhook_id: str) -> Webhook:
        """Enable a webhook again, for batches that end from now on. Raises `NotFound`."""
        return await self._update(tenant, webhook_id, disabled_at=None)

    async def delete(self, tenant: str, webhook_id: str) -> None:
        """Delete a webhook, and give up its waiting messages. Raises `NotFound`."""
        if not await self._store.delete_webhook(tenant, webhook_id):
            raise _not_found(webhook_id)

    async def failed(self, tenant: str, limit: int = 100) -> list[tuple[Delivery, str]]:
        """Return messages that were given up, with the reasons, newest first."""
        return await self._store.failed_deliveries(tenant, limit)

    async def callback_secret(self, tenant: str) -> str:
        """Return the secret that signs messages to a `callback_url` of the tenant; make it if there is none."""
        return (await self._store.tenant_secrets(tenant, new_secret()))[0]

    async def rotate_callback_secret(self, tenant: str) -> str:
        """Replace that secret. Until the next rotation, messages are signed with the previous one too."""
        secret = new_secret()
        await self._store.rotate_tenant_secret(tenant, secret)
        return secret

    async def _get(self, tenant: str, webhook_id: str) -> Webhook:
        for webhook in await self._store.webhooks(tenant):
            if webhook.id == webhook_id:
                return webhook
        raise _not_found(webhook_id)

    async def _update(self, tenant: str, webhook_id: str, **changes: Any) -> Webhook:
        return _found(await self._store.update_webhook(tenant, webhook_id, changes), webhook_id)


def _found(webhook: Webhook | None, webhook_id: str) -> Webhook:
    if webhook is None:
        raise _not_found(webhook_id)
    return webhook


def _not_found(webhook_id: str) -> NotFound:
    return NotFound(f"webhook {webhook_id!r} does not exist; `batchwright webhooks list` shows those that do")
