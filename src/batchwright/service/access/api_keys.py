"""API keys, which are shown once, stored as a digest, and looked up for each request."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import InvalidRequest, NotFound, StoreUnavailable, shown
from batchwright.limiting.quotas import UNLIMITED, Quotas
from batchwright.limiting.shares import WEIGHTS
from batchwright.service.new_ids import new_id
from batchwright.store.records import ApiKey, KeyScope
from batchwright.store.store import Store
from batchwright.wire.fields import DEFAULT_PRIORITY, RANGES

DEFAULT_TENANT = "default"
"""Tenant that owns everything where no keys are used."""
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
DEFAULT_SCOPES: tuple[KeyScope, ...] = ("online", "batches")
"""Default scopes of a key: all but `metrics`, which shows all tenants, and `admin`, which makes keys for any."""
DEFAULT_OVERLAP = 86_400.0
"""Seconds for which the previous secret works after a rotation."""
SEEN_WITHIN = 5.0
"""Seconds within which a revocation or another change by another process takes effect here."""
LONGEST_UNCONFIRMED = 600.0
"""Seconds for which a known key is accepted while the database does not answer."""
_MOST_OVERLAP = 30 * 86_400.0
_PATIENCE = 1.0
"""Seconds for which a request waits for the database to confirm what was known before."""
_NOTED_EVERY = 60.0
_PREFIX = "bw-"
_RANDOM_BYTES = 32
_SHOWN = 10
"""Number of characters of a secret that are stored and shown: `bw-` and 7 of the 43 random ones."""
_KEY = re.compile(r"bw-[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_END_OF_YEARS = 253_402_300_800
"""Unix seconds of the year 10000; milliseconds given by mistake are later."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Recognized key. Times are those of the clock."""

    key: ApiKey
    until: float
    """Time until which the store need not confirm it."""
    confirmed: float
    """Time of the last confirmation by the store."""


