"""Clients of hand-written services find what they know: fields, nulls, `healthy`, outputs in the webhook."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.conftest import Service, with_service

from batchwright import AsyncBatchRequest, BatchRequest, BatchResponse, BatchStatus
from batchwright.service.webhooks.courier import MOST_OUTPUT_BYTES
from batchwright.service.webhooks.sender import Answer, Sender


class _Recording(Sender):
    """Accepts every message, and keeps its body."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def send(self, url: str, headers: Any, body: bytes) -> Answer:
        self.bodies.append(json.loads(body))
        return Answer(200, "HTTP 200")


@with_service()
async def test_the_models_are_those_of_the_service(service: Service) -> None:
    asked = BatchRequest(prompts=["a b", "c"], max_tokens=16, temperature=0.5)
    answer = await service.http.post("/v1/batch/sync", json=asked.model_dump())
    response = BatchResponse(**answer.json())
    assert (response.outputs, response.total_tokens) == (["A B", "C"], 3)
    assert response.latency_ms > 0
    assert response.throughput_tokens_per_sec > 0

    job = AsyncBatchRequest(prompts=["a"])
    made = (await service.http.post("/v1/batch/async", json=job.model_dump())).json()
    assert made == {"batch_id": made["batch_id"], "status": "pending"}
    status = BatchStatus(**(await service.http.get(f"/v1/batch/{made['batch_id']}")).json())
    while status.status in ("pending", "processing"):
        status = BatchStatus(**(await service.http.get(f"/v1/batch/{status.batch_id}")).json())
    assert (status.status, status.progress, status.outputs) == ("completed", 1.0, ["A"])
    assert BatchStatus(batch_id="b", status="pending", progress=0.0).outputs is None
    assert (
        BatchResponse(batch_id="b", outputs=["x"], total_tokens=1, latency_ms=1.0, throughput_tokens_per_sec=1.0).errors
        == []
    )


@pytest.mark.parametrize("path", ["sync", "async"])
@with_service()
async def test_null_means_the_default(service: Service, path: str) -> None:
    body = {"prompts": ["a"], "max_tokens": None, "temperature": None, "model": None}
    assert (await service.http.post(f"/v1/batch/{path}", json=body)).status_code == 200

    async def it_was_called() -> bool:
        return bool(service.stub.calls)

    await service.until(it_was_called)
    [call] = service.stub.calls
    assert (call.body["max_tokens"], call.body["temperature"]) == (256, 0.7)


@with_service()
async def test_health_says_healthy(service: Service) -> None:
    answer = (await service.http.get("/health")).json()
    assert answer["status"] == "healthy"
    assert "version" in answer


@pytest.mark.parametrize("words", [3, 40_000])
@with_service(webhook_allow="127.0.0.0/8")
async def test_the_message_to_a_callback_carries_the_outputs_where_they_fit(service: Service, words: int) -> None:
    prompts = ["x " * words, "fail", "ü" * 10]
    job = {"prompts": prompts, "callback_url": "http://127.0.0.1:9/hook", "max_tokens": 10**6}
    # Nothing is sent: the courier of the service has a sender that keeps what it is given.
    sender = _Recording()
    service.services.sender.send = sender.send  # type: ignore[method-assign]
    made = (await service.http.post("/v1/batch/async", json=job)).json()

    async def it_was_told() -> bool:
        return bool(sender.bodies)

    await service.until(it_was_told)
    [body] = sender.bodies
    url = f"/v1/batch/{made['batch_id']}"
    assert (body["type"], body["data"]) == ("batch.completed", {"id": made["batch_id"]})
    assert (body["batch_id"], body["url"]) == (made["batch_id"], url)
    outputs = (await service.http.get(url)).json()["outputs"]
    assert outputs == [" ".join(["X"] * words), None, "Ü" * 10]
    fits = len(json.dumps(outputs)) <= MOST_OUTPUT_BYTES
    assert body["outputs"] == (outputs if fits else None)
    assert fits == (words == 3)
