"""Lines and results of ended batches go with their files, on both databases."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import apsw
import psycopg
import pytest
from tests.store.support import Play, World, new_lines, numbers, play, played, result

from batchwright.errors import Conflict, NotFound
from batchwright.store.operations.batches import PAGE_BYTES
from batchwright.store.records import BatchRecord, FileRecord
from batchwright.store.transaction import migrations

AGE = 1000.0
Rows: TypeAlias = Callable[[], tuple[int, int]]


@pytest.fixture
def rows(url: str) -> Rows:
    """How many rows of lines and of results there are, of all batches."""

    def counted() -> tuple[int, int]:
        question = "SELECT (SELECT count(*) FROM {0}lines), (SELECT count(*) FROM {0}results)"
        if url.startswith("postgresql"):
            with psycopg.connect(url) as connection:
                [found] = connection.execute(question.format("batchwright.").encode()).fetchall()
        else:
            [found] = apsw.Connection(url).execute(question.format("")).fetchall()
        return found[0], found[1]

    return counted


async def ended(world: World, worker: str, lines: int = 3, failed: int = 1) -> tuple[BatchRecord, list[FileRecord]]:
    """A completed batch with an output file and an error file."""
    batch = await world.running(worker, lines)
    claimed = await world.store.claim(worker, lines)
    await world.store.commit(worker, [result(line, line.number > failed) for line in claimed])
    await world.store.take_finishing(worker)
    files = [replace(world.new_file(purpose="batch_output"), expires_at=world.now + AGE) for _ in range(2)]
    await world.store.finish(worker, batch.id, output=files[0], errors=files[1], unfinished=0)
    return await world.batch(batch), files


async def bury(world: World, *files: FileRecord) -> None:
    for file in files:
        await world.store.delete_file("t", file.id)
    await world.store.forget_files([file.id for file in files])


async def remove_all(world: World, limit: int = 100) -> int:
    """How many calls it took."""
    calls = 1
    while await world.store.remove_lines(limit, age=AGE):
        calls += 1
    return calls


def test_lines_go_with_the_last_file(play: Play, rows: Rows) -> None:
    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker()
        batch, (output, errors) = await ended(world, worker)
        await bury(world, output)
        assert await remove_all(world) == 1
        assert rows() == (3, 3)
        assert await world.batch(batch) == batch
        await store.delete_file("t", errors.id)
        assert await remove_all(world) == 1
        assert len(await store.results("t", batch.id, after=0, limit=9) or []) == 3  # its bytes are not gone yet
        await store.forget_files([errors.id])
        assert await world.batch(batch) == replace(batch, lines_removed_at=world.now)
        with pytest.raises(NotFound, match=f"results of batch {batch.id} were removed .* on 2023-11-14"):
            await store.results("t", batch.id, after=0, limit=9)
        assert await store.results("other", batch.id, after=0, limit=9) is None
        assert await store.lines(batch.id, after=0, limit=9) == []
        assert rows() == (3, 3)
        assert await remove_all(world) == 1
        assert rows() == (0, 0)

    play(scenario)


def test_files_that_expired_together(play: Play, rows: Rows) -> None:
    async def scenario(world: World) -> None:
        batch, files = await ended(world, await world.worker())
        world.later(AGE)
        assert await world.store.take_dead_files(9) == sorted(file.id for file in files)
        await world.store.forget_files([file.id for file in files])
        await remove_all(world)
        assert rows() == (0, 0)
        assert (await world.batch(batch)).usage == batch.usage

    play(scenario)


@played
async def test_two_that_forget_one_file_each(world: World) -> None:
    worker = await world.worker()
    for _ in range(5):
        batch, files = await ended(world, worker)
        await asyncio.gather(*(bury(world, file) for file in files))
        assert (await world.batch(batch)).lines_removed_at == world.now


def test_a_few_rows_at_a_time(play: Play, rows: Rows) -> None:
    async def scenario(world: World) -> None:
        worker = await world.worker()
        for _ in range(2):
            _, files = await ended(world, worker, 5)
            await bury(world, *files)
        seen = [rows()]
        while await world.store.remove_lines(4, age=AGE):
            seen.append(rows())
        assert seen == [(10, 10), (10, 6), (7, 5), (5, 3), (4, 0), (0, 0)]
        assert [sum(before) - sum(after) for before, after in itertools.pairwise(seen)] == [4, 4, 4, 4, 4]

    play(scenario)


def test_large_results_in_transactions_of_their_own(play: Play, rows: Rows) -> None:
    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker()
        batch = await world.running(worker, 3)
        large = b"x" * (PAGE_BYTES // 2 + 1)
        claimed = await store.claim(worker, 3)
        await store.commit(worker, [replace(result(line), output=large) for line in claimed])
        await store.take_finishing(worker)
        file = world.new_file(purpose="batch_output")
        await store.finish(worker, batch.id, output=file, errors=None, unfinished=0)
        await bury(world, file)
        left = []
        while await store.remove_lines(100, age=AGE):
            left.append(rows())
        assert left == [(3, 2), (3, 1)]
        assert rows() == (0, 0)

    play(scenario)


@played
async def test_a_batch_whose_lines_were_removed_is_not_retried(world: World) -> None:
    store, worker = world.store, await world.worker()
    batch, files = await ended(world, worker)
    whole, its_files = await ended(world, worker, failed=0)
    new = world.new_batch(world.new_file(), key="k")
    made = await store.retry_batch("t", batch.id, new)
    await bury(world, *files, *its_files)
    for _ in range(2):
        with pytest.raises(Conflict, match=r"its lines were removed with its output files on 2023-11-14"):
            await store.retry_batch("t", batch.id, world.new_batch(world.new_file()))
        with pytest.raises(Conflict, match="all of them succeeded"):
            await store.retry_batch("t", whole.id, world.new_batch(world.new_file()))
        assert await store.retry_batch("t", batch.id, new) == made
        await remove_all(world)


def test_a_retry_has_lines_of_its_own(play: Play, rows: Rows) -> None:
    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker()
        parent, files = await ended(world, worker, 5, failed=2)
        retry = await store.retry_batch("t", parent.id, world.new_batch(world.new_file()))
        await bury(world, *files)
        await remove_all(world, 1)
        assert rows() == (2, 0)
        claimed = await store.claim(worker, 9)
        assert (numbers(claimed), {line.batch_id for line in claimed}) == ([1, 2], {retry.id})
        assert await store.commit(worker, [result(line) for line in claimed]) == [True, True]
        assert (await world.batch(retry)).status == "finalizing"
        assert len(await store.lines(retry.id, after=0, limit=9)) == 2

    play(scenario)


def test_a_retry_while_files_are_forgotten_has_all_its_lines_or_is_refused(play: Play, rows: Rows) -> None:
    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker()
        for _ in range(5):
            parent, files = await ended(world, worker, 20, failed=20)

            async def forget(files: list[FileRecord] = files) -> None:
                await bury(world, *files)
                await remove_all(world, 3)

            retry = store.retry_batch("t", parent.id, world.new_batch(world.new_file()))
            made, _ = await asyncio.gather(retry, forget(), return_exceptions=True)
            if isinstance(made, BatchRecord):
                assert len(await store.lines(made.id, after=0, limit=99)) == made.counts.total == 20
                await store.request_cancel("t", made.id)
            else:
                assert isinstance(made, Conflict)
            await store.take_finishing(worker)

    play(scenario)


def test_nothing_of_a_batch_that_goes_on(play: Play, rows: Rows) -> None:
    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker()
        running = await world.running(worker, 3, window=10 * AGE)
        [first, *_] = await store.claim(worker, 3)
        await store.commit(worker, [result(first)])
        ending = await world.running(worker, 2, window=10 * AGE)
        await store.request_cancel("t", ending.id)
        world.later(5 * AGE)
        await store.reap()
        assert set(await store.take_dead_files(9)) == set()
        await store.forget_files([running.input_file_id])
        assert await remove_all(world) == 1
        assert rows() == (5, 1)
        for batch in (running, ending):
            assert (await world.batch(batch)).lines_removed_at is None

    play(scenario)


@pytest.mark.parametrize("own_age", [None, 400.0])
def test_a_batch_without_files_when_they_would_have_expired(play: Play, rows: Rows, own_age: float | None) -> None:
    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker()
        file = await world.upload()
        batch = await store.create_batch(replace(world.new_batch(file), output_expires_after=own_age))
        await store.take_validation(worker)
        await store.add_lines(worker, batch.id, new_lines([1, 2]))
        await store.begin(worker, batch.id, total=2, model="m")
        await store.request_cancel("t", batch.id)
        world.later(7)
        worker = await world.worker()
        await store.take_finishing(worker)
        await store.finish(worker, batch.id, output=None, errors=None, unfinished=2)
        world.later((own_age or AGE) - 0.5)
        await remove_all(world)
        assert rows() == (2, 0)
        world.later(0.5)
        await remove_all(world)
        assert rows() == (0, 0)
        with pytest.raises(Conflict, match="its lines were removed"):
            await store.retry_batch("t", batch.id, world.new_batch(file))

    play(scenario)


@pytest.mark.parametrize("how", ["rejected", "cancelled", "expired"])
def test_a_batch_that_ends_while_it_is_validated(play: Play, rows: Rows, how: str) -> None:
    async def scenario(world: World) -> None:
        store, worker = world.store, await world.worker(10_000)
        batch = await world.create()
        await store.take_validation(worker)
        await store.add_lines(worker, batch.id, new_lines(range(1, 9)))
        if how == "rejected":
            await store.reject(worker, batch.id, [])
        elif how == "cancelled":
            await store.request_cancel("t", batch.id)
        else:
            world.later(3600)
            await store.expire_batches()
        assert rows() == (8, 0)
        assert await store.lines(batch.id, after=0, limit=9) == []
        assert await store.results("t", batch.id, after=0, limit=9) == []
        assert await remove_all(world, 3) == 3
        assert rows() == (0, 0)
        if how != "rejected":
            await store.take_finishing(worker)
            await store.finish(worker, batch.id, output=None, errors=None, unfinished=0)
        with pytest.raises(Conflict, match="no lines to retry"):
            await store.retry_batch("t", batch.id, world.new_batch(world.new_file()))

    play(scenario)


_V1_BATCHES = """
INSERT INTO {0}batches (
    id, tenant, endpoint, input_file_id, completion_window, created_at, expires_at, metadata, simple, status, paused,
    errors, output_file_id, error_file_id, total, completed, failed, input_tokens, cached_tokens, output_tokens,
    reasoning_tokens
) VALUES
    ('gone', 't', 'e', 'i', '1h', 1, 2, '{{}}', FALSE, 'completed', FALSE, '[]', 'o1', NULL, 3, 3, 0, 7, 0, 0, 0),
    ('half', 't', 'e', 'i', '1h', 1, 2, '{{}}', FALSE, 'cancelled', FALSE, '[]', 'o2', 'e2', 3, 3, 0, 7, 0, 0, 0),
    ('kept', 't', 'e', 'i', '1h', 1, 2, '{{}}', FALSE, 'in_progress', FALSE, '[]', NULL, NULL, 3, 3, 0, 7, 0, 0, 0);
