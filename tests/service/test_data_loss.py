"""Data folders with all kinds of databases: whatever was opened meanwhile, no file of a live record is ever gone."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import apsw
import psycopg
import pytest
from tests.long_form import examples
from tests.postgres import PostgresServer
from tests.service.support import START, TENANT, line, pieces

from batchwright.errors import StoreMismatch, StoreUnavailable
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.files.blobs import Blobs
from batchwright.service.files.custody import Custody, open_with_files
from batchwright.service.files.sweeper import Sweeper
from batchwright.service.limits import ServiceLimits
from batchwright.service.worker.maintenance import Maintenance
from batchwright.store import Store, open_store

DAY = 86_400.0
HOUR = 3600.0
COMBINATIONS = examples(48, long=200)
_KINDS = ("right", "other", "empty", "no schema", "truncated", "garbage", "older", "copied", "restored", "missing")
_REFUSED = (StoreMismatch, StoreUnavailable)


@dataclass
class World:
    """One store with its data folder, and whatever else is opened with them. Time is virtual."""

    folder: Path
    draw: random.Random
    time: float = START
    contents: dict[str, bytes] = field(default_factory=dict)
    """Of the files of the right database, those that it has deleted left out."""
    copies: int = 0

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def right(self) -> str:
        return str(self.data / "batchwright.db")

    @asynccontextmanager
    async def opened(self, database: str, data: Path | None = None, jump: float = 0.0) -> AsyncIterator[House]:
        """`jump`: by how much the machine's clock is wrong, either way."""
        store, blobs = await open_with_files(database, data or self.data, now=lambda: self.time + jump)
        async with store:
            yield House(store, blobs, BatchService(store, blobs, unix_time=lambda: self.time + jump))

    async def live(self, house: House, days: float) -> None:
        """A process that runs for so long. Its clocks agree on how fast time goes, and on nothing else."""
        duties = Maintenance(house.store, house.blobs, ServiceLimits())
        with closing(duties):
            for hour in range(int(days * 24) + 1):
                await duties.perform(hour * HOUR)
                self.time += HOUR

    async def use(self, house: House) -> None:
        """What tenants do with the right database."""
        for _ in range(self.draw.randint(not self.contents, 3)):
            content = line(self.draw.randbytes(8).hex())
            self.contents[(await house.jobs.upload(TENANT, "x", pieces(content))).id] = content
        if len(self.contents) > 1 and self.draw.random() < 0.5:
            gone = self.draw.choice([*self.contents])
            await house.jobs.delete_file(TENANT, gone)
            del self.contents[gone]

    async def check(self) -> None:
        """With the right database everything is there, and stays."""
        async with self.opened(self.right) as house:
            for days in (0.0, 0.2):
                await self.live(house, days)
                known = {file.id for file in await house.jobs.files(TENANT)}
                assert known == {*self.contents}
                for file_id, content in self.contents.items():
                    _, read = await house.jobs.content(TENANT, file_id)
                    assert b"".join([piece async for piece in read]) == content

    def new_path(self) -> Path:
        self.copies += 1
        return self.folder / f"{self.copies}.db"


@dataclass
class House:
    store: Store
    blobs: Blobs
    jobs: BatchService


async def _begin(world: World) -> Path:
    """A store that has lived, an older copy of which is returned."""
    older = world.new_path()
    async with world.opened(world.right) as house:
        await world.use(house)
        await world.live(house, 0.1)
    _copy(world.right, older)
    async with world.opened(world.right) as house:
        await world.live(house, 0.1)
        await world.use(house)
    return older


def _copy(database: str, target: Path) -> None:
    with closing(apsw.Connection(database)) as connection:
        connection.execute("VACUUM INTO ?", [str(target)])


async def _database(kind: str, world: World, older: Path) -> tuple[str, Path]:
    """Of this kind, and the data folder that it is opened with."""
    path = world.new_path()
    match kind:
        case "right":
            return world.right, world.data
        case "other":
            elsewhere = world.folder / f"other {world.copies}"
            async with world.opened(str(path), elsewhere) as house:
                await house.jobs.upload(TENANT, "x", pieces(line("other")))
        case "empty":
            path.touch()
        case "no schema":
            apsw.Connection(str(path)).pragma("journal_mode", "wal")
        case "truncated" | "garbage":
            content = await asyncio.to_thread(Path(world.right).read_bytes)
            cut = world.draw.randrange(len(content))
            rest = world.draw.randbytes(len(content) - cut) if kind == "garbage" else b""
            path.write_bytes(content[:cut] + rest)
        case "older":
            shutil.copy(older, path)
        case "copied":
            await _lives_elsewhere(world, path)
        case "restored":
            folder = world.folder / f"restored {world.copies}"
            shutil.copytree(world.data / "files", folder / "files")
            _copy(world.right, folder / "batchwright.db")
            return str(folder / "batchwright.db"), folder
    return str(path), world.data


