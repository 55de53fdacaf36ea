"""Settings of the engine: how they reach it, and which keep the service from starting."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from fastapi import FastAPI
from tests.engine.support import TINY, tiny_model

from batchwright.errors import InputError, UnsupportedModel
from batchwright.inference.engine_inference import EngineInference
from batchwright.inference.routing import RoutedInference
from batchwright.server.app import create_app
from batchwright.service.composition import open_services
from batchwright.service.loading import load_inference
from batchwright.service.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with a tiny random model only."""
    tiny_model(tmp_path / "model", "llama", **TINY)
    given = {"model": str(tmp_path / "model"), "embedding_model": "", "data": tmp_path, "kv_memory": "1MB"}
    return Settings.model_validate(given | {"dtype": "float32", "device": "cpu"})


def test_the_precision_reaches_the_engine(settings: Settings) -> None:
    async def implementation() -> str:
        inference = await load_inference(settings.model_copy(update={"quantization": "int8"}))
        try:
            assert isinstance(inference, RoutedInference)
            (generating,) = inference.routes
            assert isinstance(generating, EngineInference)
            return generating.engine.stats.implementation
        finally:
            await inference.close()

    assert asyncio.run(implementation()).endswith("float32 on cpu, torch products, int8 weights and activations")


def test_a_promise_that_cannot_be_kept_is_refused_at_the_start(settings: Settings) -> None:
    impossible = settings.model_copy(update={"deterministic": True, "dtype": "float16"})
    with pytest.raises(UnsupportedModel, match=r"deterministic=True is not possible: sdpa attention"):
        asyncio.run(load_inference(impossible))


def test_a_client_is_told_of_the_model_what_is_true(settings: Settings, tmp_path: Path) -> None:
    for file in (tmp_path / "model").iterdir():
        os.utime(file, (1_600_000_000, 1_600_000_000))
    name = str(tmp_path / "model")

    async def fingerprints(**more: object) -> set[str | None]:
        chosen = settings.model_copy(update={"model_alias": (f"gpt-4o={name}",), **more})
        async with open_services(chosen) as services, _client(create_app(services)) as client:
            listed = (await client.models.list()).data
            assert [(each.id, each.created) for each in listed] == [(name, 1_600_000_000), ("gpt-4o", 1_600_000_000)]
            answer = await client.completions.create(model="gpt-4o", prompt=[5, 6, 7], max_tokens=2)
            stream = await client.completions.create(model="gpt-4o", prompt=[5, 6, 7], max_tokens=2, stream=True)
            answers = [answer, *[chunk async for chunk in stream]]
        assert {each.model for each in answers} == {"gpt-4o"}
        return {each.system_fingerprint for each in answers}

    async def main() -> None:
        (first,) = await fingerprints()
        assert first is not None
        assert first.startswith("fp_")
        assert await fingerprints() == {first}
        assert await fingerprints(quantization="int8") != {first}

    asyncio.run(main())


def test_an_alias_of_no_model_keeps_the_service_from_starting(settings: Settings) -> None:
    with pytest.raises(InputError, match="no such model is served"):
        asyncio.run(load_inference(settings.model_copy(update={"model_alias": ("a=b",)})))


def test_identical_lines_of_a_batch_are_computed_once(settings: Settings, tmp_path: Path) -> None:
    prompts = [[5, 6, 7], [8, 9], [7, 7, 7, 7]] * 4
    bodies = [{"model": settings.model, "prompt": prompt, "temperature": 0, "max_tokens": 3} for prompt in prompts]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {**body, "seed": number}}
        for number, body in enumerate(bodies)
    ]
    chosen = settings.model_copy(update={"trace_log": tmp_path / "trace.jsonl"})

    async def main() -> list[dict[str, Any]]:
        async with open_services(chosen) as services, _client(create_app(services)) as client:
            content = b"".join(msgspec.json.encode(each) + b"\n" for each in lines)
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            while batch.status != "completed":
                await asyncio.sleep(0.05)
                batch = await client.batches.retrieve(batch.id)
            assert batch.output_file_id is not None
            return [json.loads(each) for each in (await client.files.content(batch.output_file_id)).text.splitlines()]

    results = asyncio.run(main())
    assert [each["custom_id"] for each in results] == [str(number) for number in range(12)]
    answers = [each["response"]["body"] for each in results]
    assert [each["usage"].get("deduplicated", False) for each in answers].count(False) == 3
    for number, answer in enumerate(answers):
        assert answer["choices"] == answers[number % 3]["choices"]
    assert len((tmp_path / "trace.jsonl").read_bytes().splitlines()) == 3


def _client(app: FastAPI) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return openai.AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", http_client=http, max_retries=0)
