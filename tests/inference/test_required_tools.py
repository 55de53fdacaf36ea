"""Calls that are required: whatever a random model says is a call, with arguments as their schema says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from openai.types.chat import ChatCompletion

from batchwright import AsyncEngine, constraints
from batchwright.errors import InvalidRequest
from batchwright.inference.engine_inference import EngineInference
from batchwright.inference.inference import Call

from .chat_models import HERMES, MISTRAL, THINKING, chat_model
from .running import in_real_time, run

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}}}
    for name, properties in (
        ("weather", {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}),
        ("warn", {"loud": {"type": "boolean"}}),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def inferences(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EngineInference]]:
    engines = {
        name: AsyncEngine(chat_model(tmp_path_factory.mktemp(name), template), dtype="float32", kv_memory="20MB")
        for name, template in {"hermes": HERMES, "thinking": THINKING, "mistral": MISTRAL}.items()
    }
    yield {name: EngineInference(engine, ["m"]) for name, engine in engines.items()}
    for engine in engines.values():
        run(engine.close())


def chat(**body: Any) -> Call:
    messages = [{"role": "user", "content": "Hello."}]
    return Call("/v1/chat/completions", {"messages": messages, "tools": TOOLS, "max_tokens": 900, **body}, "req_7")


@pytest.mark.parametrize("model", ["hermes", "mistral"])
@in_real_time
async def test_a_random_model_calls_as_it_must(inferences: dict[str, EngineInference], model: str) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    names: set[str] = set()
    named: list[Any] = [{"type": "function", "function": {"name": name}} for name in schemas]
    for seed, choice in enumerate(["required"] * 4 + named * 3):
        body = await inferences[model].answer(chat(tool_choice=choice, seed=seed, parallel_tool_calls=False))
        (answer,) = ChatCompletion.model_validate(body, strict=True).choices
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        calls: Any = answer.message.tool_calls
        (call,) = calls
        jsonschema_rs.validate(schemas[call.function.name], json.loads(call.function.arguments))
        assert choice == "required" or call.function.name == choice["function"]["name"]
        names.add(call.function.name)
    assert names == schemas.keys()


@in_real_time
async def test_a_model_thinks_before_it_calls(inferences: dict[str, EngineInference]) -> None:
    body = await inferences["thinking"].answer(
        chat(tool_choice="required", chat_template_kwargs={"enable_thinking": False}, seed=1)
    )
    assert body["choices"][0]["message"]["tool_calls"]
    body = await inferences["thinking"].answer(chat(tool_choice="required", max_tokens=20, seed=1))
    assert body["choices"][0]["message"]["reasoning_content"]
    body = await inferences["thinking"].answer(chat(tools=None, response_format={"type": "json_object"}, max_tokens=9))
    assert body["choices"][0]["message"]["content"].startswith("{")


@in_real_time
async def test_what_cannot_be_required(inferences: dict[str, EngineInference], monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "propertyNames": {"not": {}}}},
    }
    with pytest.raises(InvalidRequest) as caught:
        await inferences["hermes"].answer(chat(tools=[bad], tool_choice="required", response_format={"type": "text"}))
    assert caught.value.param == "tools"
    with pytest.raises(InvalidRequest) as caught:
        await inferences["hermes"].answer(chat(tool_choice="required", response_format={"type": "json_object"}))
    assert caught.value.param == "tool_choice"
    monkeypatch.setattr(constraints, "MAX_CHARACTERS", 100)
    with pytest.raises(InvalidRequest, match=r"^tools: has \d+ characters"):
        await inferences["hermes"].answer(chat(tool_choice="required"))
