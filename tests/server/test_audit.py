"""The audit log: a line for everything that changes state or reads contents, and for refused access."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.batch_files import content, line
from tests.server.conftest import Service, routes, with_service

from batchwright.clock import ManualClock
from batchwright.server.http.audit_trail import AuditMiddleware, Sparing
from batchwright.service.access.audit import AuditLog
from batchwright.wire.requests import ALIASES, ENCODER_URLS

_DAY = 86_400.0
_NOON = datetime(2030, 5, 10, 12, tzinfo=UTC).timestamp()


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for path in sorted(folder.glob("*.jsonl")) for each in path.read_text().splitlines()]


def _written(service: Service) -> list[dict[str, Any]]:
    """Return all lines, once pending ones are written."""
    service.services.audit.close()
    return _lines(service.services.settings.data / "audit")


@with_service()
async def test_the_life_of_a_batch_is_written_down(service: Service) -> None:
    record, secret = await service.services.keys.create("ci", "team")
    client = service.as_tenant(secret)
    service.client = service.client.copy(http_client=client)
    service.client.api_key = secret
    form = {"file": ("in.jsonl", content(line("a", "x"), line("b", "fail")))}
    request_id = {"x-request-id": "mine-1"}
    answer = await client.post("/v1/files", files=form, data={"purpose": "batch"}, headers=request_id)
    file_id = answer.json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = (await client.post("/v1/batches", json=body)).json()["id"]
    await service.ended(batch_id)
    await client.get(f"/v1/files/{file_id}/content")
    await client.get(f"/v1/batches/{batch_id}/results")
    retried = (await client.post(f"/v1/batches/{batch_id}/retry")).json()["id"]
    await client.post(f"/v1/batches/{retried}/pause")
    await client.post(f"/v1/batches/{retried}/resume")
    await client.post(f"/v1/batches/{retried}/cancel")
    await client.delete(f"/v1/files/{file_id}x")
    await service.ended(retried)
    await client.delete(f"/v1/files/{file_id}")
    simple = (await client.post("/v1/batch/async", json={"prompts": ["x"]})).json()["batch_id"]
    await service.until(lambda: _ended(client, simple))
    written = _written(service)
    told = [(each["action"], each["outcome"], each.get("object")) for each in written]
    assert told == [
        ("file.upload", "done", file_id),
        ("batch.create", "done", batch_id),
        ("file.content", "done", file_id),
        ("batch.results", "done", batch_id),
        ("batch.retry", "done", f"{batch_id} as {retried}"),
        ("batch.pause", "done", retried),
        ("batch.resume", "done", retried),
        ("batch.cancel", "done", retried),
        ("file.delete", "refused", f"{file_id}x"),
        ("file.delete", "done", file_id),
        ("batch.create", "done", simple),
        ("batch.results", "done", simple),
    ]
    first = written[0]
    assert (first["tenant"], first["key"], first["key_name"]) == ("team", record.id, "ci")
    assert (first["request_id"], first["status"], first["address"]) == ("mine-1", 200, "127.0.0.1")
    assert datetime.fromisoformat(first["at"]).tzinfo == UTC
    assert written[8]["status"] == 404


async def _ended(client: Any, batch_id: str) -> bool:
    return bool((await client.get(f"/v1/batch/{batch_id}")).json()["status"] == "completed")


@with_service()
async def test_every_route_that_changes_something_writes_a_line(service: Service) -> None:
    texts = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/batch/sync")
    online = (*texts, *ENCODER_URLS, *ALIASES)
    changing = [(method, path) for method, path in routes(service) if method != "GET" and path not in online]
    assert len(changing) >= 12
    batch = {"input_file_id": "file-" + "0" * 24, "endpoint": "/v1/completions", "completion_window": "24h"}
    bodies = {
        "/v1/batches": batch,
        "/v1/batch/async": {"prompts": ["x"]},
        "/v1/admin/keys": {"name": "no name"},
        "/v1/admin/quotas/{tenant}": {"storage_bytes": 1},
    }
    for method, path in changing:
        # The request may be refused, but it is recorded all the same.
        path_of = path.replace(":simple", "").replace("{tenant}", "t").replace("{key_id}", "key_" + "0" * 24)
        path_of = path_of.replace("{batch_id}", "batch_" + "0" * 24)
        await service.http.request(method, path_of, json=bodies.get(path, {}))
    assert len(_written(service)) == len(changing)


@with_service()
async def test_strangers_are_written_down_but_not_each_time(service: Service) -> None:
    clock = _trail(service)._clock = ManualClock()
    key = await service.key("ours", scopes=["online"])
    nobody, limited = service.as_tenant(None), service.as_tenant(key)
    for _ in range(50):
        assert (await nobody.get("/v1/files")).status_code == 401
    assert (await limited.get("/metrics")).status_code == 403
    clock.advance(61)
    assert (await limited.get("/metrics")).status_code == 403
    written = _written(service)
    assert [each["action"] for each in written] == ["access.refused"] * 12
    assert [each["object"] for each in written[:10]] == ["GET /v1/files"] * 10
    assert written[10]["suppressed"] == 41
    assert (written[11]["status"], written[11]["tenant"], written[11]["object"]) == (403, "ours", "GET /metrics")


def _trail(service: Service) -> Any:
    """Return the middleware that writes the log."""
    layer: Any = service.app.build_middleware_stack()
    service.app.middleware_stack = layer
    while not isinstance(layer, AuditMiddleware):
        layer = getattr(layer, "app", None) or layer._app
    return layer


@with_service(audit_retention=0)
async def test_without_retention_nothing_is_written(service: Service) -> None:
    await service.http.post("/v1/batch/async", json={"prompts": ["x"]})
    assert _written(service) == []
    assert not (service.services.settings.data / "audit").exists()


def test_a_day_has_a_file_for_its_owner_and_old_ones_go(tmp_path: Path) -> None:
    now = [_NOON]
    log = AuditLog(tmp_path / "audit", retention=2, now=lambda: now[0])
    for _ in range(5):
        log.record("test", "done")
        log.close()
        now[0] += _DAY
    (tmp_path / "audit" / "notes.txt").write_text("mine")
    (tmp_path / "audit" / "2001-01-01.txt").write_text("mine")
    assert len(list((tmp_path / "audit").glob("*.jsonl"))) == 5
    assert [day.isoformat() for day in sorted(log.remove_old())] == ["2030-05-10", "2030-05-11", "2030-05-12"]
    left = sorted(path.name for path in (tmp_path / "audit").iterdir())
    assert left == ["2001-01-01.txt", "2030-05-13.jsonl", "2030-05-14.jsonl", "notes.txt"]
    assert stat.S_IMODE((tmp_path / "audit" / "2030-05-13.jsonl").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o700


_APPEND = """
import sys
from pathlib import Path
from batchwright.clock import ManualClock
from batchwright.service.access.audit import AuditLog

