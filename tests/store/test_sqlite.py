"""What only SQLite's driver has: group commit, a file that others share, a disk that is full."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import apsw
import pytest
from tests.store.support import Play, World, play, played, spoil_table

from batchwright.errors import Conflict, InvalidRequest, MissingExtra, StoreUnavailable
from batchwright.store import open_store
from batchwright.store.sqlite import SqliteDriver
from batchwright.store.transaction import statements


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "deep" / "store.db"


@pytest.fixture(name="play")
def _play(path: Path) -> Play:
    return partial(play, str(path))


def _writer(world: World) -> apsw.Connection:
    driver = world.store.driver
    assert isinstance(driver, SqliteDriver)
    return driver._writer


def test_a_new_file_that_another_process_is_making_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself does not wait when it switches to a write-ahead log."""
    path.parent.mkdir()
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE; PRAGMA user_version = 0")
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            other.execute("ROLLBACK")

    monkeypatch.setattr("batchwright.store.sqlite.time.sleep", pause)
    store = open_store(path)
    assert len(pauses) >= 3
    asyncio.run(store.close())
    other.close()


def test_operations_that_wait_are_committed_together_and_fail_alone(play: Play, path: Path) -> None:
    async def scenario(world: World) -> None:
        commits: list[int] = []

        def count() -> bool:
            commits.append(1)
            return False

        _writer(world).set_commit_hook(count)
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")  # the writer waits for it
        files = [world.new_file() for _ in range(50)]
        waiting = [asyncio.ensure_future(world.store.add_file(file)) for file in [*files, files[7]]]
        await asyncio.sleep(0)
        other.execute("ROLLBACK")
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert results[:50] == [None] * 50
        assert isinstance(results[50], Conflict)
        assert len(commits) <= 2
        assert await world.store.known_files([file.id for file in files]) == {file.id for file in files}

    play(scenario)


def test_reads_do_not_wait_for_a_writer(play: Play, path: Path) -> None:
    async def scenario(world: World) -> None:
        file = await world.upload()
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        other.execute("DELETE FROM files")
        writing = asyncio.ensure_future(world.upload())
        assert await world.store.file("t", file.id) == file
        assert not writing.done()
        other.execute("ROLLBACK")
        await writing

    play(scenario)


@played
async def test_a_caller_that_does_not_wait_any_longer(world: World) -> None:
    file = world.new_file()
    waiting = asyncio.ensure_future(world.store.add_file(file))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await world.upload()
    assert await world.store.known_files([file.id]) == {file.id}


@played
async def test_a_full_disk_loses_nothing_and_is_recovered_from(world: World) -> None:
    kept = await world.upload()
    writer = _writer(world)
    limit = writer.pragma("max_page_count")
    writer.pragma("max_page_count", writer.pragma("page_count"))
    added = [kept.id]

    async def fill() -> None:
        while len(added) < 10_000:
            added.append((await world.upload()).id)

    with pytest.raises(StoreUnavailable, match="make room"):
        await fill()
    waiting = [world.store.add_file(world.new_file()) for _ in range(200)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), StoreUnavailable}
    assert await world.store.known_files(added) == set(added)
    writer.pragma("max_page_count", limit)
    await world.store.check()
    added.append((await world.upload()).id)
    assert await world.store.known_files(added) == set(added)


def test_two_stores_on_one_file(path: Path) -> None:
    async def main() -> None:
        async with open_store(path) as first, open_store(f"sqlite:///{path}") as second:
            ids = itertools.count(1)
            worlds = [World(first, [1.0], ids), World(second, [1.0], ids)]
            await asyncio.gather(*(worlds[place % 2].upload(f"t{place}") for place in range(40)))
            for place in range(40):
                assert len(await worlds[(place + 1) % 2].store.files(f"t{place}", limit=9)) == 1

    asyncio.run(main())


