"""Lines and results go with the files that were built from them, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest
from tests.service.support import TENANT, House, Model, in_house, line, refuse, run

from batchwright.errors import Conflict, NotFound
from batchwright.service.batches.simple_batches import Prompts
from batchwright.service.limits import ServiceLimits
from batchwright.service.worker import maintenance
from batchwright.service.worker.maintenance import Maintenance
from batchwright.store.records import BatchRecord

HOUR = 3600.0


def _rows(house: House) -> int:
    """Of lines and of results, of all batches."""
    with apsw.Connection(str(house.folder / "batches.db")) as connection:
        [(count,)] = connection.execute("SELECT (SELECT count(*) FROM lines) + (SELECT count(*) FROM results)")
    return int(count)


async def _delete_files(house: House, batch: BatchRecord) -> None:
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            await house.jobs.delete_file(TENANT, file_id)


@in_house
async def test_lines_go_soon_after_the_files_are_deleted(house: House) -> None:
    model = Model()
    model.faults = refuse("b", "d")
    async with house.worker(model):
        batch = await house.ended(await house.submit("abcd"))
        other = await house.ended(await house.submit("abcd"))
        retry = await house.ended(await house.jobs.retry(TENANT, batch.id))
        await house.jobs.delete_file(TENANT, batch.output_file_id or "")
        await asyncio.sleep(60.0)
        assert _rows(house) == 8 + 8 + 4
        await house.jobs.delete_file(TENANT, batch.error_file_id or "")
        await asyncio.sleep(60.0)
        assert _rows(house) == 8 + 4
        with pytest.raises(Conflict, match="removed with its output files"):
            await house.jobs.retry(TENANT, batch.id)
        with pytest.raises(NotFound, match="removed with its output files"):
            await house.jobs.results(TENANT, batch.id)
        now = await house.batch(batch)
        assert (now.counts, now.usage) == (batch.counts, batch.usage)
        assert len(await house.jobs.results(TENANT, other.id)) == 4
        again = await house.ended(await house.jobs.retry(TENANT, retry.id))
        assert (again.counts.total, again.counts.failed) == (2, 2)


def test_lines_go_when_the_files_expire(tmp_path: Path) -> None:
    async def main(house: House) -> None:
        async with house.worker(Model(), poll=HOUR):
            batch = await house.ended(await house.submit("ab"))
            await asyncio.sleep(HOUR - 60.0)
            assert len(await house.jobs.results(TENANT, batch.id)) == 2
            await asyncio.sleep(180.0)
        assert _rows(house) == 0
        assert house.files() == []

    run(tmp_path, main, ServiceLimits(file_age=HOUR))


def test_other_duties_do_not_wait_for_a_long_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_ROWS_AT_A_TIME", 1)

    async def main(house: House) -> None:
        asked: list[str] = []

        async def note(name: str) -> None:
            asked.append(name)

        async with house.worker(Model(slots=50)):
            batch = await house.ended(await house.submit([f"p{number}" for number in range(50)]))
            await _delete_files(house, batch)
            house.store.before = note
            await house.until(lambda: _rows(house) == 0)
        assert asked.count("remove_lines") >= 100
        assert asked.count("expire_batches") >= 5

    run(tmp_path, main)


def test_other_duties_do_not_wait_for_the_removal_of_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "_FILES_AT_A_TIME", 2)

    async def main(house: House) -> None:
        asked: list[str] = []

        async def note(name: str) -> None:
            asked.append(name)

        for _ in range(9):
            await house.jobs.delete_file(TENANT, await house.upload(line("a")))
        house.store.before = note
        duties = Maintenance(house.store, house.blobs, ServiceLimits())
        await duties.perform(0.0)
        assert asked.count("forget_files") == 1
        assert len(house.files()) == 7
        verified = asked.count("verify")
        for tenth in range(1, 11):
            await duties.perform(tenth / 10)
        duties.close()
        assert house.files() == []
        assert (asked.count("forget_files"), asked.count("expire_batches")) == (5, 2)
        assert asked.count("verify") == verified
        assert duties._burial.period == 30.0

    run(tmp_path, main)


@in_house
async def test_messages_that_were_given_up_go_after_30_days(house: House) -> None:
    duties = Maintenance(house.store, house.blobs, ServiceLimits())
    worker = await house.store.register_worker("test", 1e9)
    batch = await house.submit("a", callback_url="https://example.com")
    await house.store.take_validation(worker)
    await house.store.reject(worker, batch.id, [])
    [message] = await house.store.take_deliveries(worker, 9)
    await house.store.put_off(worker, message.id, until=None, reason="gone")
    for days, kept in ((0, 1), (29, 1), (2, 0)):
        house.clock.advance(days * 24 * HOUR)
        await duties.perform(house.clock.now())
        assert (await house.store.count_deliveries())["failed"] == kept
    duties.close()


@in_house
async def test_a_simple_batch_keeps_its_status_without_its_outputs(house: House) -> None:
    async with house.worker(Model()):
        batch = await house.ended(await house.jobs.create_simple(TENANT, Prompts(prompts=["a", "b"])))
        assert len(await house.jobs.outputs(TENANT, batch.id) or []) == 2
        await _delete_files(house, batch)
        await asyncio.sleep(60.0)
        assert await house.jobs.outputs(TENANT, batch.id) is None
        assert (await house.batch(batch)).status == "completed"
