"""Quotas: refusals with 429 in OpenAI's form, and headers that tell what is left."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.server.batch_files import content, line
from tests.server.conftest import Service, running, with_service

from batchwright.clock import ManualClock
from batchwright.limiting.quotas import Quotas
from batchwright.service.access.peers import Peers
from batchwright.store import open_store

_PROMPT = {"model": "stub", "prompt": "one two three", "max_tokens": 3}


async def _limit(service: Service, tenant: str = "default", **limits: int) -> None:
    await service.services.store.set_tenant_quotas(tenant, Quotas(**limits))
    service.services.quotas.refresh()
    await Peers.exchange(service.services.peers)


def _still(service: Service) -> ManualClock:
    """Stop the quotas' clock and return it; from now on only `_limit` exchanges with the store."""

    async def nothing() -> None:
        pass

    service.services.peers.exchange = nothing  # type: ignore[method-assign]
    clock = service.services.quotas._clock = ManualClock(1000.0)
    return clock


@with_service()
async def test_requests_a_minute(service: Service) -> None:
    clock = _still(service)
    await _limit(service, requests_per_minute=2)
    for left in (1, 0):
        answer = await service.client.completions.with_raw_response.create(**_PROMPT)  # type: ignore[call-overload]
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"].startswith("1m")
        assert "x-ratelimit-limit-tokens" not in answer.headers
    with pytest.raises(openai.RateLimitError) as refused:
        await service.client.completions.create(**_PROMPT)  # type: ignore[call-overload]
    error = refused.value
    assert (error.status_code, error.type, error.code) == (429, "requests", "rate_limit_exceeded")
    assert "tenant default on requests per minute: limit 2, used 2, requested 1" in error.message
    headers = error.response.headers
    wait = int(headers["retry-after-ms"]) / 1e3
    assert wait <= int(headers["retry-after"]) < wait + 1
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-request-id" in headers
    figures = (await service.http.get("/metrics")).text
    assert 'batchwright_quota_refusals_total{quota="requests_per_minute"} 1.0' in figures
    assert 'batchwright_quota_used{quota="tenant:default/requests_per_minute"} 2.0' in figures
    [quota] = (await service.http.get("/dashboard/state")).json()["quotas"]
    assert (quota["name"], quota["limit"], quota["used"]) == ("requests_per_minute", 2, 2)
    clock.advance(wait)
    await service.client.completions.create(**_PROMPT)  # type: ignore[call-overload]


@with_service()
async def test_a_client_that_tries_again_waits_as_long_as_it_is_told(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _still(service)
    await _limit(service, requests_per_minute=1)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)

    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
    # The client follows waits of up to a minute.
    await service.client.completions.create(**_PROMPT)  # type: ignore[call-overload]
    clock.advance(10)
    patient = service.client.with_options(max_retries=1)
    await patient.completions.create(**_PROMPT)  # type: ignore[call-overload]
    assert len(slept) == 1
    assert 45 < slept[0] <= 55


@pytest.mark.parametrize("stream", [False, True])
@with_service()
async def test_tokens_are_reserved_and_then_settled_by_what_was_used(service: Service, stream: bool) -> None:
    _still(service)
    await _limit(service, tokens_per_minute=100)
    body = {"model": "stub", "prompt": "wait two", "max_tokens": 90, "stream": stream}
    task = asyncio.create_task(service.http.post("/v1/completions", json=body))
    await service.until(lambda: _is(service.stub.waiting == 1))
    waiting = await service.http.post("/v1/completions", json=_PROMPT | {"max_tokens": 20})
    assert waiting.status_code == 429
    assert waiting.json()["error"]["type"] == "tokens"
    assert waiting.headers["x-ratelimit-remaining-tokens"] == "8"  # 2 for the prompt, 90 for the answer
    service.stub.go.set()
    assert (await task).status_code == 200
    answer = await service.http.post("/v1/completions", json=_PROMPT | {"max_tokens": 20})
    # The answered request counts with its 4 tokens, this one with its 4 + 20.
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - 4 - 24)


async def _is(value: bool) -> bool:
    return value


@with_service()
async def test_a_request_that_never_fits_is_not_to_be_tried_again(service: Service) -> None:
    await _limit(service, tokens_per_minute=100)
    patient = service.client.with_options(max_retries=2)
    with pytest.raises(openai.RateLimitError, match="a request as large as this never fits") as refused:
        await patient.completions.create(model="stub", prompt="x", max_tokens=200)
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert service.services.quotas.refused == {"tokens_per_minute": 1}


