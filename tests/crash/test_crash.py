"""A few kills, and other ways in which a service loses its footing. The long form: `make crash-test`."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from tests.crash.campaign import (
    RARE,
    Campaign,
    Figures,
    crash_points,
    start_campaign_service,
    start_service,
    under_load,
    writes_of_the_store,
)
from tests.crash.load import eventually
from tests.crash.outside import Outside
from tests.long_form import examples
from tests.postgres import PostgresServer

SEED = 20
_TRIES = 400
_AT_THE_START = "store.register_worker.after_commit"
LEASE = 2.0
"""Seconds; short, so that its end can be waited for."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


def test_the_places_to_kill_at_are_those_of_the_source() -> None:
    assert writes_of_the_store() >= RARE | {"commit", "claim", "finish", "share_rates"}
    assert {"store.commit.before_commit", "store.after_commit", "blobs.before_rename"} <= set(crash_points())


def test_a_service_dies_at_the_place_that_it_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Outside() as outside:
            service = start_service(tmp_path, str(tmp_path / "batchwright.db"), outside)
            service.start({"BATCHWRIGHT_CRASH_AT": f"{_AT_THE_START}:1"})
            assert not await service.ready()
            service.start()
            assert await service.ready()
            assert await service.stop() == 0

    assert _AT_THE_START in crash_points()
    asyncio.run(scenario())


def test_killed_on_sqlite(tmp_path: Path) -> None:
    kills = examples(4, long=6)
    figures = asyncio.run(_campaign(tmp_path, str(tmp_path / "batchwright.db"), kills))
    assert figures.kills.total() == kills


def test_killed_on_postgresql(tmp_path: Path, postgres: PostgresServer) -> None:
    kills = examples(2, long=4)
    figures = asyncio.run(_campaign(tmp_path, postgres.new_database(), kills))
    assert figures.kills.total() == kills


async def _campaign(folder: Path, database: str, kills: int) -> Figures:
    async with Outside() as outside:
        return await Campaign(start_campaign_service(folder, database, outside), outside, SEED).run(kills)


def test_postgresql_restarted_under_load(tmp_path: Path, postgres: PostgresServer) -> None:
    async def scenario() -> None:
        async with Outside() as outside:
            service = start_service(tmp_path, postgres.new_database(), outside)
            async with under_load(service, outside, SEED) as load:
                service.start()
                for _ in range(3):
                    await load.more_ends(2)
                    await asyncio.to_thread(postgres.restart)
                await load.more_ends(2)
                assert service.alive

    asyncio.run(scenario())


def test_a_stopped_worker_loses_its_lease_and_its_late_results(tmp_path: Path) -> None:
    """The lines of one that is stopped for longer than its lease go to another; when it wakes, it commits none."""

    async def scenario() -> None:
        async with Outside() as outside:
            lease = ("--lease", str(LEASE))
            service = start_service(tmp_path, str(tmp_path / "batchwright.db"), outside, *lease)
            async with under_load(service, outside, SEED) as load:
                service.start()
                await load.more_ends(1)
                worker = service.worker(*lease)
                await eventually(lambda: "working on batches" in service.log.read_text())
                await load.more_ends(1)
                await asyncio.to_thread(_stop_between_writes, worker.pid, tmp_path / "batchwright.db")
                await load.more_ends(8)
                await asyncio.sleep(1.5 * LEASE)
                os.kill(worker.pid, signal.SIGCONT)
                await load.more_ends(3)
                worker.terminate()
                assert await asyncio.to_thread(worker.wait, 60) == 0

    asyncio.run(scenario())


def _stop_between_writes(pid: int, database: Path) -> None:
    """Stop a process that does not hold SQLite's lock for writing, which would stop all others with it."""
    for _ in range(_TRIES):
        os.kill(pid, signal.SIGSTOP)
        with closing(sqlite3.connect(database, timeout=5.0, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)
            else:
                connection.execute("ROLLBACK")
                return
    raise RuntimeError("the process was never found between two writes")


def test_a_full_disk_is_answered_and_survived(tmp_path: Path) -> None:
    """No file may grow; then it may again: the same process goes on, and what it acknowledged is there."""

    async def scenario() -> None:
        async with Outside() as outside:
            service = start_service(tmp_path, str(tmp_path / "batchwright.db"), outside)
            async with under_load(service, outside, SEED) as load:
                service.start()
                await load.more_ends(2)
                _, hard = resource.prlimit(service.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (4096, hard))
                async with httpx.AsyncClient(base_url=service.url) as client:
                    for _ in range(_TRIES):
                        if (answer := await client.get("/ready")).status_code != 200:
                            break
                        await asyncio.sleep(0.05)
                assert answer.status_code == 503
                resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (hard, hard))
                await load.more_ends(3)
                assert service.alive

    asyncio.run(scenario())
