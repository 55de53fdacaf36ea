"""Calls that are required: whatever a random model says is a call, with arguments as their schema says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
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


@pytest.mark.parametrize("model", ["hermes", "mistral", "thinking"])
@in_real_time
async def test_a_strict_tool_is_called_rightly_or_not_at_all(
    inferences: dict[str, EngineInference], model: str
) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    markers = inferences[model].engine.tokenizer.markers
    likely = [markers[text] for text in ("<tool_call>", "[TOOL_CALLS]", "</think>") if text in markers]
    found = 0
    for seed in range(3):
        body = await inferences[model].answer(
            chat(tools=strict, seed=seed, max_tokens=200, logit_bias={str(token): 3 for token in likely})
        )
        (answer,) = ChatCompletion.model_validate(body, strict=True).choices
        calls: Any = answer.message.tool_calls or []
        for call in calls if answer.finish_reason == "tool_calls" else calls[:-1]:
            jsonschema_rs.validate(schemas[call.function.name], json.loads(call.function.arguments))
            found += 1
        assert answer.finish_reason == "length" or "<tool_call>" not in (answer.message.content or "")
    assert found
    bad = {"name": "f", "strict": True, "parameters": {"type": "object", "propertyNames": {"not": {}}}}
    with pytest.raises(InvalidRequest) as caught:
        await inferences[model].answer(chat(tools=[{"type": "function", "function": bad}]))
    assert caught.value.param == "tools"


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
            "type": "object", "properties": {"loud": {"type": "boolean"}}, "required": ["loud"],
            "additionalProperties": False}}}},
        lambda text: json.loads(text)["loud"] in (True, False),
    ),
    "object": ({"response_format": {"type": "json_object"}}, lambda text: text.startswith("{")),
    "regex": ({"guided_regex": "[a-c]{3}/[^/]"}, lambda text: re.fullmatch("[a-c]{3}/[^/]", text) is not None),
    "choices": ({"guided_choice": ["<yes>", "no"]}, lambda text: text in ("<yes>", "no")),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@in_real_time
async def test_a_model_thinks_before_it_answers_in_a_form(inferences: dict[str, EngineInference], form: str) -> None:
    fields, fits = FORMS[form]
    # The closing mark is a token that a random model writes soon enough.
    bias = {str(inferences["thinking"].engine.tokenizer.markers["</think>"]): 2}
    thoughts: list[str] = []
    for seed in range(2):
        call = chat(tools=None, logit_bias=bias, seed=seed, max_tokens=500, **fields)
        (choice,) = (await inferences["thinking"].answer(call))["choices"]
        thoughts.append(choice["message"].get("reasoning_content", ""))
        assert fits(choice["message"]["content"])
        chunks = [chunk async for chunk in inferences["thinking"].stream(call)]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thoughts[-1]
    assert any(thoughts)
    for more in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        (choice,) = (await inferences["thinking"].answer(chat(tools=None, max_tokens=200, **fields, **more)))["choices"]
        assert "reasoning_content" not in choice["message"]
        assert fits(choice["message"]["content"])
    (choice,) = (await inferences["thinking"].answer(chat(tools=None, **fields | {"max_tokens": 1})))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


@in_real_time
async def test_a_grammar_describes_all_of_the_answer(inferences: dict[str, EngineInference]) -> None:
    body = await inferences["thinking"].answer(chat(tools=None, guided_grammar='start: "yes" | "no"'))
    assert body["choices"][0]["message"]["content"] in ("yes", "no")


@in_real_time
async def test_what_is_wrong_with_a_form_is_said_also_where_a_model_thinks(
    inferences: dict[str, EngineInference],
) -> None:
    schema = {"type": "object", "properties": {"a": {"propertyNames": {"not": {}}}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    told: list[str] = []
    for model in ("hermes", "thinking"):
        with pytest.raises(InvalidRequest) as caught:
            await inferences[model].answer(chat(tools=None, response_format=form))
        assert caught.value.param == "response_format"
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "#/properties/a" in told[0]


UNKEPT: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": (
        {"properties": {"a": {"uniqueItems": True}}},
        '#/properties/a has keywords that are not supported: ["uniqueItems"]',
    ),
    "rewritten": ({"properties": {"a": {"const": "\x01"}}}, "#/properties/a is not supported: const: a text"),
}


@pytest.mark.parametrize("unkept", UNKEPT)
@pytest.mark.parametrize("choice", ["required", "named", "strict"])
@in_real_time
async def test_a_schema_that_cannot_be_kept_is_named_with_its_tool(
    inferences: dict[str, EngineInference], unkept: str, choice: str
) -> None:
    schema, told = UNKEPT[unkept]
    bad = {"type": "function", "function": {"name": "f.g", "parameters": schema, "strict": choice == "strict"}}
    wanted = {"type": "function", "function": {"name": "f.g"}} if choice == "named" else choice
    asked = chat(tools=[*TOOLS, bad], tool_choice="auto" if choice == "strict" else wanted)
    for model in ("hermes", "thinking"):
        with pytest.raises(InvalidRequest) as caught:
            await inferences[model].answer(asked)
        assert str(caught.value).startswith(f"tools: the parameters of f.g: {told}")
        assert "call" not in str(caught.value)
        assert caught.value.param == "tools"
        with pytest.raises(InvalidRequest) as streamed:
            [chunk async for chunk in inferences[model].stream(asked)]
        assert str(streamed.value) == str(caught.value)


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
    monkeypatch.setattr(constraints, "MAX_CHARACTERS", 200)
    with pytest.raises(InvalidRequest, match=r"^tools: has \d+ characters"):
        await inferences["hermes"].answer(chat(tool_choice="required"))
