"""What the tests of the store start from."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import apsw

from batchwright.store import Store, open_store
from batchwright.store.records import (
    BatchRecord,
    ClaimedLine,
    Endpoint,
    FileRecord,
    LineResult,
    NewLine,
    Purpose,
    TokenUsage,
)

START = 1_700_000_000.0
CHAT: Endpoint = "/v1/chat/completions"


@dataclass
class World:
    """An open store, whose time is that of `clock`."""

    store: Store
    clock: list[float]
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """For ids."""

    @property
    def now(self) -> float:
        return self.clock[0]

    def later(self, seconds: float) -> None:
        self.clock[0] += seconds

    def new_file(self, tenant: str = "t", purpose: Purpose = "batch", expires_at: float | None = None) -> FileRecord:
        number = next(self.numbers)
        return FileRecord(f"file-{number:024x}", tenant, "input.jsonl", purpose, 10, self.now, expires_at)

    async def upload(self, tenant: str = "t", expires_at: float | None = None) -> FileRecord:
        file = self.new_file(tenant, expires_at=expires_at)
        await self.store.add_file(file)
        return file

    def new_batch(
        self, file: FileRecord, *, window: float = 3600, key: str | None = None, callback_url: str | None = None
    ) -> BatchRecord:
        return BatchRecord(
            id=f"batch_{next(self.numbers):024x}",
            tenant=file.tenant,
            endpoint=CHAT,
            input_file_id=file.id,
            completion_window="1h",
            created_at=self.now,
            expires_at=self.now + window,
            idempotency_key=key,
            callback_url=callback_url,
        )

    async def create(self, tenant: str = "t", *, window: float = 3600, callback_url: str | None = None) -> BatchRecord:
        """A batch that is to be validated."""
        file = await self.upload(tenant)
        return await self.store.create_batch(self.new_batch(file, window=window, callback_url=callback_url))

    async def worker(self, lease: float = 60) -> str:
        return await self.store.register_worker("test", lease)

    async def running(
        self,
        worker: str,
        lines: int = 3,
        tenant: str = "t",
        *,
        window: float = 3600,
        callback_url: str | None = None,
        position: Callable[[int], int] = lambda number: 0,
    ) -> BatchRecord:
        """A batch in progress; no other one may wait for its validation. `position`: that of each line."""
        batch = await self.create(tenant, window=window, callback_url=callback_url)
        taken = await self.store.take_validation(worker)
        assert taken is not None
        assert taken.id == batch.id
        assert await self.store.add_lines(worker, batch.id, new_lines(range(1, lines + 1), position))
        assert await self.store.begin(worker, batch.id, total=lines, model="m")
        return await self.batch(batch)

    async def batch(self, batch: BatchRecord) -> BatchRecord:
        """As it is now."""
        found = await self.store.batch(batch.tenant, batch.id)
        assert found is not None
        return found

    async def ended(self, worker: str, lines: int = 3, tenant: str = "t", *, failed: int = 0) -> BatchRecord:
        """A completed batch, `failed` of whose lines failed."""
        batch = await self.running(worker, lines, tenant)
        claimed = await self.store.claim(worker, lines)
        await self.store.commit(worker, [result(line, line.number > failed) for line in claimed])
        assert await self.store.take_finishing(worker) is not None
        assert await self.store.finish(worker, batch.id, output=None, errors=None, unfinished=0)
        return await self.batch(batch)


def new_lines(numbers: Iterable[int], position: Callable[[int], int] = lambda number: 0) -> list[NewLine]:
    return [NewLine(number, f"c{number}", number * 100, 99, position(number)) for number in numbers]


def result(line: ClaimedLine, succeeded: bool = True) -> LineResult:
    output = f"{line.batch_id} {line.number} {line.attempt}".encode()
    return LineResult(line.batch_id, line.number, line.attempt, succeeded, output, TokenUsage(3, 1, 2, 1))


def numbers(lines: Sequence[ClaimedLine]) -> list[int]:
    return [line.number for line in lines]


Scenario: TypeAlias = Callable[[World], Awaitable[None]]
Play: TypeAlias = Callable[[Scenario], None]


def play(url: str, scenario: Scenario) -> None:
    """Run `scenario` on the store at `url`, at `START`."""

    async def main() -> None:
        clock = [START]
        async with open_store(url, now=lambda: clock[0]) as store:
            await scenario(World(store, clock))

    asyncio.run(main())


def played(scenario: Scenario) -> Callable[[Play], None]:
    """Decorate a scenario to make it a test, which runs it on both databases."""

    def test(play: Play) -> None:
        play(scenario)

    return test


_PAGE = 4096
"""Bytes of a page of SQLite."""


def spoil_table(path: Path, table: str) -> None:
    """Overwrite the first page of a table of an SQLite file; those of its indexes are sound."""
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        root = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)).fetchall()[0][0]
    assert isinstance(root, int)
    with path.open("r+b") as file:
        file.seek((root - 1) * _PAGE)
        file.write(bytes(_PAGE))
