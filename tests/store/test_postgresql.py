"""What only PostgreSQL's driver has: connections that are lost, a server that restarts, clocks that differ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from tests.postgres import PostgresServer
from tests.store.support import START, World, new_lines, play, result

from batchwright.errors import InvalidRequest, StoreUnavailable
from batchwright.store import open_store, postgresql, store_exists
from batchwright.store.operations import files
from batchwright.store.records import LineCounts, NewLine
from batchwright.store.transaction import Tx


@pytest.fixture
def away(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """The server, for tests that stop it."""
    yield postgres
    postgres.restart()


def _breaking(monkeypatch: pytest.MonkeyPatch, when: Callable[[str], bool], how: Callable[..., None]) -> list[str]:
    """The next statement that `when` picks goes wrong as `how` says. The list of those that did."""
    broken: list[str] = []
    execute = psycopg.Connection.execute

    def executed(self: psycopg.Connection[Any], query: Any, *arguments: Any, **options: Any) -> Any:
        if not broken and when(str(query)):
            broken.append(str(query))
            how(self, lambda: execute(self, query, *arguments, **options))
        return execute(self, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Connection, "execute", executed)
    return broken


def _lost(connection: psycopg.Connection[Any], run: Callable[[], Any]) -> None:
    connection.close()
    raise psycopg.OperationalError("server closed the connection unexpectedly")


def _lost_afterwards(connection: psycopg.Connection[Any], run: Callable[[], Any]) -> None:
    run()
    _lost(connection, run)


@pytest.mark.parametrize("how", [_lost, _lost_afterwards])
def test_a_connection_that_is_lost_in_commit(emptied: str, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """Whether or not the server had committed: it is done once, and the caller gets the right answer."""

    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker()
        batch = await world.running(worker, 4, callback_url="https://example.com")
        broken = _breaking(monkeypatch, lambda query: query == "COMMIT", how)
        claimed = await store.claim(worker, 3)
        assert [line.attempt for line in claimed] == [1, 1, 1]
        broken.clear()
        assert await store.commit(worker, [result(line) for line in claimed]) == [True] * 3
        assert (await world.batch(batch)).counts == LineCounts(4, 3, 0)
        assert await store.count_lines() == {"pending": 1, "claimed": 0, "suspect": 0}
        await store.commit(worker, [result(line) for line in await store.claim(worker, 3)])
        broken.clear()
        assert await store.take_finishing(worker) is not None
        broken.clear()
        assert await store.finish(worker, batch.id, output=world.new_file(), errors=None, unfinished=0)
        broken.clear()
        assert len(await store.take_deliveries(worker, 9)) == 1
        broken.clear()
        assert await store.delete_file("t", batch.input_file_id)

    play(emptied, scenario)


def test_a_server_that_crashes_in_commit(emptied: str, away: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets the transactions that it did not write down, their ids included."""

    def crashed(connection: psycopg.Connection[Any], run: Callable[[], Any]) -> None:
        away.restart()
        _lost(connection, run)

    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker()
        broken = _breaking(monkeypatch, lambda query: query == "COMMIT", crashed)
        assert await store.claim(worker, 3) == []
        assert broken
        batch = await world.running(worker, 4)
        broken.clear()
        claimed = await store.claim(worker, 4)
        assert [line.attempt for line in claimed] == [1] * 4
        broken.clear()
        assert await store.commit(worker, [result(line) for line in claimed]) == [True] * 4
        assert (await world.batch(batch)).counts == LineCounts(4, 4, 0)

    play(emptied, scenario)


def test_a_connection_that_was_forgotten_is_made_anew(emptied: str) -> None:
    async def scenario(world: World) -> None:
        with psycopg.connect(emptied, autocommit=True) as connection:
            connection.execute("UPDATE batchwright.connections SET used_at = used_at - INTERVAL '25 hours'")
        other = open_store(emptied)
        await other.check()
        await other.close()
        file = await world.upload()
        assert await world.store.files("t", limit=9) == [file]
        with psycopg.connect(emptied) as connection:
            ages = connection.execute("SELECT clock_timestamp() - used_at FROM batchwright.connections").fetchall()
        assert ages
        assert all(age.days == 0 for (age,) in ages)

    play(emptied, scenario)