@with_service()
async def test_a_request_that_is_refused_uses_no_tokens_and_all_leave(service: Service) -> None:
    await _limit(service, tokens_per_minute=300, concurrent_requests=1)
    for _ in range(3):
        body = {"model": "stub", "prompt": "x", "max_tokens": 250, "temperature": 99}
        assert (await service.http.post("/v1/completions", json=body)).status_code == 400
    assert (await service.http.post("/v1/completions", json=_PROMPT)).status_code == 200
    assert service.services.quotas.limiter.inside_here == {}


@with_service()
async def test_a_request_that_fails_in_the_midst_counts_with_what_it_may_have_used(service: Service) -> None:
    await _limit(service, tokens_per_minute=300, concurrent_requests=1)
    body = {"model": "stub", "prompt": "fail", "max_tokens": 250}
    assert (await service.http.post("/v1/completions", json=body)).status_code == 500
    assert service.services.quotas.limiter.inside_here == {}
    refused = await service.http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")


@with_service()
async def test_requests_at_once(service: Service) -> None:
    await _limit(service, concurrent_requests=1)
    for stream in (False, True):
        body = {"model": "stub", "prompt": "wait", "stream": stream}
        task = asyncio.create_task(service.http.post("/v1/completions", json=body))
        await service.until(lambda: _is(service.stub.waiting == 1))
        refused = await service.http.post("/v1/batch/sync", json={"prompts": ["x"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        # Cancelling the request makes room at once.
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await service.until(lambda: _is(service.stub.waiting == 0))
        assert (await service.http.post("/v1/batch/sync", json={"prompts": ["x"]})).status_code == 200


@with_service()
async def test_a_key_has_quotas_of_its_own_within_those_of_its_tenant(service: Service) -> None:
    _still(service)
    await _limit(service, "team", requests_per_minute=3)
    small = service.as_tenant(await service.key("team", quotas=Quotas(requests_per_minute=1)))
    other = service.as_tenant(await service.key("team"))
    stranger = service.as_tenant(await service.key("another"))
    statuses = [
        (await client.post("/v1/completions", json=_PROMPT)).status_code
        for client in (small, small, other, other, other, stranger, stranger, stranger, stranger)
    ]
    assert statuses == [200, 429, 200, 200, 429, 200, 200, 200, 200]


@with_service(quota_requests_per_minute=1)
async def test_default_quotas_are_those_of_tenants_without_their_own(service: Service) -> None:
    _still(service)
    await _limit(service, "rich", requests_per_minute=5)
    poor, rich = [service.as_tenant(await service.key(name)) for name in ("poor", "rich")]
    for client, most in ((poor, 1), (rich, 5)):
        statuses = [(await client.post("/v1/completions", json=_PROMPT)).status_code for _ in range(most + 1)]
        assert statuses == [200] * most + [429]


def _form(*lines: dict[str, Any]) -> dict[str, Any]:
    return {"files": {"file": ("in.jsonl", content(*lines))}, "data": {"purpose": "batch"}}


@with_service()
async def test_storage(service: Service) -> None:
    size = len(content(line("a", "x")))
    await _limit(service, storage_bytes=2 * size)
    made = [await service.http.post("/v1/files", **_form(line("a", "x"))) for _ in range(3)]
    assert [answer.status_code for answer in made] == [200, 200, 429]
    error = made[2].json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert f"stores {2 * size:,} bytes of at most {2 * size:,}" in error["message"]
    assert made[2].headers["x-should-retry"] == "false"
    await service.http.delete(f"/v1/files/{made[0].json()['id']}")
    assert (await service.http.post("/v1/files", **_form(line("a", "x")))).status_code == 200
    # Nothing is left of refused uploads.
    files = [path for path in (service.services.settings.data / "files").rglob("file-*") if path.is_file()]
    assert len(files) <= 3


@with_service()
async def test_enqueued_lines_and_tokens(service: Service) -> None:
    service.stub.gate.clear()
    await _limit(service, enqueued_lines=3)
    lines = [line(str(number), "x") for number in range(2)]
    file_id = (await service.http.post("/v1/files", **_form(*lines))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    first, second = [await service.http.post("/v1/batches", json=body) for _ in range(2)]
    assert (first.status_code, second.status_code) == (200, 429)
    figures = (await service.http.get("/metrics")).text
    assert 'batchwright_quota_limit{quota="tenant:default/enqueued_lines"} 3.0' in figures
    assert 'batchwright_quota_used{quota="tenant:default/enqueued_lines"} 2.0' in figures
    assert 'batchwright_quota_refusals_total{quota="enqueued_lines"} 1.0' in figures
    error = second.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert "has 2 lines of batches waiting of at most 3, and this batch has 2" in error["message"]
    # A simple batch is refused too, and its prompts are not kept.
    before = len((await service.http.get("/v1/files")).json()["data"])
    assert (await service.http.post("/v1/batch/async", json={"prompts": ["x"] * 2})).status_code == 429
    assert len((await service.http.get("/v1/files")).json()["data"]) == before
    service.stub.gate.set()
    await service.ended(first.json()["id"])
    assert (await service.http.post("/v1/batches", json=body)).status_code == 200
    await _limit(service, enqueued_tokens=5)
    never = await service.http.post("/v1/batches", json=body)
    assert (never.status_code, never.json()["error"]["type"]) == (429, "tokens")
    assert never.headers["x-should-retry"] == "false"


def test_servers_of_one_store_keep_one_limit_and_know_of_each_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as opened:
            one, two = [await opened.enter_async_context(running(tmp_path)) for _ in range(2)]
            for service in (one, two):
                await service.until(lambda service=service: _is(bool(service.services.worker.id)))  # type: ignore[misc]
                await service.services.peers.exchange()
            await _limit(one, requests_per_minute=4, concurrent_requests=2)
            await _limit(two, requests_per_minute=4, concurrent_requests=2)

            async def exchange() -> None:
                for service in (one, two, one, two):
                    await service.services.peers.exchange()

            statuses = []
            for service in (one, two) * 3:
                statuses.append((await service.http.post("/v1/completions", json=_PROMPT)).status_code)
                await exchange()
            assert statuses == [200] * 4 + [429] * 2
            await _limit(one, concurrent_requests=2)
            await _limit(two, concurrent_requests=2)
            waiting = [
                asyncio.create_task(one.http.post("/v1/completions", json={"model": "stub", "prompt": "wait"}))
                for _ in range(2)
            ]
            await one.until(lambda: _is(one.stub.waiting == 2))
            await exchange()
            assert (await two.http.post("/v1/completions", json=_PROMPT)).status_code == 429
            shown = (await two.http.get("/dashboard/state")).json()
            assert sorted((server["here"], server["online"]) for server in shown["servers"]) == [(False, 2), (True, 0)]
            assert shown["quotas"] == [{"of": "tenant", "name": "concurrent_requests", "limit": 2, "used": 2}]
            assert "batchwright_servers 2.0" in (await two.http.get("/metrics")).text
            one.stub.go.set()
            await asyncio.gather(*waiting)
            await exchange()
            assert (await two.http.post("/v1/completions", json=_PROMPT)).status_code == 200

    async def whole() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(whole())


def test_servers_of_one_store_that_are_asked_at_once_let_in_no_more_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is, no request goes ahead without the exchange.
    for name in ("_PATIENCE", "_PATIENCE_OF_REQUESTS"):
        monkeypatch.setattr(f"batchwright.service.access.peers.{name}", 60.0)

    async def main() -> None:
        async with AsyncExitStack() as opened:
            one, two = [await opened.enter_async_context(running(tmp_path)) for _ in range(2)]
            # Not only one other: a process that does not know its own worker yet takes that for another.
            await one.until(lambda: _is(_others(one) == [_worker(two)] and _others(two) == [_worker(one)]))
            for service in (one, two):
                # On a busy machine a part of the limit would come back meanwhile. It stops where it is: how far the
                # store is ahead of it is known.
                quotas = service.services.quotas
                quotas._clock = ManualClock(quotas._clock.now())
            await _limit(one, requests_per_minute=10)
            await _limit(two, requests_per_minute=10)

            async def status(service: Service, prompt: str) -> int:
                body = {"model": "stub", "prompt": prompt, "max_tokens": 1}
                return (await service.http.post("/v1/completions", json=body)).status_code

            came = await asyncio.gather(*[status(service, "x") for service in (one, two) for _ in range(30)])
            assert 0 < Counter(came)[200] <= 10
            assert Counter(came)[429] == 60 - Counter(came)[200]
            for service in (one, two):
                await _limit(service, concurrent_requests=3)
            asked = [asyncio.create_task(status(service, "wait")) for service in (one, two) for _ in range(10)]
            await one.until(lambda: _is(sum(task.done() for task in asked) + one.stub.waiting + two.stub.waiting == 20))
            inside = one.stub.waiting + two.stub.waiting
            for service in (one, two):
                service.stub.go.set()
            assert 0 < inside <= 3
            assert Counter(await asyncio.gather(*asked)) == {200: inside, 429: 20 - inside}

    async def whole() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(whole())


def _others(service: Service) -> list[str]:
    """Ids of the workers of the other processes that a service knows."""
    return [peer.worker for peer, _ in service.services.peers.others]


def _worker(service: Service) -> str:
    return service.services.peers._worker()


@with_service()
async def test_online_requests_go_on_while_the_store_is_away(service: Service, tmp_path: Path) -> None:
    await _limit(service, requests_per_minute=2)
    async with open_store(tmp_path / "unused.db") as away:
        pass
    service.services.quotas._store = service.services.peers._store = away  # closed: it answers nothing
    statuses = [(await service.http.post("/v1/completions", json=_PROMPT)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
