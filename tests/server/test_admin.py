"""The admin API: keys and quotas over HTTP, for keys with the scope."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.conftest import Service, with_service

from batchwright.limiting.quotas import Quotas
from batchwright.server.http.auth import AuthMiddleware
from batchwright.server.http.error_answers import HttpError


@with_service()
async def test_a_key_is_made_changed_rotated_and_revoked(service: Service) -> None:
    # The first key is made from this machine; from then on a key with the scope is needed.
    body: dict[str, Any] = {"name": "root", "scopes": ["admin"]}
    first = (await service.http.post("/v1/admin/keys", json=body)).json()
    assert (await service.http.get("/v1/admin/keys")).status_code == 401
    admin = service.as_tenant(first["secret"])
    body = {"name": "ci", "tenant": "team", "expires_at": service.wall() + 1000, "weight": 2.5, "best_priority": None}
    body |= {"quotas": {"requests_per_minute": 9}}
    made = (await admin.post("/v1/admin/keys", json=body)).json()
    assert {name: made[name] for name in ("name", "tenant", "weight", "best_priority", "scopes")} == {
        "name": "ci", "tenant": "team", "weight": 2.5, "best_priority": None, "scopes": ["online", "batches"],
    }  # fmt: skip
    assert made["quotas"]["requests_per_minute"] == 9
    assert made["quotas"]["storage_bytes"] is None
    client, path = service.as_tenant(made["secret"]), f"/v1/admin/keys/{made['id']}"
    assert (await client.get("/v1/files")).status_code == 200
    assert (await client.get("/v1/admin/keys")).status_code == 403
    listed = (await admin.get("/v1/admin/keys")).json()["data"]
    assert [key["name"] for key in listed] == ["ci", "root"]
    assert not any("secret" in key for key in listed)
    assert [key["name"] for key in (await admin.get("/v1/admin/keys?tenant=team")).json()["data"]] == ["ci"]

    changed = (await admin.post(path, json={"scopes": ["metrics"], "expires_at": None})).json()
    assert (changed["scopes"], changed["expires_at"], changed["weight"]) == (["metrics"], None, 2.5)
    assert changed["quotas"]["requests_per_minute"] == 9
    changed = (await admin.post(path, json={"quotas": {"tokens_per_minute": 50}})).json()["quotas"]
    assert (changed["requests_per_minute"], changed["tokens_per_minute"]) == (9, 50)
    changed = (await admin.post(path, json={"quotas": {"tokens_per_minute": None}})).json()["quotas"]
    assert (changed["requests_per_minute"], changed["tokens_per_minute"]) == (9, None)
    for name in ("name", "scopes", "weight", "quotas"):
        refused = await admin.post(path, json={name: None})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert (await client.get("/v1/files")).status_code == 403
    assert (await client.get("/metrics")).status_code == 200

    rotated = (await admin.post(f"{path}/rotate", json={"overlap_seconds": 0})).json()
    assert rotated["id"] == made["id"]
    assert (await client.get("/metrics")).status_code == 401
    assert (await service.as_tenant(rotated["secret"]).get("/metrics")).status_code == 200
    again = (await admin.post(f"{path}/rotate")).json()
    assert (await service.as_tenant(rotated["secret"]).get("/metrics")).status_code == 200
    assert again["previous_until"] is not None

    assert (await admin.delete(path)).json()["revoked_at"] is not None
    assert (await service.as_tenant(again["secret"]).get("/metrics")).status_code == 401
    assert (await admin.get(path)).json()["revoked_at"] is not None
    for refused in (
        await admin.get("/v1/admin/keys/key_0"),
        await admin.delete("/v1/admin/keys/key_" + "0" * 24),
        await admin.post(f"{path}/rotate"),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a", "tenant": ""}, "tenant"),
        ({"name": "a", "scopes": []}, "scopes"),
        ({"name": "a", "scopes": ["root"]}, "scopes[0]"),
        ({"name": "a", "weight": 0}, "weight"),
        ({"name": "a", "expires_at": 1}, "expires_at"),
        ({"name": "a", "quotas": {"storage_bytes": 0}}, "quotas.storage_bytes"),
        ({"name": "a", "quotas": {"speed": 1}}, "quotas.speed"),
        ({"name": "a", "quotas": {"storage_bytes": True}}, "quotas.storage_bytes"),
        ({"name": "a", "quotas": {"storage_bytes": "5"}}, "quotas.storage_bytes"),
        ({"name": "a", "weight": "2"}, "weight"),
        ({"name": "a", "best_priority": 2**40}, "best_priority"),
    ],
)
@with_service()
async def test_what_a_key_cannot_be_is_refused_by_name(service: Service, body: dict[str, Any], param: str) -> None:
    answer = await service.http.post("/v1/admin/keys", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert await service.services.keys.keys() == []


@with_service(quota_enqueued_lines=7)
async def test_quotas_are_set_and_hold_at_once(service: Service) -> None:
    answer = await service.http.put("/v1/admin/quotas/default", json={"requests_per_minute": 1, "storage_bytes": 50})
    assert answer.json()["quotas"]["requests_per_minute"] == 1
    await service.services.peers.exchange()
    prompt = {"model": "stub", "prompt": "x"}
    statuses = [(await service.http.post("/v1/completions", json=prompt)).status_code for _ in range(2)]
    assert statuses == [200, 429]
    listed = (await service.http.get("/v1/admin/quotas")).json()
    assert [each["tenant"] for each in listed["data"]] == ["default"]
    assert listed["data"][0]["used"] == {"storage_bytes": 0, "enqueued_lines": 0, "enqueued_tokens": 0}
    assert listed["defaults"]["enqueued_lines"] == 7
    # A PUT replaces all limits.
    await service.http.put("/v1/admin/quotas/default", json={"storage_bytes": 60})
    assert await service.services.store.tenant_quotas() == {"default": Quotas(storage_bytes=60)}
    await service.http.put("/v1/admin/quotas/default", json={})
    assert await service.services.store.tenant_quotas() == {}
    assert (await service.http.get("/v1/admin/quotas/other")).json()["quotas"]["storage_bytes"] is None
    assert (await service.http.put("/v1/admin/quotas/a%20b", json={})).status_code == 400
    weighted = await service.http.put("/v1/admin/quotas/team", json={"weight": 2.5})
    assert (weighted.json()["weight"], listed["data"][0]["weight"]) == (2.5, 1.0)
    again = await service.http.put("/v1/admin/quotas/team", json={"storage_bytes": 9})
    assert again.json()["weight"] == 2.5
    assert (await service.http.put("/v1/admin/quotas/team", json={"weight": 0})).status_code == 400


@with_service()
async def test_beyond_this_machine_there_is_no_administration_without_a_key(service: Service) -> None:
    passed = []

    async def inner(*_: object) -> None:
        passed.append(1)

    async def nothing() -> Any:
        raise AssertionError

    guard = AuthMiddleware(inner, keys=service.services.keys, loopback=False)
    scope = {"type": "http", "method": "GET", "path": "/v1/admin/keys", "headers": [(b"host", b"127.0.0.1")]}
    with pytest.raises(HttpError) as refused:
        await guard(scope, nothing, inner)
    assert (refused.value.status, passed) == (401, [])
