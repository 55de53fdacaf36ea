"""`/v1/batch/*`: simple batches of prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.server.conftest import Play, Service, with_service


async def _ended(service: Service, batch_id: str) -> dict[str, Any]:
    state: dict[str, Any] = {}

    async def has_ended() -> bool:
        nonlocal state
        state = (await service.http.get(f"/v1/batch/{batch_id}")).json()
        return state["outputs"] is not None

    await service.until(has_ended)
    return state


@with_service()
async def test_prompts_are_answered_in_order_and_one_that_fails_has_an_entry(service: Service) -> None:
    body = {"prompts": ["a b", "fail", "c"], "max_tokens": 1, "model": "stub"}
    answer = (await service.http.post("/v1/batch/sync", json=body)).json()
    assert answer["outputs"] == ["A", None, "C"]
    assert [(each["index"], each["code"]) for each in answer["errors"]] == [(1, "generation_failed")]
    assert answer["total_tokens"] == 2
    assert answer["latency_ms"] > 0
    assert answer["throughput_tokens_per_sec"] > 0
    assert answer["batch_id"].startswith("batch_")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompts"),
        ({"prompts": []}, 400, "prompts"),
        ({"prompts": ["x"] * 4}, 400, "prompts"),
        ({"prompts": ["x"], "max_tokens": 0}, 400, "max_tokens"),
        ({"prompts": ["x"], "temperature": -1}, 400, "temperature"),
        ({"prompts": ["x"], "tempreature": 1}, 400, "tempreature"),
        ({"prompts": ["x"], "model": "none"}, 404, "model"),
    ],
)
@with_service(max_prompts=3)
async def test_what_is_wrong_is_told_by_name(service: Service, body: dict[str, Any], status: int, param: str) -> None:
    answer = await service.http.post("/v1/batch/sync", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@with_service()
async def test_a_sync_batch_whose_client_hangs_up_is_cancelled(service: Service) -> None:
    asking = asyncio.create_task(service.http.post("/v1/batch/sync", json={"prompts": ["wait", "wait"]}))

    async def both_wait() -> bool:
        return service.stub.waiting == 2

    await service.until(both_wait)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (service.stub.cancelled, service.services.online.inside) == (2, 0)


@with_service()
async def test_a_job_of_prompts_goes_from_pending_to_completed(service: Service) -> None:
    service.stub.gate.clear()
    body = {"prompts": ["a b", "fail", "c"], "model": "stub"}
    made = (await service.http.post("/v1/batch/async", json=body)).json()
    assert made["status"] == "pending"
    state = (await service.http.get(f"/v1/batch/{made['batch_id']}")).json()
    assert (state["status"] in ("pending", "processing"), state["outputs"]) == (True, None)
    service.stub.gate.set()
    state = await _ended(service, made["batch_id"])
    assert (state["status"], state["progress"]) == ("completed", 1.0)
    assert state["outputs"] == ["A B", None, "C"]
    assert [(each["index"], each["code"]) for each in state["errors"]] == [(1, "generation_failed")]
    assert (await service.http.get("/v1/batches")).json()["data"] == []


@with_service()
async def test_a_job_of_prompts_is_cancelled_by_delete(service: Service) -> None:
    service.stub.gate.clear()
    made = (await service.http.post("/v1/batch/async", json={"prompts": ["a"]})).json()

    async def it_runs() -> bool:
        return len(service.stub.calls) == 1

    await service.until(it_runs)
    cancelled = await service.http.delete(f"/v1/batch/{made['batch_id']}")
    state = cancelled.json()
    # No final status without the results that belong to it.
    assert (cancelled.status_code, state["status"] == "cancelled") == (200, state["outputs"] is not None)
    state = await _ended(service, made["batch_id"])
    assert (state["status"], state["outputs"], len(state["errors"])) == ("cancelled", [None], 1)
    assert state["progress"] == 0.0


@with_service()
async def test_a_final_status_comes_with_the_results_and_progress_tells_what_was_computed(service: Service) -> None:
    made = (await service.http.post("/v1/batch/async", json={"prompts": ["a", "wait", "wait", "fail"]})).json()
    path = f"/v1/batch/{made['batch_id']}"

    async def two_are_done() -> bool:
        return bool((await service.http.get(path)).json()["progress"] == 0.5)

    await service.until(two_are_done)
    seen = [(await service.http.delete(path)).json()]

    async def is_final() -> bool:
        stats = (await service.http.get("/v1/batch/stats")).json()
        assert stats["processing"] + stats["cancelled"] == 1
        seen.append((await service.http.get(path)).json())
        return bool(seen[-1]["status"] not in ("pending", "processing"))

    await service.until(is_final)
    for state in seen:
        is_ended = state["status"] == "cancelled"
        assert is_ended or state["status"] == "processing"
        assert ((state["outputs"] is not None), (state["errors"] is not None)) == (is_ended, is_ended)
        assert state["progress"] == 0.5
    assert seen[-1]["outputs"] == ["A", None, None, None]
    assert [each["code"] for each in seen[-1]["errors"]] == ["batch_cancelled"] * 2 + ["generation_failed"]


@with_service()
async def test_a_job_that_is_cancelled_before_it_begins_has_a_result_for_each_prompt(service: Service) -> None:
    service.stub.gate.clear()
    made = (await service.http.post("/v1/batch/async", json={"prompts": ["a", "b", "c"]})).json()
    await service.http.delete(f"/v1/batch/{made['batch_id']}")
    state = await _ended(service, made["batch_id"])
    assert (state["status"], state["progress"], state["outputs"]) == ("cancelled", 0.0, [None] * 3)
    assert [(each["index"], each["code"]) for each in state["errors"]] == [(n, "batch_cancelled") for n in range(3)]


@with_service()
async def test_stats_are_not_taken_for_an_id(service: Service) -> None:
    made = (await service.http.post("/v1/batch/async", json={"prompts": ["a"]})).json()
    await _ended(service, made["batch_id"])
    stats = (await service.http.get("/v1/batch/stats")).json()
    assert (stats["total_batches"], stats["completed"], stats["pending"]) == (1, 1, 0)
    assert {"processing", "failed", "padding_efficiency", "occupancy", "tokens_per_sec"} <= stats.keys()


@pytest.mark.parametrize("url", ["http://127.0.0.1/x", "https://10.0.0.1/", "ftp://example.org", "https://[::1]/", "x"])
@with_service()
async def test_a_callback_that_leads_inside_is_refused(service: Service, url: str) -> None:
    answer = await service.http.post("/v1/batch/async", json={"prompts": ["a"], "callback_url": url})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "url_refused")


def test_a_callback_to_a_name_inside_is_refused_as_one_that_does_not_exist_is(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        if host == "no.internal":
            raise OSError("Name or service not known")
        return ["10.1.2.3"]

    async def main(service: Service) -> None:
        monkeypatch.setattr(service.services.sender, "_resolve", resolve)

        async def ask(host: str) -> tuple[int, str]:
            body = {"prompts": ["a"], "callback_url": f"https://{host}/"}
            answer = await service.http.post("/v1/batch/async", json=body)
            return answer.status_code, answer.text.replace(host, "HOST")

        there, missing = await asyncio.gather(ask("db.internal"), ask("no.internal"))
        assert there == missing
        assert there[0] == 400
        assert "10.1" not in there[1]

    play(main)


@with_service()
async def test_the_same_idempotency_key_gives_the_same_job_of_the_same_prompts(service: Service) -> None:
    key = {"Idempotency-Key": "one"}
    answers = [
        await service.http.post("/v1/batch/async", json={"prompts": prompts}, headers=key)
        for prompts in (["a", "b"], ["a", "b"], ["a", "c"])
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 409]
    assert answers[0].json()["batch_id"] == answers[1].json()["batch_id"]
    assert answers[2].json()["error"]["param"] == "Idempotency-Key"
    assert len((await service.http.get("/v1/files", params={"purpose": "batch"})).json()["data"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/batch/sync", rb'{"prompts": ["a", "\ud800"]}', None, "invalid_json"),
        ("/v1/batch/async", rb'{"prompts": ["a"], "model": "\udfff"}', None, "invalid_json"),
        ("/v1/batch/async", rb'{"prompts": ["a"], "model": "\u0000"}', "model", "invalid_value"),
        (
            "/v1/batch/async",
            rb'{"prompts": ["a"], "callback_url": "https://127.0.0.1/"}',
            "callback_url",
            "url_refused",
        ),
        ("/v1/batch/sync", rb'{"prompts": ["a"], "priority": true}', "priority", "invalid_type"),
        ("/v1/batch/sync", rb'{"prompts": ["a"], "temperature": "0"}', "temperature", "invalid_type"),
    ],
)
@with_service()
async def test_what_cannot_be_kept_or_meant_is_refused(
    service: Service, path: str, body: bytes, param: str | None, code: str
) -> None:
    answer = await service.http.post(path, content=body, headers={"content-type": "application/json"})
    told = answer.json()["error"]
    assert (answer.status_code, told["param"], told["code"]) == (400, param, code)


@with_service()
async def test_an_unknown_id_is_not_found(service: Service) -> None:
    for batch_id in ("batch_" + "0" * 24, "stat", "%00", "batch_x"):
        assert (await service.http.get(f"/v1/batch/{batch_id}")).status_code == 404
