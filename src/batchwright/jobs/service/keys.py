"""API keys: given out once, kept as a digest, looked up on each request."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable

from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import InvalidRequest, NotFound, StoreUnavailable
from batchwright.jobs.store.interface import Store
from batchwright.jobs.store.records import ApiKey

DEFAULT_TENANT = "default"
"""Whose everything is where no keys are used."""
SEEN_WITHIN = 5.0
"""Seconds within which a revocation by another process takes effect here."""
_PATIENCE = 1.0
"""Seconds that a request waits for the database to confirm what was known before."""
_PREFIX = "bw-"
_RANDOM_BYTES = 32
_SHOWN = 10
"""Characters of a key that are kept to recognize it by: `bw-` and 7 of its 43 random ones."""
_KEY = re.compile(r"bw-[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class ApiKeys:
    """Makes, lists, revokes and recognizes keys. `clock` is monotonic; `now` gives Unix seconds.

    A key that was recognized is remembered for `SEEN_WITHIN` seconds, and for as many again when the database does not
    answer then, so that online requests go on without it. One that was not is looked up each time, so a new
    key works at once. Only the SHA-256 digest of what is presented is ever compared: a digest cannot be chosen, so how
    long a comparison takes tells nothing about a key. A slow hash, as for passwords, would add nothing to 256 random
    bits.
    """

    def __init__(self, store: Store, *, clock: Clock | None = None, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock or MonotonicClock()
        self._now = now
        self._seen: dict[bytes, tuple[float, ApiKey]] = {}
        self._any = False
        self._asked_at: float | None = None
        """When it was last known that there was none."""

    async def create(self, name: str, tenant: str = DEFAULT_TENANT) -> tuple[ApiKey, str]:
        """A new key: what is kept of it, and the key itself, which is not. Raises `InvalidRequest` for a bad name."""
        for param, value in (("name", name), ("tenant", tenant)):
            if not _NAME.fullmatch(value):
                raise InvalidRequest(
                    f"{param}: {value[:80]!r} cannot be one; use 1 to 64 letters, digits and . _ @ -, "
                    "a letter or digit first",
                    param=param,
                )
        key = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
        record = ApiKey(
            id=f"key_{secrets.token_hex(12)}", tenant=tenant, name=name, prefix=key[:_SHOWN], created_at=self._now()
        )
        await self._store.add_key(record, _digest(key))
        self._any = True
        return record, key

    async def keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Revoked ones too, the newest first; None: of all tenants."""
        return await self._store.keys(tenant)

    async def revoke(self, key_id: str) -> None:
        """From now on it is not recognized here, and within `SEEN_WITHIN` seconds nowhere. Raises `NotFound`."""
        self._seen.clear()
        revoked = await self._store.revoke_key(key_id)
        self._seen.clear()  # again: a request may have looked it up meanwhile
        if not revoked:
            raise NotFound(f"key {key_id!r} does not exist; `batchwright keys list` shows those that do")

    async def recognize(self, key: str) -> ApiKey | None:
        """The key that was presented, or None when it was never given out or is revoked.

        One that was recognized before is taken while the database is away. Raises `StoreUnavailable` for another.
        """
        if not _KEY.fullmatch(key):
            return None
        digest = _digest(key)
        asked_at = self._clock.now()
        until, seen = self._seen.get(digest, (0.0, None))
        if seen is not None and asked_at < until:
            return seen
        try:
            async with asyncio.timeout(None if seen is None else _PATIENCE):
                found = await self._store.key(digest)
        except (StoreUnavailable, TimeoutError):
            if seen is None:
                raise
            if digest in self._seen:
                self._seen[digest] = (self._clock.now() + SEEN_WITHIN, seen)
            return seen
        if found is None:
            self._seen.pop(digest, None)
        else:
            self._seen[digest] = (asked_at + SEEN_WITHIN, found)
        return found

    async def required(self) -> bool:
        """Whether a key was ever given out; the first one is noticed within `SEEN_WITHIN` seconds.

        One that is revoked counts: revoking the last key must not open the door. Raises `StoreUnavailable` until it was
        once known; after that, nobody makes a first key while the database is away.
        """
        now = self._clock.now()
        if not self._any and (self._asked_at is None or now - self._asked_at >= SEEN_WITHIN):
            try:
                async with asyncio.timeout(None if self._asked_at is None else _PATIENCE):
                    self._any = bool(await self._store.keys()) or self._any
            except (StoreUnavailable, TimeoutError):
                if self._asked_at is None:
                    raise
            # Only now: nobody is let in while the answer is on its way.
            self._asked_at = now
        return self._any


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