def test_it_is_there_when_it_is_opened_again_and_only_for_its_owner(play: Play, path: Path) -> None:
    seen = []

    async def first(world: World) -> None:
        seen.append(await world.upload())
        for name in (path, Path(f"{path}-wal")):
            assert stat.S_IMODE(name.stat().st_mode) == 0o600

    async def second(world: World) -> None:
        assert await world.store.files("t", limit=9) == seen

    play(first)
    play(second)


def test_a_closed_store(path: Path) -> None:
    async def main() -> None:
        store = open_store(path)
        world = World(store, [1.0])
        waiting = asyncio.gather(*(world.upload() for _ in range(10)))
        await asyncio.sleep(0)
        await store.close()
        assert len(await waiting) == 10
        await store.close()
        for late in (store.check(), store.file("t", "file-0")):
            with pytest.raises(StoreUnavailable, match="closed"):
                await late

    asyncio.run(main())


def test_nothing_is_acknowledged_once_the_file_is_known_to_be_gone(path: Path) -> None:
    async def main() -> None:
        async with open_store(path) as store:
            world = World(store, [1.0])
            await world.upload()
            await asyncio.to_thread(path.rename, f"{path}.moved")
            with pytest.raises(StoreUnavailable, match="is not there any more"):
                await store.check()
            with pytest.raises(StoreUnavailable, match="is not there any more"):
                await world.upload()

    asyncio.run(main())


def test_damage_that_a_request_has_met_is_told_to_everybody(path: Path) -> None:
    async def main() -> None:
        async with open_store(path) as store:
            spoil_table(path, "deliveries")
            await store.check()
            with pytest.raises(StoreUnavailable):
                await store.count_deliveries()
            with pytest.raises(StoreUnavailable, match="is damaged"):
                await store.check()

    asyncio.run(main())


def test_a_newer_schema_is_refused(play: Play, path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.upload()

    play(scenario)
    with apsw.Connection(str(path)) as connection:
        connection.pragma("user_version", 99)
    with pytest.raises(StoreUnavailable, match="newer batchwright"):
        open_store(path)


@pytest.mark.parametrize(
    ("url", "module", "extra"), [("postgresql://x", "psycopg", "postgres"), ("x.db", "apsw", "server")]
)
def test_a_driver_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for ours in ("postgresql", "sqlite"):
        monkeypatch.delitem(sys.modules, f"batchwright.store.{ours}", raising=False)
    with pytest.raises(MissingExtra, match=rf"needs {module}: pip install 'batchwright\[{extra}\]'"):
        open_store(url)


def test_files_that_are_no_store(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("something else entirely\n" * 100)
    with pytest.raises(StoreUnavailable, match="name another file"):
        open_store(text)
    with pytest.raises(StoreUnavailable, match="Is a directory"):
        open_store(tmp_path)
    with pytest.raises(InvalidRequest, match="names no file"):
        open_store("sqlite:///")
    with pytest.raises(InvalidRequest, match="mysql"):
        open_store("mysql://localhost/x")


_CHILD = """
import asyncio, sys
from tests.store.support import World
from batchwright.store import open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        world = World(store, [1.0])
        for _ in range(3):
            print((await world.upload()).id, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("place", "durable"),
    [
        ("store.add_file.before_commit:2", 1),
        ("store.add_file.after_commit:2", 2),
        ("store.before_commit", 0),
        ("store.after_commit:3", 3),
    ],
)
def test_crash_points(path: Path, place: str, durable: int) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)],
        env={**os.environ, "BATCHWRIGHT_CRASH_AT": place, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    acknowledged = ended.stdout.split()

    async def look(world: World) -> None:
        found = {file.id for file in await world.store.files("t", limit=9)}
        assert len(found) == durable
        assert found >= set(acknowledged)

    play(str(path), look)


def test_messages_that_were_given_up_are_found_by_their_age(play: Play) -> None:
    async def scenario(world: World) -> None:
        query = f"EXPLAIN QUERY PLAN {statements('sqlite')['forget_deliveries']}"
        plan = [row[3] for row in _writer(world).execute(query, {"before": 0.0, "limit": 1})]
        assert [step for step in plan if "deliveries_given_up (failed_at<?)" in step], plan

    play(scenario)
