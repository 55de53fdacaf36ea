"""The service beside a database that is damaged while it runs, and on a disk that is almost full."""

from __future__ import annotations

import io
import os
import shutil
from collections import namedtuple
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import openai
import pytest
from structlog.typing import EventDict
from tests.server.conftest import Play, Service, with_service
from tests.store.support import spoil_table

from batchwright.errors import StoreUnavailable
from batchwright.wire.error_bodies import error_body

_Usage = namedtuple("_Usage", ["total", "used", "free"])
_LINE = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", '
    b'"body": {"model": "stub", "messages": [{"role": "user", "content": "x"}]}}\n'
)


async def _why(service: Service) -> str | None:
    """Return the reason that `/ready` tells; None: ready."""
    service.services._checked = None
    answer = await service.http.get("/ready")
    return None if answer.status_code == 200 else str(answer.json()["error"]["message"])


def _spoil(path: Path, how: str) -> None:
    size = path.stat().st_size
    match how:
        case "truncated":
            os.truncate(path, 4096)
        case "emptied":
            os.truncate(path, 0)
        case "overwritten":
            with path.open("r+b") as file:
                file.write(os.urandom(size))
        case "replaced":
            other = path.with_name("other.db")
            shutil.copy(path, other)
            other.replace(path)
        case "removed":
            path.unlink()


@pytest.mark.parametrize("how", ["truncated", "emptied", "overwritten", "replaced", "removed"])
@with_service()
async def test_a_database_that_is_spoilt_while_it_is_open_is_told_and_nothing_is_removed(
    service: Service, logged: list[EventDict], how: str
) -> None:
    uploaded = await service.client.files.create(file=("x.jsonl", _LINE), purpose="batch")
    assert await _why(service) is None
    # The checkpoint moves what was written so far into the file itself, as happens after a while.
    data = service.services.settings.data
    with closing(apsw.Connection(str(data / "batchwright.db"))) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    _spoil(data / "batchwright.db", how)
    told = await _why(service)
    assert told is not None
    assert "the database is damaged" in told
    assert str(data) not in told
    assert any(str(data) in str(event.get("reason")) for event in logged if event["event"] == "not_ready")
    with pytest.raises(StoreUnavailable):
        await service.services.store.verify()
    assert service.services.blobs.path(uploaded.id).exists()


@pytest.mark.parametrize("table", ["batches", "api_keys"])
@with_service()
async def test_a_table_that_is_spoilt_behind_its_index_is_told(service: Service, table: str) -> None:
    spoil_table(service.services.settings.data / "batchwright.db", table)
    told = await _why(service)
    assert told is not None
    assert "the database is damaged" in told


def test_a_disk_that_is_almost_full_takes_no_new_work_and_goes_on_with_what_it_has(
    play: Play, logged: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2**30
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(2**40, 2**40 - free, free))

    async def main(service: Service) -> None:
        nonlocal free
        uploaded = await service.client.files.create(file=("x.jsonl", _LINE), purpose="batch")
        wanted: Any = {"input_file_id": uploaded.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await service.client.batches.create(**wanted)
        free = 99 * 2**20
        told = await _why(service)
        assert told == "the disk of the service is almost full: its operator must make room"
        assert any("min_free_disk" in str(event.get("reason")) for event in logged)
        with pytest.raises(openai.InternalServerError, match="almost full") as refused:
            await service.client.files.create(file=io.BytesIO(_LINE), purpose="batch")
        assert refused.value.response.status_code == 503
        with pytest.raises(openai.InternalServerError, match="almost full"):
            await service.client.batches.create(**wanted)
        answer = await service.http.post("/v1/batch/async", json={"prompts": ["x"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        ended = await service.ended(batch.id)
        assert ended.status == "completed"
        await service.client.files.delete(uploaded.id)
        free = 2**30
        assert await _why(service) is None

    play(main, min_free_disk=100 * 2**20)


def test_callers_are_told_no_paths_and_hosts() -> None:
    error = StoreUnavailable('the database /var/lib/x does not take this: connection to "db.internal" refused')
    assert error_body(error)["error"]["message"] == "the database does not answer: try again in a moment"