class ApiKeys:
    """API keys of a store. `clock` is monotonic; `now` gives Unix seconds.

    A recognized key is remembered for `SEEN_WITHIN` seconds, and for `LONGEST_UNCONFIRMED` while the database does not
    answer, so that online requests go on. An unknown key is looked up each time, so a new key works at once. Only
    SHA-256 digests are compared: a digest cannot be chosen, so the time of a comparison reveals nothing about a key. A
    slow hash, as for passwords, would add nothing to 256 random bits.
    """

    def __init__(self, store: Store, *, clock: Clock | None = None, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock or MonotonicClock()
        self._now = now
        self._seen: dict[bytes, _Seen] = {}
        self._changes = 0
        """Number of key changes by this process; lookups that began before the last change are not remembered."""
        self._lookups: dict[bytes, asyncio.Task[ApiKey | None]] = {}
        self._used: dict[str, float] = {}
        """Unix seconds of the last uses of keys that are not recorded in the store yet."""
        self._any = False
        self._none_before = False
        """Whether the store once answered that there was no key."""
        self._ask_again_at = float("-inf")
        """Time of the clock until which the store is not asked whether there is a key, after it did not answer."""

    async def create(
        self,
        name: str,
        tenant: str = DEFAULT_TENANT,
        *,
        expires_at: float | None = None,
        scopes: Sequence[str] = DEFAULT_SCOPES,
        weight: float = 1.0,
        best_priority: int | None = DEFAULT_PRIORITY,
        quotas: Quotas = UNLIMITED,
    ) -> tuple[ApiKey, str]:
        """Make a new key, and return its record and its secret, which is not stored.

        `expires_at`: Unix seconds; None: never. `weight`: share of its online requests relative to other keys.
        `best_priority`: smallest `priority` that its requests can have; None: any. Raises `InvalidRequest`.
        """
        asked = {"name": name, "tenant": tenant, "expires_at": expires_at, "scopes": scopes, "weight": weight}
        chosen = self._checked(asked | {"best_priority": best_priority})
        secret = _new_secret()
        record = ApiKey(id=new_id("key_"), prefix=secret[:_SHOWN], created_at=self._now(), quotas=quotas, **chosen)
        await self._store.add_key(record, _digest(secret))
        self._any = True
        return record, secret

    async def keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Return the keys of a tenant (None: of all tenants), including revoked ones, newest first."""
        return await self._store.keys(tenant)

    async def key(self, key_id: str) -> ApiKey:
        """Return the key with this id, even if it was revoked. Raises `NotFound`."""
        return _found(next((key for key in await self._store.keys() if key.id == key_id), None), key_id)

    async def update(self, key_id: str, changes: Mapping[str, Any]) -> ApiKey:
        """Change `name`, `expires_at`, `scopes`, `weight` or `best_priority` where given, and quotas by name.

        Takes effect here at once, and within `SEEN_WITHIN` seconds everywhere. Raises `NotFound` and `InvalidRequest`.
        """
        changed = await self._store.update_key(key_id, self._checked(changes))
        self._forget_all()
        return _found(changed, key_id)

    async def rotate(self, key_id: str, overlap: float = DEFAULT_OVERLAP) -> tuple[ApiKey, str]:
        """Give a key a new secret, and change nothing else.

        The previous secret works for `overlap` more seconds; older ones stop working. Raises `InvalidRequest`, and
        `NotFound`, also for a revoked key.
        """
        if not 0.0 <= overlap <= _MOST_OVERLAP:
            raise InvalidRequest(
                f"overlap={overlap:g}: must be 0 to {_MOST_OVERLAP:g} seconds (30 days)", param="overlap"
            )
        secret = _new_secret()
        rotated = await self._store.rotate_key(key_id, _digest(secret), secret[:_SHOWN], overlap)
        self._forget_all()
        return _found(rotated, key_id, "or was revoked"), secret

    async def revoke(self, key_id: str) -> None:
        """Revoke a key, at once here and within `SEEN_WITHIN` seconds everywhere. Raises `NotFound`."""
        revoked = await self._store.revoke_key(key_id)
        self._forget_all()
        if not revoked:
            raise _unknown(key_id)

    async def recognize(self, secret: str) -> ApiKey | None:
        """Return the key with this secret; None: it was never issued, was revoked or has expired.

        While the database is away, keys recognized before are accepted; others raise `StoreUnavailable`.
        """
        if not _KEY.fullmatch(secret):
            return None
        found = await self._looked_up(_digest(secret))
        now = self._now()
        if found is None or (found.expires_at is not None and found.expires_at <= now):
            return None
        self._used[found.id] = now
        return found

    def _forget_all(self) -> None:
        """Forget the recognized keys, because one was changed."""
        self._changes += 1
        self._seen.clear()

    async def _looked_up(self, digest: bytes) -> ApiKey | None:
        now = self._clock.now()
        seen = self._seen.get(digest)
        if seen is not None and now < seen.until:
            return seen.key
        # One lookup at a time, which is not cancelled with the requests that wait for it: a late answer still counts.
        lookup = self._lookups.get(digest)
        if lookup is None:
            lookup = self._lookups[digest] = asyncio.create_task(self._look_up(digest))
            lookup.add_done_callback(lambda _: self._lookups.pop(digest, None))
        if seen is None:
            return await asyncio.shield(lookup)
        try:
            async with asyncio.timeout(_PATIENCE):
                return await asyncio.shield(lookup)
        except (StoreUnavailable, TimeoutError):
            if self._clock.now() - seen.confirmed >= LONGEST_UNCONFIRMED:
                raise StoreUnavailable("the database has not confirmed the key for too long: see to it") from None
            if digest in self._seen:
                self._seen[digest] = _Seen(seen.key, self._clock.now() + SEEN_WITHIN, seen.confirmed)
            return seen.key

    async def _look_up(self, digest: bytes) -> ApiKey | None:
        asked_at, changes = self._clock.now(), self._changes
        found = await self._store.key(digest)
        if found is None:
            self._seen.pop(digest, None)
        elif changes == self._changes:
            self._seen[digest] = _Seen(found, asked_at + SEEN_WITHIN, asked_at)
        return found

    async def required(self) -> bool:
        """Return whether a key was ever issued, even a revoked one: revoking the last key must not open the service.

        While there is none, the store is asked each time, so the first key is required from the next request on,
        whichever process made it. Raises `StoreUnavailable` until the store has answered once. After that, while the
        database is away there is still no key, since none can be made; one request per `SEEN_WITHIN` seconds waits.
        """
        if self._any:
            return True
        if self._clock.now() < self._ask_again_at:
            return False
        if self._ask_again_at > float("-inf"):
            self._ask_again_at = self._clock.now() + SEEN_WITHIN
        try:
            async with asyncio.timeout(_PATIENCE if self._none_before else None):
                self._any = await self._store.any_key() or self._any
        except (StoreUnavailable, TimeoutError):
            if not self._none_before:
                raise
            self._ask_again_at = self._clock.now() + SEEN_WITHIN
            return self._any
        self._none_before, self._ask_again_at = True, float("-inf")
        return self._any

    async def run(self) -> None:
        """Record the uses of keys once a minute until cancelled."""
        while True:
            await asyncio.sleep(_NOTED_EVERY)
            await self.note_uses()

    async def note_uses(self) -> None:
        """Record in the store the uses of keys since the last call; if it does not answer, the next call does."""
        used, self._used = self._used, {}
        if not used:
            return
        try:
            with suppress(StoreUnavailable):
                await self._store.note_key_uses(used)
                used = {}
        finally:
            self._used = used | self._used

    def _checked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `values`, by field, if they are valid. Raises `InvalidRequest`."""
        checked = dict(values)
        for param in ("name", "tenant"):
            if param in checked:
                require_name(param, checked[param])
        if "scopes" in checked:
            checked["scopes"] = _scopes_of(checked["scopes"])
        _require_range("weight", checked.get("weight", 1.0), WEIGHTS)
        if checked.get("best_priority") is not None:
            _require_range("best_priority", checked["best_priority"], RANGES["priority"])
        expires_at = checked.get("expires_at")
        if expires_at is not None and not self._now() < expires_at < _END_OF_YEARS:
            raise InvalidRequest(
                f"expires_at={expires_at:.0f}: must be in the future, in Unix seconds", param="expires_at"
            )
        return checked


def require_name(param: str, value: str) -> str:
    """Return `value` if it is a valid name of a key or a tenant. Raises `InvalidRequest`."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"{param}: {shown(value)} cannot be one; use 1 to 64 letters, digits and . _ @ -, a letter or digit first",
            param=param,
        )
    return value


def bounded_priority(body: Mapping[str, Any], best: int | None) -> Mapping[str, Any]:
    """Return `body` with its `priority` raised to `best` if it is smaller, that is, more urgent.

    It is not refused, so that one program works with any key: a priority does not change the answer.
    """
    priority = body.get("priority")
    given = DEFAULT_PRIORITY if priority is None else priority
    # An invalid priority is refused later, when the body is read.
    if best is None or type(given) is not int or not RANGES["priority"][0] <= given < best:
        return body
    return {**body, "priority": best}


def _scopes_of(values: Sequence[str]) -> tuple[KeyScope, ...]:
    """Return valid scopes in the order of `SCOPES`, without duplicates. Raises `InvalidRequest`."""
    unknown = [each for each in values if each not in SCOPES]
    if unknown or not values:
        given = ", ".join(map(repr, unknown)) or "none"
        raise InvalidRequest(f"scopes: {given}; give one or more of {', '.join(SCOPES)}", param="scopes")
    return tuple(each for each in SCOPES if each in values)


def _require_range(name: str, value: float, bounds: tuple[float, float]) -> None:
    if not bounds[0] <= value <= bounds[1]:
        raise InvalidRequest(f"{name}={value:g}: must be {bounds[0]:g} to {bounds[1]:g}", param=name)


def _found(key: ApiKey | None, key_id: str, otherwise: str = "") -> ApiKey:
    if key is None:
        raise _unknown(key_id, otherwise)
    return key


def _unknown(key_id: str, otherwise: str = "") -> NotFound:
    what = f"does not exist {otherwise}".strip()
    return NotFound(f"key {key_id!r} {what}; `batchwright keys list` shows those that do")


def _new_secret() -> str:
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
