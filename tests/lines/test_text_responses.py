"""`/v1/responses` with the real model: the official client, a stream, and lines, all with the chat's own text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from batchwright.jobs.run import run
from batchwright.server.app import create_app
from batchwright.service.composition import open_services
from batchwright.service.settings import Settings

pytestmark = pytest.mark.needs_model

MODELS: dict[str, Any] = {"model": "smollm2-135m", "dtype": "float32", "kv_memory": "64MB"}
ASKED: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": "Name a river.",
    "temperature": 0,
    "max_output_tokens": 6,
}


async def ask(folder: Path) -> tuple[str, dict[str, Any], list[Any]]:
    """The text of the chat, the response and the events of its stream."""
    settings = Settings.model_validate({"data": folder, "embedding_model": "", **MODELS})
    async with open_services(settings) as services:
        transport = httpx2.ASGITransport(create_app(services))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as http:
            client = openai.AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", http_client=http)
            chat = await client.chat.completions.create(
                model=MODELS["model"],
                messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}],
                temperature=0,
                max_tokens=6,
            )
            response = await client.responses.create(model=MODELS["model"], metadata={"a": "b"}, **ASKED)
            assert response.output_text == chat.choices[0].message.content
            assert (response.status, response.metadata) == ("incomplete", {"a": "b"})
            assert response.incomplete_details is not None
            assert response.incomplete_details.reason == "max_output_tokens"
            again = await client.responses.create(
                model=MODELS["model"],
                input=[
                    {"role": "user", "content": "Name a river."},
                    *(item.model_dump() for item in response.output),
                    {"role": "user", "content": "Another?"},
                ],
                max_output_tokens=3,
            )
            assert again.usage is not None
            assert again.usage.output_tokens == 3
            stream = await client.responses.create(model=MODELS["model"], stream=True, **ASKED)
            events = [event async for event in stream]
            figures = services.inference.figures["online"]
            assert (figures.generated_tokens, figures.ttft_ms.count) == (6 + 6 + 3 + 6, 1)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model=MODELS["model"], input="a", previous_response_id="resp_1")
            assert caught.value.param == "previous_response_id"
            raw = await http.post("/v1/responses", json={**ASKED, "stream": True})
            names = [line.removeprefix("event: ") for line in raw.text.splitlines() if line.startswith("event: ")]
            assert names == [event.type for event in events]
            assert "[DONE]" not in raw.text
    return str(chat.choices[0].message.content), response.model_dump(), events


def test_online_and_in_lines(tmp_path: Path, shallow_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(shallow_cache))
    text, response, events = asyncio.run(ask(tmp_path / "data"))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text
    assert events[-1].response.usage.output_tokens == response["usage"]["output_tokens"] == 6

    def lines(url: str, *bodies: dict[str, Any]) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text(
            "".join(
                json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body}) + "\n"
                for number, body in enumerate(bodies)
            )
        )
        return path

    source = lines("/v1/responses", ASKED, {"input": "a", "tools": [{"type": "web_search"}]})
    report = run(source, tmp_path / "out.jsonl", **MODELS)
    assert (report.succeeded, report.failed, report.generated_tokens) == (1, 1, 6)
    results = {each["custom_id"]: each for each in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    body = results["0"]["response"]["body"]
    assert body["output"][0]["content"][0]["text"] == text
    assert (results["1"]["error"]["code"], results["1"]["error"]["param"]) == ("unsupported_parameter", "tools[0]")
    run(source, tmp_path / "out.csv", **MODELS)
    assert ",length," in (tmp_path / "out.csv").read_text()