log = AuditLog(Path(sys.argv[1]), retention=1, now=lambda: float(sys.argv[2]))
for number in range(300):
    log.record("test", "done", object=f"{sys.argv[3]}-{number}", long="x" * 5000)
log.close()
"""


def test_processes_append_whole_lines_to_one_file(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _APPEND, str(tmp_path), str(_NOON), str(number)], env=os.environ)
        for number in range(3)
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    objects = [each["object"] for each in _lines(tmp_path)]
    for number in range(3):
        assert [each for each in objects if each.startswith(f"{number}-")] == [
            f"{number}-{place}" for place in range(300)
        ]


def test_a_full_disk_leaves_no_half_line_and_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path, retention=1, now=lambda: _NOON)
    log.record("first", "done")
    log.close()
    true_write = os.write

    def short(descriptor: int, content: bytes) -> int:
        return true_write(descriptor, content[: len(content) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", short)
        log.record("second", "done")
        log.close()
        with pytest.raises(OSError, match="make room on its disk"):
            log.write("third", "done")
    log.record("fourth", "done", object="\ud800")
    log.close()
    assert [(each["action"], each.get("lines")) for each in _lines(tmp_path)] == [
        ("first", None),
        ("fourth", None),
        ("audit.lost", 1),
    ]


@given(st.lists(st.tuples(st.floats(0, 40), st.sampled_from("abc")), max_size=60), st.integers(1, 4))
def test_each_kind_is_let_through_a_few_times_and_all_others_are_counted(
    events: list[tuple[float, str]], most: int
) -> None:
    sparing, now = Sparing(most, 60.0), 0.0
    through = counted = 0
    for elapsed, kind in events:
        now += elapsed
        let, suppressed = sparing.take(kind, now)
        through += let
        counted += suppressed
    _, rest = sparing.take("d", now + 60)
    assert through + counted + rest == len(events)
    if events:
        assert through >= min(len(events), 1)
