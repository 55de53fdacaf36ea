"""A tenant's webhooks: making, listing, rotating, turning off, deleting."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from batchwright.errors import Conflict, NotFound
from batchwright.service.webhooks.sender import Sender
from batchwright.service.webhooks.signing import new_secret
from batchwright.store.records import Delivery, Webhook
from batchwright.store.store import Store

MOST = 64
"""Webhooks of a tenant: each end of a batch is told to all of them."""


class Webhooks:
    """What the faces offer of webhooks. `now` gives Unix seconds."""

    def __init__(self, store: Store, sender: Sender, *, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._sender = sender
        self._now = now

    async def create(self, tenant: str, url: str) -> Webhook:
        """A new webhook with a new secret. Raises `UrlRefused`, and `Conflict` when the tenant has too many."""
        await self._sender.check_host(url)
        if len(await self._store.webhooks(tenant)) >= MOST:
            raise Conflict(f"tenant {tenant!r} has {MOST} webhooks, the most there can be; delete one first")
        webhook = Webhook(
            id=f"wh_{secrets.token_hex(12)}", tenant=tenant, url=url, secrets=(new_secret(),), created_at=self._now()
        )
        await self._store.add_webhook(webhook)
        return webhook

    async def webhooks(self, tenant: str) -> list[Webhook]:
        """All of the tenant's, those that are turned off included."""
        return await self._store.webhooks(tenant)

    async def rotate(self, tenant: str, webhook_id: str) -> Webhook:
        """Give it a new secret. Messages are signed with the one before too, until the next rotation.

        So receivers can take over the new one at any time. Raises `NotFound`.
        """
        webhook = await self._get(tenant, webhook_id)
        return await self._replace(replace(webhook, secrets=(new_secret(), webhook.secrets[0])))

    async def disable(self, tenant: str, webhook_id: str) -> Webhook:
        """Turn it off: messages that wait for it are given up. Raises `NotFound`."""
        webhook = await self._get(tenant, webhook_id)
        return webhook if webhook.disabled_at else await self._replace(replace(webhook, disabled_at=self._now()))

    async def enable(self, tenant: str, webhook_id: str) -> Webhook:
        """Turn it on again, for batches that end from now on. Raises `NotFound`."""
        return await self._replace(replace(await self._get(tenant, webhook_id), disabled_at=None))

    async def delete(self, tenant: str, webhook_id: str) -> None:
        """Remove it; messages that wait for it are given up. Raises `NotFound`."""
        if not await self._store.delete_webhook(tenant, webhook_id):
            raise _not_found(webhook_id)

    async def failed(self, tenant: str, limit: int = 100) -> list[tuple[Delivery, str]]:
        """Messages that were given up, the newest first, with the reasons."""
        return await self._store.failed_deliveries(tenant, limit)

    async def callback_secret(self, tenant: str) -> str:
        """What messages to a `callback_url` of the tenant are signed with; made when first asked for."""
        return (await self._store.tenant_secrets(tenant, new_secret()))[0]

    async def rotate_callback_secret(self, tenant: str) -> str:
        """A new one. Messages are signed with the one before too, until the next rotation."""
        secret = new_secret()
        await self._store.rotate_tenant_secret(tenant, secret)
        return secret

    async def _get(self, tenant: str, webhook_id: str) -> Webhook:
        for webhook in await self._store.webhooks(tenant):
            if webhook.id == webhook_id:
                return webhook
        raise _not_found(webhook_id)

    async def _replace(self, webhook: Webhook) -> Webhook:
        if not await self._store.update_webhook(webhook):
            raise _not_found(webhook.id)
        return webhook


def _not_found(webhook_id: str) -> NotFound:
    return NotFound(f"webhook {webhook_id!r} does not exist; `batchwright webhooks list` shows those that do")
