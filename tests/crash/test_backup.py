"""The commands of docs/operations.md: a backup taken under load is restored to a service that goes on."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.crash.campaign import start_service, under_load
from tests.crash.load import Client, Load
from tests.crash.outside import Outside
from tests.crash.service import Service
from tests.postgres import PostgresServer

SEED = 7
_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
_PLACES = "DATA=/var/lib/batchwright BACKUP=/backup/$(date +%F)\n"


def _script(first_words: str) -> str:
    """The block of commands on the page that has a line which begins so."""
    found = [
        block for block in re.findall(r"^```bash\n(.*?)^```$", _PAGE, re.M | re.S) if f"\n{first_words}" in f"\n{block}"
    ]
    assert len(found) == 1, f"{len(found)} blocks with {first_words!r}"
    return str(found[0])


def _run(script: str, **variables: str) -> None:
    """A file may vanish under a `cp`, as the page says: only the last command must succeed."""
    ended = subprocess.run(
        ["bash", "-uc", script], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def _require(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


async def _assert_restored_whole(
    folder: Path, database: str, back_up: Callable[[Path], None], restore: Callable[[Path], str]
) -> None:
    """`back_up` gets the data folder; `restore` fills another one, and says which database goes with it."""
    async with Outside() as outside:
        service = start_service(folder / "original", database, outside)
        async with under_load(service, outside, SEED) as load:
            service.start()
            await load.more_ends(4)
            async with load.loads[0].waiting_batch(outside):
                await asyncio.to_thread(back_up, service.data)
            await load.more_ends(2)
        data = folder / "restored" / "data"
        data.mkdir(parents=True)
        there = f"http://127.0.0.1:{outside.port}/v1"
        restored = Service(data, await asyncio.to_thread(restore, data), there, ["--webhook-allow", "127.0.0.1"])
        before = outside.calls.total()
        try:
            restored.start()
            await restored.ready()
            await _check(restored.url, load.loads[0])
            assert await restored.stop() == 0, restored.tail()
        finally:
            restored.kill()
        assert outside.calls.total() > before, "nothing was left to do in the backup"
        left = [*(data / "files").rglob("*.tmp")]
        assert not left, f"temporary files were left behind: {left}"


async def _check(url: str, original: Load) -> None:
    """Every batch of the backup ends well."""
    client = Client(url)
    jobs = {job.batch_id: job for job in original.jobs}
    copy = Load(client, SEED)
    try:
        batches = [batch["id"] for batch in await copy._all("/v1/batches")]
        for batch_id in batches:
            job = replace(jobs[batch_id], record={}, results=None)
            await copy.end_paused(job)
            await copy._check_job(job)
    finally:
        await client.close()
    assert len(batches) >= 4


def test_sqlite(tmp_path: Path) -> None:
    _require("sqlite3")
    backup = tmp_path / "backup"
    script = _script("umask 077")
    assert _PLACES in script

    def back_up(data: Path) -> None:
        _run(script.replace(_PLACES, ""), DATA=str(data), BACKUP=str(backup))

    def restore(data: Path) -> str:
        shutil.copytree(backup, data, dirs_exist_ok=True)
        assert (data / "batchwright.db").stat().st_mode & 0o077 == 0, "others can read the backup"
        return str(data / "batchwright.db")

    asyncio.run(
        _assert_restored_whole(tmp_path, str(tmp_path / "original" / "data" / "batchwright.db"), back_up, restore)
    )


def test_postgresql(tmp_path: Path) -> None:
    _require("pg_dump", "pg_restore")
    backup = tmp_path / "backup"
    files = [line for line in _script("umask 077").splitlines() if line.startswith("cp ")]
    dump = _script("pg_dump ")
    first, again = files

    with PostgresServer() as postgres:
        database, other = postgres.new_database(), postgres.new_database()

        def back_up(data: Path) -> None:
            backup.mkdir()
            _run(f"{first}\n{dump}\n{again}\nsync", DATA=str(data), BACKUP=str(backup), DATABASE=database)

        def restore(data: Path) -> str:
            shutil.copytree(backup / "files", data / "files")
            _run(_script("pg_restore "), BACKUP=str(backup), DATABASE=other)
            return other

        asyncio.run(_assert_restored_whole(tmp_path, database, back_up, restore))
