"""Bodies of requests: the limit of each endpoint, and large bodies at the same time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from tests.server.conftest import Service, with_service

from batchwright.errors import Overloaded
from batchwright.server.http import json_bodies
from batchwright.server.http.body_limits import SMALL, ByteBudget

_JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/v1/chat/completions", 2_000_000),
        ("/v1/completions", 2_000_000),
        ("/v1/embeddings", 2_000_000),
        ("/v1/batch/sync", 3_000_000),
        ("/v1/batch/async/", 3_000_000),
        ("/v1/batches", 131_072),
        ("/v1/models", 131_072),
        ("/v1/none", 131_072),
    ],
)
@with_service(max_online_body_size=2_000_000, max_body_size=3_000_000)
async def test_each_endpoint_has_its_limit(service: Service, path: str, most: int) -> None:
    for size, refused in ((most, False), (most + 1, True)):
        told = await service.http.post(path, content=b" " * size, headers=_JSON)
        assert (told.status_code == 413) is refused
    if told.json()["error"]["message"].count("_size"):
        assert most != 131_072


@with_service()
async def test_a_large_body_means_the_same_as_a_small_one(service: Service) -> None:
    for filling in (0, SMALL):
        answer = await service.http.post("/v1/completions", json={"prompt": "a b" + " c" * filling})
        assert answer.json()["choices"][0]["text"].startswith("A B")
        body: dict[str, Any] = {"prompts": ["a", "b" * filling], "max_tokens": 3}
        assert (await service.http.post("/v1/batch/sync", json=body)).json()["outputs"] == ["A", "B" * filling]
        refused = await service.http.post("/v1/batch/sync", json={**body, "prompts": ["a" * filling, 3]})
        told = refused.json()["error"]
        assert (refused.status_code, told["param"], told["code"]) == (400, "prompts[1]", "invalid_type")
        refused = await service.http.post("/v1/batch/async", json={**body, "unknown": 1})
        assert refused.json()["error"]["code"] == "unknown_parameter"
        broken = await service.http.post("/v1/completions", content=b" " * filling + b"{", headers=_JSON)
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")


@with_service()
async def test_large_bodies_are_parsed_on_a_thread_and_small_ones_are_not(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = []
    read = json_bodies.read_json

    def spied(*args: Any) -> Any:
        where.append(threading.current_thread() is threading.main_thread())
        return read(*args)

    monkeypatch.setattr(json_bodies, "read_json", spied)
    for filling in (0, SMALL):
        await service.http.post("/v1/completions", json={"prompt": "x" * filling})
        await service.http.post("/v1/batch/sync", json={"prompts": ["x" * filling]})
    assert where == [True, True, False, False]


@with_service()
async def test_a_body_that_is_too_complex_is_refused_before_all_of_it_has_come(service: Service) -> None:
    sent = 0

    async def brackets() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b"[" * 1000

    refused = await service.http.post("/v1/completions", content=brackets(), headers=_JSON)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "json_too_complex")
    assert sent == 1


@with_service(max_body_memory=1_000_000, max_online_body_size=1_000_000, max_body_size=1_000_000)
async def test_what_is_in_progress_is_bounded_until_it_is_answered(service: Service) -> None:
    large = {"prompt": "wait " + "x" * 600_000}
    first = asyncio.create_task(service.http.post("/v1/completions", json=large))
    await service.until(lambda: _true(service.stub.waiting == 1))
    refused = await service.http.post("/v1/completions", json=large)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert refused.headers["retry-after"] == "1"
    pieces = await service.http.post("/v1/completions", content=_pieces(large), headers=_JSON)
    assert pieces.status_code == 429
    assert (await service.http.post("/v1/completions", json={"prompt": "small"})).status_code == 200
    service.stub.go.set()
    assert (await first).status_code == 200
    assert (await service.http.post("/v1/completions", json=large)).status_code == 200


@with_service(max_body_memory=1_000_000, max_online_body_size=1_000_000, max_body_size=1_000_000)
async def test_a_body_that_breaks_off_gives_back_what_it_took(service: Service) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b'{"prompt": "' + b"x" * 700_000
        raise RuntimeError("the line is cut")

    for _ in range(3):
        assert (await service.http.post("/v1/completions", content=broken(), headers=_JSON)).status_code == 500
    large = {"prompt": "x" * 700_000}
    assert (await service.http.post("/v1/completions", json=large)).status_code == 200


def test_the_budget_counts_nothing_of_what_it_refuses() -> None:
    budget = ByteBudget(10)
    budget.take(6)
    with pytest.raises(Overloaded):
        budget.take(5)
    budget.take(4)
    budget.give_back(10)
    assert budget.in_progress == 0


async def _pieces(body: Mapping[str, object]) -> AsyncIterator[bytes]:
    text = json.dumps(body).encode()
    for start in range(0, len(text), 50_000):
        yield text[start : start + 50_000]


async def _true(value: bool) -> bool:
    return value