def test_a_connection_that_is_lost_before(emptied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        broken = _breaking(monkeypatch, lambda query: "INSERT INTO files" in query, _lost)
        file = await world.upload()
        assert broken
        broken.clear()
        broken = _breaking(monkeypatch, lambda query: "FROM files" in query, _lost)
        assert await world.store.file("t", file.id) == file

    play(emptied, scenario)


def test_a_deadlock_is_tried_again(emptied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def deadlock(connection: psycopg.Connection[Any], run: Callable[[], Any]) -> None:
        run()
        raise psycopg.errors.DeadlockDetected("deadlock detected")

    async def scenario(world: World) -> None:
        broken = _breaking(monkeypatch, lambda query: "INSERT INTO files" in query, deadlock)
        file = await world.upload()
        assert broken
        assert await world.store.files("t", limit=9) == [file]

    play(emptied, scenario)


def test_the_server_is_restarted_under_load(emptied: str, postgres: PostgresServer) -> None:
    async def scenario(world: World) -> None:
        first, second = await world.worker(), await world.worker()
        batch = await world.running(first, 400)
        done: list[int] = []
        enough = asyncio.Event()

        async def work(worker: str) -> None:
            while claimed := await world.store.claim(worker, 5):
                assert await world.store.commit(worker, [result(line) for line in claimed]) == [True] * len(claimed)
                done.extend(line.number for line in claimed)
                if len(done) >= 100:
                    enough.set()

        async def restart() -> None:
            await enough.wait()
            await asyncio.to_thread(postgres.restart)

        await asyncio.gather(work(first), work(second), restart())
        assert sorted(done) == [*range(1, 401)]
        now = await world.batch(batch)
        assert (now.counts, now.ending) == (LineCounts(400, 400, 0), "completed")

    play(emptied, scenario)


def test_a_server_that_stays_away(emptied: str, away: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        await world.store.check()
        monkeypatch.setattr(postgresql, "_PATIENCE", 0.1)
        monkeypatch.setattr(postgresql, "_IMPATIENCE", 0.1)
        away.stop("fast")
        for call in (world.store.check(), world.upload(), world.store.files("t", limit=1)):
            with pytest.raises(StoreUnavailable, match="see to the server"):
                await call
        with pytest.raises(StoreUnavailable, match="see to the server"):
            open_store(emptied)
        away.start()
        await world.upload()

    play(emptied, scenario)


def test_leases_go_by_the_clock_of_the_database(emptied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: START)  # years behind

    async def main() -> None:
        async with open_store(emptied) as store:
            worker = await store.register_worker("w", 1000)
            with psycopg.connect(emptied) as connection:
                row = connection.execute(
                    "SELECT expires_at - extract(epoch FROM clock_timestamp()) FROM batchwright.workers"
                ).fetchone()
            assert row is not None
            assert 900 < row[0] <= 1000
            assert await store.renew_lease(worker, 0)
            assert not await store.renew_lease(worker, 10)

    asyncio.run(main())


def test_text_that_postgresql_cannot_store(emptied: str) -> None:
    async def scenario(world: World) -> None:
        worker, batch = await world.worker(), await world.create()
        await world.store.take_validation(worker)
        with pytest.raises(InvalidRequest, match="NUL"):
            await world.store.add_lines(worker, batch.id, [*new_lines([1]), NewLine(2, "a\0b", 0, 1)])
        assert await world.store.lines(batch.id, after=0, limit=9) == []

    play(emptied, scenario)


def test_a_newer_schema_is_refused(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    asyncio.run(open_store(url).close())
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO batchwright.schema_version VALUES (99)")
    with pytest.raises(StoreUnavailable, match="newer batchwright"):
        open_store(url)


@pytest.mark.parametrize("look", [store_exists, open_store])
def test_an_address_that_cannot_be_read_is_told_without_its_password(look: Callable[[str], object]) -> None:
    with pytest.raises(InvalidRequest, match=r"^database=postgresql://127.0.0.1:5432/x: cannot be read") as caught:
        look("postgresql://u:sE%zzcret@127.0.0.1:5432/x")
    assert "zzcret" not in str(caught.value)


def test_looking_for_a_store_makes_none(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    for _ in range(2):
        assert not store_exists(url)
    asyncio.run(open_store(url).close())
    assert store_exists(url)
    with pytest.raises(StoreUnavailable, match="see to the server"):
        store_exists("postgresql://127.0.0.1:1/none")


def test_many_processes_open_it_at_once(postgres: PostgresServer) -> None:
    url = postgres.new_database()

    async def main() -> None:
        stores = await asyncio.gather(*(asyncio.to_thread(open_store, url) for _ in range(6)))
        for store in stores:
            await store.check()
            await store.close()

    asyncio.run(main())


def test_an_operation_that_raises_leaves_nothing(emptied: str) -> None:
    async def main() -> None:
        driver = postgresql.PostgresqlDriver(emptied, None)
        file = World(None, [1.0]).new_file()  # type: ignore[arg-type]

        def add_and_fail(tx: Tx) -> None:
            files.add_file(tx, file)
            raise KeyError("x")

        with pytest.raises(KeyError):
            await driver.write(add_and_fail)
        assert await driver.read(files.known_files, [file.id]) == set()
        await driver.close()

    asyncio.run(main())


async def _until_one_waits_for_a_lock(connection: psycopg.Connection[Any]) -> None:
    while True:
        if connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None:
            return
        await asyncio.sleep(0.01)


def test_a_tenant_is_not_locked_while_lines_of_an_earlier_try_are_removed(emptied: str) -> None:
    async def scenario(world: World) -> None:
        store, first, second = world.store, await world.worker(), await world.worker()
        batch = await world.create()
        assert await store.take_validation(first) is not None
        assert await store.add_lines(first, batch.id, new_lines([1]))
        await store.retire_worker(first)
        with psycopg.connect(emptied) as holds, psycopg.connect(emptied, autocommit=True) as looks:
            holds.execute("SELECT 1 FROM batchwright.lines FOR UPDATE")
            taking = asyncio.create_task(store.take_validation(second))
            await _until_one_waits_for_a_lock(looks)
            looks.execute("SELECT 1 FROM batchwright.tenants FOR UPDATE NOWAIT")
            holds.rollback()
            taken = await taking
        assert taken is not None
        assert taken.id == batch.id
        assert await store.lines(batch.id, after=0, limit=9) == []

    play(emptied, scenario)


def test_lines_that_are_given_back_are_locked_by_the_keys_of_their_batches(emptied: str) -> None:
    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker()
        for name in ("batch_b", "batch_a"):
            await store.create_batch(replace(world.new_batch(await world.upload()), id=name))
            assert await store.take_validation(worker) is not None
            assert await store.add_lines(worker, name, new_lines([1]))
            assert await store.begin(worker, name, total=1, model="m")
        lines = await store.claim(worker, 9)
        of_batch = "SELECT 1 FROM batchwright.lines WHERE batch = (SELECT key FROM batchwright.batches WHERE id = %s)"
        with psycopg.connect(emptied) as holds, psycopg.connect(emptied, autocommit=True) as looks:
            holds.execute(f"{of_batch} FOR UPDATE", ["batch_b"])
            releasing = asyncio.create_task(store.release(worker, lines))
            await _until_one_waits_for_a_lock(looks)
            looks.execute(f"{of_batch} FOR UPDATE NOWAIT", ["batch_a"])
            holds.rollback()
            await releasing
        assert await store.count_lines() == {"pending": 2, "claimed": 0, "suspect": 0}

    play(emptied, scenario)