async def _lives_elsewhere(world: World, path: Path) -> None:
    """A copy with files of its own, where some are deleted that the original still has."""
    folder = world.folder / f"copied {world.copies}"
    shutil.copytree(world.data / "files", folder / "files")
    _copy(world.right, path)
    async with world.opened(str(path), folder) as house:
        for file in await house.jobs.files(TENANT):
            await house.jobs.delete_file(TENANT, file.id)
        await world.live(house, 0.05)
        for _ in range(2):
            await house.jobs.upload(TENANT, "x", pieces(line("copied")))


async def _combination(folder: Path, seed: int, seen: Counter[str]) -> None:
    world = World(folder, random.Random(seed))
    older = await _begin(world)
    first = _KINDS[seed % len(_KINDS)]
    for kind in [first, *world.draw.choices(_KINDS, k=world.draw.randint(0, 1))]:
        database, data = await _database(kind, world, older)
        # Less than files live, which a database whose clock is ahead by more would rightly remove.
        jump = world.draw.choice([0.0, -400 * DAY, -DAY, DAY, 15 * DAY])
        try:
            async with world.opened(database, data, jump) as house:
                await world.live(house, world.draw.choice([0.0, 0.1, 1.2, 2.3]))
                seen[f"{kind} opened"] += 1
        except _REFUSED:
            seen[f"{kind} refused"] += 1
        await world.check()


@pytest.mark.parametrize("part", range(4))
def test_no_file_of_a_live_record_is_ever_gone(tmp_path: Path, part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, COMBINATIONS, 4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        asyncio.run(_combination(folder, seed, seen))
        shutil.rmtree(folder)
    for kind in ("other", "empty", "no schema", "missing"):
        assert not seen[f"{kind} opened"], f"{kind}: {seen}"
    for kind in ("right", "older", "copied", "restored"):
        assert not seen[f"{kind} refused"], f"{kind}: {seen}"
    assert sum(seen.values()) >= COMBINATIONS / 4


async def _sweep(store: Store, blobs: Blobs, days: float) -> None:
    with closing(Sweeper(store, blobs, Custody(store, blobs))) as sweeper:
        for hour in range(int(24 * days)):
            await sweeper.sweep(hour * HOUR)


def test_what_an_adopted_database_does_not_know_waits_in_quarantine_for_the_right_one(tmp_path: Path) -> None:
    """Even when somebody has said that the wrong database belongs to the files."""

    async def main() -> None:
        world = World(tmp_path, random.Random(0))
        world.draw.random = lambda: 1.0  # type: ignore[method-assign] # nothing is deleted
        await _begin(world)
        while not world.contents:
            async with world.opened(world.right) as house:
                await world.use(house)
        empty = world.new_path()
        async with open_store(str(empty), now=lambda: world.time) as store:
            blobs = Blobs(world.data / "files")
            assert await Custody(store, blobs).adopt() == (len(world.contents), 0)
            await _sweep(store, blobs, 6)
        assert len([*blobs.quarantine.iterdir()]) == len(world.contents)
        async with open_store(world.right, now=lambda: world.time) as store:
            assert await Custody(store, blobs).adopt() == (len(world.contents),) * 2
        await world.check()
        assert not [*blobs.quarantine.iterdir()]

    asyncio.run(main())


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


def _spoil(url: str, how: str) -> None:
    if how == "no schema":
        return
    asyncio.run(open_store(url).close())
    with psycopg.connect(url, autocommit=True) as connection:
        if how == "emptied":
            connection.execute("TRUNCATE batchwright.files, batchwright.identity")
        elif how == "without tables":
            connection.execute("DROP TABLE batchwright.files")


@pytest.mark.parametrize("how", ["no schema", "new", "emptied", "without tables"])
def test_a_wrong_database_in_postgresql_is_refused(tmp_path: Path, server: PostgresServer, how: str) -> None:
    right, wrong = server.new_database(), server.new_database()
    _spoil(wrong, how)

    async def main() -> None:
        world = World(tmp_path, random.Random(1))
        async with world.opened(right) as house:
            while not world.contents:
                await world.use(house)
        with pytest.raises(_REFUSED):
            async with world.opened(wrong):
                pass
        async with world.opened(right) as house:
            await world.live(house, 1.2)
            assert {path.name for path in (world.data / "files").glob("??/file-*")} == {*world.contents}

    asyncio.run(main())
