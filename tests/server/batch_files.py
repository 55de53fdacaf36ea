"""Input files of batches, and batches made of them with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
from tests.server.conftest import Service


def line(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "stub", "prompt": prompt, **body},
    }


def content(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def upload(service: Service, *lines: dict[str, Any]) -> str:
    file = await service.client.files.create(file=("in.jsonl", content(*lines)), purpose="batch")
    return file.id


async def begin(service: Service, *lines: dict[str, Any], **options: Any) -> openai.types.Batch:
    given: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"} | options
    return await service.client.batches.create(input_file_id=await upload(service, *lines), **given)


async def output(service: Service, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = (await service.client.files.content(file_id)).text
    return {each["custom_id"]: each for each in map(json.loads, text.splitlines())}