INSERT INTO {0}files (id, tenant, filename, purpose, bytes, created_at, status)
VALUES ('e2', 't', 'x', 'batch_output', 1, 1, 'processed');
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_store_from_before_there_was_this(request: pytest.FixtureRequest, folder: Path, kind: str) -> None:
    if kind == "sqlite":
        url = str(folder / "old.db")
        with apsw.Connection(url) as old:
            old.execute(migrations("sqlite")[0])
            old.execute(_V1_BATCHES.format(""))
            old.pragma("user_version", 1)
    else:
        url = request.getfixturevalue("postgres").new_database()
        with psycopg.connect(url) as connection:
            connection.execute("CREATE SCHEMA batchwright; SET search_path TO batchwright")
            connection.execute(migrations("postgresql")[0].encode())
            connection.execute(_V1_BATCHES.format("batchwright.").encode())
            connection.execute("CREATE TABLE schema_version AS SELECT 1 AS version")

    async def scenario(world: World) -> None:
        found = {batch.id: batch.lines_removed_at for batch in await world.store.batches("t", limit=9)}
        assert {batch_id for batch_id, removed_at in found.items() if removed_at} == {"gone"}
        await world.store.forget_files(["e2"])
        half = await world.store.batch("t", "half")
        assert half is not None
        assert half.lines_removed_at == world.now

    play(url, scenario)
