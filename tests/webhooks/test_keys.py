"""API keys: what is kept of them, and how soon a revoked one is refused."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.webhooks.outbox import START, in_event_loop, opened

from batchwright.clock import ManualClock
from batchwright.errors import InvalidRequest, NotFound, StoreUnavailable
from batchwright.service.access.api_keys import SEEN_WITHIN, ApiKeys, bounded_priority
from batchwright.store import Store
from batchwright.store.records import ApiKey
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
@in_event_loop
async def test_others_are_not_recognized(key: str, tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock(START)) as (store, _):
        assert await ApiKeys(store).recognize(key) is None


@in_event_loop
async def test_a_revoked_key_is_refused_at_once_here_and_within_seconds_elsewhere(tmp_path: Path) -> None:
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


@in_event_loop
async def test_a_new_key_works_at_once_everywhere(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with opened(tmp_path, clock) as (store, _):
        here, elsewhere = ApiKeys(store, clock=clock), ApiKeys(store, clock=clock)
        assert await elsewhere.recognize("bw-" + "A" * 43) is None
        record, key = await here.create("ci")
        assert await elsewhere.recognize(key) == record


@in_event_loop
async def test_once_there_was_a_key_one_is_always_needed(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with opened(tmp_path, clock) as (store, _):
        here, elsewhere = ApiKeys(store, clock=clock), ApiKeys(store, clock=clock)
        assert not await here.required()
        assert not await elsewhere.required()
        record, _ = await elsewhere.create("ci")
        await here.revoke(record.id)
        assert await here.required()
        assert await elsewhere.required()


class _Leaving:
    """A database with one key, which answers nothing from a certain moment on."""

    def __init__(self) -> None:
        self.there = True
        self.has_key = True
        self.asked = 0

    async def key(self, _: bytes) -> ApiKey:
        await self._answer()
        return ApiKey("key_a", "team-a", "ci", "bw-AAAAAAA", START)

    async def any_key(self) -> bool:
        await self._answer()
        return self.has_key

    async def _answer(self) -> None:
        self.asked += 1
        if not self.there:
            await asyncio.sleep(15)
            raise StoreUnavailable("it is away")


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
        database.has_key = False
        assert not await keys.required()
        # From now on a database that is away is waited for by one request in seconds, for a second.
        database.there = False
        began, database.asked = clock.now(), 0
        for _ in range(100):
            assert not await keys.required()
            await asyncio.sleep(0.1)
        assert clock.now() - began < 100 * 0.1 + 3
        assert database.asked < 5
        answers = await asyncio.gather(*[keys.required() for _ in range(50)])
        assert not any(answers)
        assert database.asked < 6
        database.there = database.has_key = True
        await asyncio.sleep(2 * SEEN_WITHIN)
        assert await keys.required()

    play(main)


@in_event_loop
async def test_a_key_works_until_it_expires_also_while_it_is_remembered(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with opened(tmp_path, clock) as (store, _):
        keys = ApiKeys(store, clock=clock, now=clock.now)
        with pytest.raises(InvalidRequest, match=r"expires_at=.*must be in the future"):
            await keys.create("ci", expires_at=START)
        record, secret = await keys.create("ci", expires_at=START + 3)
        assert await keys.recognize(secret) == record
        clock.advance(2.9)
        assert await keys.recognize(secret) == record
        clock.advance(0.1)
        assert await keys.recognize(secret) is None
        assert await ApiKeys(store, clock=clock, now=clock.now).recognize(secret) is None
        assert await keys.required()
        assert await keys.update(record.id, {"expires_at": None})
        assert await keys.recognize(secret) is not None


@pytest.mark.parametrize("overlap", [0.0, 60.0])
@in_event_loop
async def test_the_old_secret_works_for_the_overlap_after_a_rotation(overlap: float, tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with opened(tmp_path, clock) as (store, _):
        keys = ApiKeys(store, clock=clock, now=clock.now)
        record, first = await keys.create("ci", "team-a", expires_at=START + 1000)
        assert await keys.recognize(first) == record
        rotated, second = await keys.rotate(record.id, overlap)
        assert (rotated.id, rotated.prefix, rotated.previous_until) == (record.id, second[:10], START + overlap)
        new = await keys.recognize(second)
        assert new == rotated
        old = await keys.recognize(first)
        assert (old is not None and old.id == record.id) == (overlap > 0)
        clock.advance(overlap)
        assert await keys.recognize(first) is None
        assert await keys.recognize(second) == rotated
        _, third = await keys.rotate(record.id, overlap)
        _, fourth = await keys.rotate(record.id, 60)
        # Of three secrets the oldest is gone, whatever its overlap was.
        found = [await keys.recognize(each) is not None for each in (second, third, fourth)]
        assert found == [False, True, True]
        await keys.revoke(record.id)
        assert not any([await keys.recognize(each) for each in (first, second, third, fourth)])
        with pytest.raises(NotFound, match="was revoked"):
            await keys.rotate(record.id)


@in_event_loop
async def test_a_change_of_a_key_holds_here_at_once_and_elsewhere_within_seconds(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with opened(tmp_path, clock) as (store, _):
        here, elsewhere = [ApiKeys(store, clock=clock, now=clock.now) for _ in range(2)]
        record, secret = await here.create("ci", scopes=["batches", "online", "online"], weight=2.0)
        assert (record.scopes, record.weight, record.best_priority) == (("online", "batches"), 2.0, 5)
        assert await elsewhere.recognize(secret) == record
        changed = await here.update(record.id, {"scopes": ["metrics"], "best_priority": None, "weight": 0.5})
        assert changed == replace(record, scopes=("metrics",), best_priority=None, weight=0.5)
        assert await here.recognize(secret) == changed
        assert await elsewhere.recognize(secret) == record
        clock.advance(SEEN_WITHIN)
        assert await elsewhere.recognize(secret) == changed
        with pytest.raises(NotFound):
            await here.update("key_none", {"weight": 1.0})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"scopes": []}, "^scopes: none; give one or more of online, batches, metrics, admin"),
        ({"scopes": ["online", "root"]}, "^scopes: 'root'"),
        ({"weight": 0.0}, "^weight=0: must be 0.01 to 1000"),
        ({"weight": float("nan")}, "^weight=nan"),
        ({"best_priority": 2**31}, "^best_priority="),
    ],
)
@in_event_loop
async def test_what_a_key_cannot_have_is_refused(values: dict[str, Any], told: str, tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock(START)) as (store, _):
        keys = ApiKeys(store)
        with pytest.raises(InvalidRequest, match=told):
            await keys.create("ci", **values)
        record, _ = await keys.create("ci")
        with pytest.raises(InvalidRequest, match=told):
            await keys.update(record.id, values)
        assert await keys.keys() == [record]


def test_the_last_use_of_a_key_is_noted_once_a_minute_and_after_an_outage(tmp_path: Path) -> None:
    class _Counted:
        """A store that counts the notes, and refuses the first."""

        def __init__(self, store: Store) -> None:
            self._store = store
            self.notes: list[dict[str, float]] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        async def note_key_uses(self, used_at: dict[str, float]) -> None:
            self.notes.append(dict(used_at))
            if len(self.notes) == 1:
                raise StoreUnavailable("it is away")
            await self._store.note_key_uses(used_at)

    async def main() -> None:
        clock = ManualClock(START)
        async with opened(tmp_path, clock) as (store, _):
            counted = _Counted(store)
            keys = ApiKeys(cast(Store, counted), clock=clock, now=clock.now)
            record, secret = await keys.create("ci")
            for _ in range(3):
                await keys.recognize(secret)
                clock.advance(1)
            await keys.recognize("bw-" + "A" * 43)
            assert counted.notes == []
            await keys.note_uses()
            [kept] = await store.keys()
            assert kept.last_used_at is None
            for _ in range(3):
                await keys.note_uses()
            assert counted.notes == [{record.id: START + 2}] * 2
            # A server that was told late changes nothing.
            await store.note_key_uses({record.id: START})
            [kept] = await store.keys()
            assert kept.last_used_at == START + 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "best", "expected"),
    [
        ({}, 5, {}),
        ({}, 9, {"priority": 9}),
        ({"priority": None}, 9, {"priority": 9}),
        ({"priority": -100}, 5, {"priority": 5}),
        ({"priority": 7}, 5, {"priority": 7}),
        ({"priority": -100}, None, {"priority": -100}),
        ({"priority": -(2**31) - 1}, 5, {"priority": -(2**31) - 1}),
        ({"priority": "soon"}, 5, {"priority": "soon"}),
        ({"priority": 1.5}, 5, {"priority": 1.5}),
    ],
)
def test_a_priority_better_than_that_of_the_key_is_raised_to_it(
    given: dict[str, Any], best: int | None, expected: dict[str, Any]
) -> None:
    assert bounded_priority(given, best) == expected


@in_event_loop
async def test_keys_are_listed_by_tenant(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with opened(tmp_path, clock) as (store, _):
        keys = ApiKeys(store, clock=clock, now=clock.now)
        for name, tenant in (("one", "a"), ("two", "b"), ("three", "a")):
            await keys.create(name, tenant)
            clock.advance(1)
        assert [key.name for key in await keys.keys()] == ["three", "two", "one"]
        assert [key.name for key in await keys.keys("a")] == ["three", "one"]


@pytest.mark.parametrize("name", ["", " ", "a b", "-x", "x" * 65, "a\n", "ä"])
@in_event_loop
async def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock(START)) as (store, _):
        with pytest.raises(InvalidRequest, match=r"^name: "):
            await ApiKeys(store).create(name)
        with pytest.raises(InvalidRequest, match=r"^tenant: "):
            await ApiKeys(store).create("ok", name)
        with pytest.raises(NotFound, match="key_none"):
            await ApiKeys(store).revoke("key_none")
