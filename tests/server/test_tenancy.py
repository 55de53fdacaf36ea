"""Keys and tenants: access by key, and no access to another tenant's objects on any route."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Awaitable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import httpx2
import openai
import pytest
from tests.server.batch_files import begin, content, line
from tests.server.conftest import Service, routes, with_service

from batchwright.clock import ManualClock
from batchwright.errors import StoreUnavailable
from batchwright.server.http.auth import is_public
from batchwright.service.access.api_keys import SCOPES, ApiKeys
from batchwright.store import open_store
from batchwright.store.records import ApiKey
from batchwright.store.transaction import migrations
from batchwright.wire.requests import ALIASES, ENCODER_URLS

_T = TypeVar("_T")

_OURS = {"file_id": "file", "batch_id": "batch"}
_OPEN = {"/v1/models/{model:path}"}
"""Routes with an id that belongs to no tenant."""


@with_service()
async def test_another_tenants_ids_are_not_found_on_any_route(service: Service) -> None:
    ours, theirs = [service.as_tenant(await service.key(name)) for name in ("ours", "theirs")]
    service.client = service.client.copy(http_client=ours)
    service.client.api_key = ours.headers["authorization"].removeprefix("Bearer ")
    batch = await service.ended((await begin(service, line("a", "x"), line("b", "fail"))).id)
    simple = (await ours.post("/v1/batch/async", json={"prompts": ["x"]})).json()["batch_id"]
    assert batch.output_file_id is not None
    tried = 0
    for method, path in routes(service):
        names = re.findall(r"{(\w+)(?::\w+)?}", path)
        if not names or path in _OPEN or is_public(path) or path.startswith("/v1/admin"):
            continue
        ids = [batch.input_file_id, batch.output_file_id] if names == ["file_id"] else [batch.id, simple]
        assert names[0] in _OURS, f"{path}: say in this test whose {names} are"
        for each in ids:
            answer = await theirs.request(method, path.replace(f"{{{names[0]}}}", each))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), f"{method} {path}"
            tried += 1
    assert tried >= 20
    # Its owner still has all of it.
    assert (await ours.get(f"/v1/batches/{batch.id}")).json()["status"] == "completed"
    assert (await ours.get(f"/v1/files/{batch.output_file_id}/content")).status_code == 200


@with_service()
async def test_lists_counts_and_the_dashboard_show_a_tenant_its_own_only(service: Service) -> None:
    ours, theirs = [service.as_tenant(await service.key(name)) for name in ("ours", "theirs")]
    form = {"file": ("in.jsonl", content(line("a", "x")))}
    file_id = (await ours.post("/v1/files", files=form, data={"purpose": "batch"})).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await theirs.post("/v1/batches", json=body)).status_code == 404
    assert (await ours.post("/v1/batches", json=body)).status_code == 200
    await ours.post("/v1/batch/async", json={"prompts": ["x"]})
    for path, of in (("/v1/files", "data"), ("/v1/batches", "data"), ("/dashboard/state", "jobs")):
        assert (await theirs.get(path)).json()[of] == []
        assert (await ours.get(path)).json()[of] != []
    assert (await theirs.get("/v1/batch/stats")).json()["total_batches"] == 0
    assert (await ours.get("/v1/batch/stats")).json()["total_batches"] == 1
    assert sum((await theirs.get("/dashboard/state")).json()["job_counts"].values()) == 0


@with_service()
async def test_the_same_idempotency_key_of_another_tenant_is_another_batch(service: Service) -> None:
    made = []
    for name in ("ours", "theirs"):
        client = service.as_tenant(await service.key(name))
        answer = await client.post("/v1/batch/async", json={"prompts": ["x"]}, headers={"idempotency-key": "the same"})
        made.append(answer.json()["batch_id"])
    assert made[0] != made[1]


@with_service()
async def test_once_there_is_a_key_every_route_but_the_public_ones_needs_one(service: Service) -> None:
    key = await service.key("ours")
    nobody, wrong = service.as_tenant(None), service.as_tenant(key[:-1] + "x")
    closed = [(method, path) for method, path in routes(service) if not is_public(path)]
    assert len(closed) > 20
    for method, path in closed:
        for client in (nobody, wrong):
            answer = await client.request(method, path)
            assert answer.status_code == 401, f"{method} {path}"
            assert answer.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/ready"):
        assert (await nobody.get(path)).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        await service.client.models.list()
    assert (await service.as_tenant(key).get("/v1/models")).status_code == 200


@with_service()
async def test_a_revoked_key_is_refused_and_opens_nothing(service: Service) -> None:
    record, key = await service.services.keys.create("only", "ours")
    client = service.as_tenant(key)
    assert (await client.get("/v1/models")).status_code == 200
    await service.services.keys.revoke(record.id)
    assert (await client.get("/v1/models")).status_code == 401
    assert (await service.http.get("/v1/models")).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost:9000"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
@with_service()
async def test_without_keys_a_browser_is_not_led_to_act_for_another_site(
    service: Service, headers: dict[str, str], status: int
) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/batch/sync"), ("GET", "/dashboard/state")):
        answer: httpx2.Response = await service.http.request(
            method, path, headers=headers, json={"prompts": ["x"]} if method == "POST" else None
        )
        assert answer.status_code == status, path


@with_service()
async def test_a_page_elsewhere_cannot_post_a_form_in_place_of_json(service: Service) -> None:
    answer = await service.http.post(
        "/v1/batch/sync", content=b'{"prompts": ["x"]}', headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 400


class _Outage:
    """A wrapper of a store; while it is on, the database does not answer."""

    def __init__(self, service: Service) -> None:
        self.on = False
        self._store = service.services.keys._store
        service.services.keys._store = self  # type: ignore[assignment]

    async def any_key(self) -> bool:
        return await self._answer(self._store.any_key())

    async def key(self, digest: bytes) -> ApiKey | None:
        return await self._answer(self._store.key(digest))

    async def note_key_uses(self, used_at: dict[str, float]) -> None:
        await self._answer(self._store.note_key_uses(used_at))

    async def _answer(self, asked: Awaitable[_T]) -> _T:
        answer = await asked
        if self.on:
            raise StoreUnavailable("the database is away")
        return answer


@pytest.mark.parametrize("with_keys", [False, True])
@with_service()
async def test_who_was_let_in_before_is_let_in_while_the_database_is_away(service: Service, with_keys: bool) -> None:
    clock = service.services.keys._clock = ManualClock()
    client, stranger = service.http, service.http
    if with_keys:
        client, stranger = service.as_tenant(await service.key("ours")), service.as_tenant("bw-" + "x" * 43)
    outage = _Outage(service)
    assert (await client.get("/v1/models")).status_code == 200
    outage.on = True
    clock.advance(60)
    assert (await client.get("/v1/models")).status_code == 200
    assert (await stranger.get("/v1/models")).status_code == (503 if with_keys else 200)


@with_service()
async def test_nobody_is_let_in_while_it_is_not_known_whether_there_are_keys(service: Service) -> None:
    await service.services.store.add_key(ApiKey("key_1", "ours", "n", "bw-", 0.0), b"x" * 32)
    answers = await asyncio.gather(*[service.http.get("/v1/models") for _ in range(5)])
    assert [answer.status_code for answer in answers] == [401] * 5


@with_service()
async def test_a_database_that_was_away_from_the_start_lets_nobody_in(service: Service) -> None:
    _Outage(service).on = True
    answers = [await service.http.get("/v1/models") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503] * 2


def _needed(path: str) -> str | None:
    """Return the scope that a route needs; None: any key will do."""
    if path == "/v1/models" or path in _OPEN:
        return None
    if path == "/metrics":
        return "metrics"
    if path.startswith("/v1/admin"):
        return "admin"
    texts = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/batch/sync")
    online = (*texts, *ENCODER_URLS, *ALIASES)
    return "online" if path in online else "batches"


@with_service()
async def test_every_route_needs_its_scope_and_no_other(service: Service) -> None:
    for scope in SCOPES:
        client = service.as_tenant(await service.key("ours", scope, scopes=[scope]))
        tried = 0
        for method, path in routes(service):
            # A stream of states has no end.
            if is_public(path) or path == "/dashboard/events":
                continue
            needed = _needed(path)
            answer = await client.request(method, path, json={})
            refused = answer.status_code == 403
            assert refused == (needed not in (None, scope)), f"{method} {path} with {scope}: {answer.text}"
            if refused:
                error = answer.json()["error"]
                assert f"needs the scope {needed!r}" in error["message"]
                assert (error["type"], error["code"]) == ("permission_error", "missing_scope")
            tried += 1
        assert tried > 20


async def _is_watched(service: Service) -> bool:
    return any(feed._number for feed in service.app.state.feeds._feeds.values())


@pytest.mark.parametrize("how", ["revoked", "rotated", "without its scope"])
@with_service()
async def test_a_dashboard_that_is_open_ends_with_the_right_to_see_it(service: Service, how: str) -> None:
    keys = service.services.keys
    record, secret = await keys.create("looks", "ours")
    _, other = await keys.create("stays", "ours")
    looking = asyncio.create_task(service.as_tenant(secret).get("/dashboard/events"))
    staying = asyncio.create_task(service.as_tenant(other).get("/dashboard/events"))
    await service.until(lambda: _is_watched(service))
    if how == "revoked":
        await keys.revoke(record.id)
    elif how == "rotated":
        await keys.rotate(record.id, 0.0)
    else:
        await keys.update(record.id, {"scopes": ["online"]})
    last = (await looking).text.split("data: ")[-1]
    assert json.loads(last)["error"]["code"] == ("missing_scope" if "scope" in how else "invalid_api_key")
    assert not staying.done()
    service.services.drain()
    assert "error" not in json.loads((await staying).text.split("data: ")[-1])


@with_service()
async def test_a_dashboard_from_before_the_first_key_ends_with_it(service: Service) -> None:
    looking = asyncio.create_task(service.http.get("/dashboard/events"))
    await service.until(lambda: _is_watched(service))
    await service.services.keys.create("first", "ours")
    assert json.loads((await looking).text.split("data: ")[-1])["error"]["code"] == "missing_api_key"


def test_a_key_from_before_scopes_still_reads_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as old:
        scripts = migrations("sqlite")
        before = next(number for number, script in enumerate(scripts) if "api_keys ADD COLUMN scopes" in script)
        for script in scripts[:before]:
            old.executescript(script)
        old.execute(f"PRAGMA user_version = {before}")
        old.execute("INSERT INTO api_keys VALUES ('key_1', 't', 'old', 'bw-', 0, NULL, ?)", [b"x" * 32])
        old.commit()

    async def main() -> None:
        async with open_store(path) as store:
            assert await store.key(b"x" * 32) == ApiKey(
                "key_1", "t", "old", "bw-", 0.0, scopes=("online", "batches", "metrics"), weight=1.0, best_priority=None
            )

    asyncio.run(main())


@with_service()
async def test_the_priority_of_requests_and_of_lines_is_bounded_by_the_key(service: Service) -> None:
    asked = {"model": "stub", "prompt": "x", "priority": -100}
    await service.http.post("/v1/completions", json=asked)
    assert service.stub.calls[-1].body["priority"] == -100  # without keys there is no bound
    for best in (5, 9, None):
        client = service.as_tenant(await service.key("ours", best_priority=best))
        expected = -100 if best is None else best
        service.stub.calls.clear()
        await client.post("/v1/completions", json=asked)
        await client.post("/v1/batch/sync", json={"prompts": ["x", "y"], "priority": -100})
        form = {"file": ("in.jsonl", content(line("a", "x", priority=-100), line("b", "y", priority=200)))}
        file_id = (await client.post("/v1/files", files=form, data={"purpose": "batch"})).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        made = (await client.post("/v1/batches", json=body)).json()["id"]

        async def done(client: httpx2.AsyncClient = client, path: str = f"/v1/batches/{made}") -> bool:
            return bool((await client.get(path)).json()["status"] == "completed")

        await service.until(done)
        online = [call.body["priority"] for call in service.stub.calls if call.traffic == "online"]
        lines = [call.body["priority"] for call in service.stub.calls if call.traffic == "batch"]
        assert online == [expected] * 3
        assert sorted(lines) == [expected, 200]


@with_service()
async def test_a_key_that_another_process_makes_is_required_of_the_very_next_request(
    service: Service, tmp_path: Path
) -> None:
    assert (await service.http.get("/v1/models")).status_code == 200
    async with open_store(tmp_path / "data" / "batchwright.db") as elsewhere:
        _, secret = await ApiKeys(elsewhere).create("first")
    assert (await service.http.get("/v1/models")).status_code == 401
    assert (await service.as_tenant(secret).get("/v1/models")).status_code == 200
