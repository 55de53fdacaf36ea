"""API keys: what is kept of them, and how soon a revoked one is refused."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import cast

import pytest
from tests.webhooks.outbox import START, opened

from batchwright.clock import ManualClock
from batchwright.errors import InvalidRequest, NotFound, StoreUnavailable
from batchwright.jobs.service.keys import SEEN_WITHIN, ApiKeys
from batchwright.jobs.store import Store
from batchwright.jobs.store.records import ApiKey
from batchwright.testing import play


def test_a_key_is_recognized_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    async def main() -> str:
        clock = ManualClock(START)
        async with opened(tmp_path, clock) as (store, _):
            keys = ApiKeys(store, clock=clock, now=clock.now)
            record, key = await keys.create("ci", "team-a")
            assert (record.name, record.tenant, record.created_at) == ("ci", "team-a", START)
            assert record.id.startswith("key_")
            assert key.startswith("bw-")
            assert len(key) == 46
            assert record.prefix == key[:10]
            assert await keys.recognize(key) == record
            assert await store.key(hashlib.sha256(key.encode()).digest()) == record
            assert (await keys.create("ci", "team-a"))[1] != key
            return key

    key = asyncio.run(main())
    for file in tmp_path.iterdir():
        assert key.encode() not in file.read_bytes()


@pytest.mark.parametrize(
    "key", ["", "bw-", "sk-abc", "bw-" + "A" * 43, "bw-" + "ä" * 43, "bw-" + "A" * 1_000_000, "\x00"]
)
def test_others_are_not_recognized(key: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, ManualClock(START)) as (store, _):
            assert await ApiKeys(store).recognize(key) is None

    asyncio.run(main())


def test_a_revoked_key_is_refused_at_once_here_and_within_seconds_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock(START)
        async with opened(tmp_path, clock) as (store, _):
            here, elsewhere = ApiKeys(store, clock=clock), ApiKeys(store, clock=clock)
            record, key = await here.create("ci")
            assert await here.recognize(key) == await elsewhere.recognize(key) == record
            await here.revoke(record.id)
            assert await here.recognize(key) is None
            clock.advance(SEEN_WITHIN - 0.01)
            assert await elsewhere.recognize(key) == record
            clock.advance(0.01)
            assert await elsewhere.recognize(key) is None
            [kept] = await here.keys()
            assert kept.revoked_at is not None

    asyncio.run(main())


def test_a_new_key_works_at_once_everywhere(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock(START)
        async with opened(tmp_path, clock) as (store, _):
            here, elsewhere = ApiKeys(store, clock=clock), ApiKeys(store, clock=clock)
            assert await elsewhere.recognize("bw-" + "A" * 43) is None
            record, key = await here.create("ci")
            assert await elsewhere.recognize(key) == record

    asyncio.run(main())


def test_once_there_was_a_key_one_is_always_needed(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock(START)
        async with opened(tmp_path, clock) as (store, _):
            here, elsewhere = ApiKeys(store, clock=clock), ApiKeys(store, clock=clock)
            assert not await here.required()
            assert not await elsewhere.required()
            record, _ = await here.create("ci")
            await here.revoke(record.id)
            assert await here.required()
            assert not await elsewhere.required()
            clock.advance(SEEN_WITHIN)
            assert await elsewhere.required()

    asyncio.run(main())


class _Leaving:
    """A database with one key, which answers nothing from a certain moment on."""

    def __init__(self) -> None:
        self.there = True
        self.asked = 0

    async def key(self, _: bytes) -> ApiKey:
        return (await self.keys())[0]

    async def keys(self) -> list[ApiKey]:
        self.asked += 1
        if not self.there:
            await asyncio.sleep(15)
            raise StoreUnavailable("it is away")
        return [ApiKey("key_a", "team-a", "ci", "bw-AAAAAAA", START)]


def test_requests_with_a_known_key_do_not_wait_for_a_database_that_is_away() -> None:
    async def main(clock: ManualClock) -> None:
        database = _Leaving()
        keys, key = ApiKeys(cast(Store, database), clock=clock), "bw-" + "A" * 43
        known = await keys.recognize(key)
        database.there = False
        began, database.asked = clock.now(), 0
        for _ in range(100):
            assert await keys.recognize(key) == known
            await asyncio.sleep(0.5)
        assert clock.now() - began < 100 * 0.5 + 10
        assert database.asked < 10
        with pytest.raises(StoreUnavailable):
            await keys.recognize("bw-" + "B" * 43)

    play(main)


def test_whether_a_key_is_needed_is_not_waited_for_either() -> None:
    async def main(clock: ManualClock) -> None:
        database = _Leaving()
        keys = ApiKeys(cast(Store, database), clock=clock)
        database.there = False
        with pytest.raises(StoreUnavailable):
            await keys.required()
        database.there = True
        assert await keys.required()

    play(main)


def test_keys_are_listed_by_tenant(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock(START)
        async with opened(tmp_path, clock) as (store, _):
            keys = ApiKeys(store, clock=clock, now=clock.now)
            for name, tenant in (("one", "a"), ("two", "b"), ("three", "a")):
                await keys.create(name, tenant)
                clock.advance(1)
            assert [key.name for key in await keys.keys()] == ["three", "two", "one"]
            assert [key.name for key in await keys.keys("a")] == ["three", "one"]

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", " ", "a b", "-x", "x" * 65, "a\n", "ä"])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, ManualClock(START)) as (store, _):
            with pytest.raises(InvalidRequest, match=r"^name: "):
                await ApiKeys(store).create(name)
            with pytest.raises(InvalidRequest, match=r"^tenant: "):
                await ApiKeys(store).create("ok", name)
            with pytest.raises(NotFound, match="key_none"):
                await ApiKeys(store).revoke("key_none")

    asyncio.run(main())
