"""Tools and thoughts, from the body of a chat over the engine to its answer."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from batchwright import AsyncEngine, SamplingParams
from batchwright import run as run_file
from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import InvalidRequest
from batchwright.inference.engine_inference import EngineInference
from batchwright.inference.inference import Call
from batchwright.wire.requests import read_generation

from .chat_models import BARE, DEEPSEEK, HERMES, MISTRAL, PLAIN, THINKING, Script, chat_model
from .running import in_real_time, run

MESSAGES = [{"role": "user", "content": "How is the weather in Paris?"}]
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}  # fmt: skip
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def chat(**body: Any) -> Call:
    return Call("/v1/chat/completions", {"messages": MESSAGES, **body}, "req_7")


class Model:
    """A model in an engine, and what it says."""

    def __init__(self, engine: AsyncEngine, script: Script) -> None:
        self.inference = EngineInference(engine, ["m"])
        self.tokenizer = engine.tokenizer
        self.say = script.say

    async def answer(self, **body: Any) -> Any:
        answer = await self.inference.answer(chat(**body))
        return ChatCompletion.model_validate(answer, strict=True).choices[0]

    async def deltas(self, **body: Any) -> list[Any]:
        chunks = [chunk async for chunk in self.inference.stream(chat(**body))]
        return [ChatCompletionChunk.model_validate(chunk, strict=True).choices[0] for chunk in chunks]

    def prompt(self, **body: Any) -> str:
        (prompt,) = read_generation(chat(**body).body, chat=True).prompts
        assert self.tokenizer.chat_template is not None
        return self.tokenizer.chat_template.render(prompt)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncEngine]]:
    engines = {
        name: AsyncEngine(chat_model(tmp_path_factory.mktemp(name), template), dtype="float32", kv_memory="20MB")
        for name, template in {
            "plain": PLAIN,
            "hermes": HERMES,
            "thinking": THINKING,
            "mistral": MISTRAL,
            "bare": BARE,
            "deepseek": DEEPSEEK,
        }.items()
    }
    yield engines
    for engine in engines.values():
        run(engine.close())


@pytest.fixture
def hermes(engines: dict[str, AsyncEngine], monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(engines["hermes"], Script(monkeypatch, engines["hermes"].tokenizer))


@pytest.fixture
def thinking(engines: dict[str, AsyncEngine], monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(engines["thinking"], Script(monkeypatch, engines["thinking"].tokenizer))


@pytest.fixture
def mistral(engines: dict[str, AsyncEngine], monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(engines["mistral"], Script(monkeypatch, engines["mistral"].tokenizer))


@pytest.fixture
def bare(engines: dict[str, AsyncEngine], monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(engines["bare"], Script(monkeypatch, engines["bare"].tokenizer))


@pytest.fixture
def deepseek(engines: dict[str, AsyncEngine], monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(engines["deepseek"], Script(monkeypatch, engines["deepseek"].tokenizer))


@pytest.fixture
def plain(engines: dict[str, AsyncEngine], monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(engines["plain"], Script(monkeypatch, engines["plain"].tokenizer))


@in_real_time
async def test_a_call_is_an_answer_of_its_own_kind(hermes: Model) -> None:
    hermes.say(f"I see.\n{CALLS}\n{CALLS}")
    choice = await hermes.answer(tools=[WEATHER])
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I see.")
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Paris"}] * 2
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert all(call.id.startswith("call_") and call.type == "function" for call in choice.message.tool_calls)


@in_real_time
async def test_a_stream_has_the_same_calls_in_pieces(hermes: Model) -> None:
    hermes.say(f"I see.\n{CALLS}", f"I see.\n{CALLS}")
    whole, parts = await hermes.answer(tools=[WEATHER]), await hermes.deltas(tools=[WEATHER])
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    deltas = [call for part in parts for call in part.delta.tool_calls or ()]
    assert (deltas[0].id, deltas[0].function.name) == (whole.message.tool_calls[0].id, "weather")
    assert all(call.id is None and call.function.name is None and call.index == 0 for call in deltas[1:])
    assert len(deltas) > 5
    assert "".join(call.function.arguments for call in deltas) == whole.message.tool_calls[0].function.arguments
    assert [part.finish_reason for part in parts if part.finish_reason] == ["tool_calls"]


@in_real_time
async def test_what_is_said_otherwise_is_content(hermes: Model) -> None:
    for body in ({"tools": [WEATHER], "tool_choice": "none"}, {}):
        hermes.say(CALLS, CALLS)
        choice = await hermes.answer(**body)
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALLS, None, "stop")
        assert "".join(part.delta.content or "" for part in await hermes.deltas(**body)) == CALLS
    hermes.say("It rains.", CALLS + CALLS, CALLS)
    assert (await hermes.answer(tools=[WEATHER])).message.content == "It rains."
    one = await hermes.answer(tools=[WEATHER], parallel_tool_calls=False)
    assert len(one.message.tool_calls) == 1
    cut = await hermes.answer(tools=[WEATHER], max_tokens=45)
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls[0].function.arguments == '{"city": "'


@in_real_time
async def test_calls_between_special_markers_and_their_arguments_as_text(deepseek: Model) -> None:
    written = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Köln"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    deepseek.say(f"I see. {written}", f"I see. {written}")
    choice = await deepseek.answer(tools=[WEATHER])
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I see.")
    deltas = [call for part in await deepseek.deltas(tools=[WEATHER]) for call in part.delta.tool_calls or ()]
    assert "".join(call.function.arguments for call in deltas) == '{"city": "Köln"}'
    # The template adds the arguments to a text, for which they must be one.
    said = {"role": "assistant", "content": "", "tool_calls": [choice.message.tool_calls[0].model_dump()]}
    assert deepseek.prompt(messages=[*MESSAGES, said], tools=[WEATHER]).endswith(written)


@in_real_time
async def test_json_that_was_asked_for_beside_tools_is_content(bare: Model) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    said = '{"name":"weather","age":7}'
    for response_format in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": schema}}):
        body = {"tools": [WEATHER], "response_format": response_format}
        bare.say(said, said)
        choice = await bare.answer(**body)
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (said, None, "stop")
        assert "".join(part.delta.content or "" for part in await bare.deltas(**body)) == said
    bare.say(said, '{"name":"weather","arguments":{"city":"Paris"}}')
    assert (await bare.answer(tools=[WEATHER])).finish_reason == "tool_calls"
    called = await bare.answer(tools=[WEATHER], response_format={"type": "json_object"})
    assert called.message.tool_calls[0].function.arguments == '{"city":"Paris"}'


def test_tools_and_calls_are_rendered_by_the_template(hermes: Model) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    text = hermes.prompt(messages=messages, tools=[WEATHER])
    assert json.dumps(WEATHER) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert "# Tools" not in hermes.prompt(messages=messages, tools=[WEATHER], tool_choice="none")
    called["function"]["arguments"] = '{"city": "Par'  # type: ignore[index]
    assert '"arguments": "{\\"city\\": \\"Par"' in hermes.prompt(messages=messages)


@in_real_time
async def test_markers_that_are_special_tokens_are_found_and_ids_are_as_the_template_wants(mistral: Model) -> None:
    mistral.say('Well.[unrelated][TOOL_CALLS]weather[ARGS]{"city": "Paris"}')
    message = (await mistral.answer(tools=[WEATHER])).message
    assert (message.content, message.tool_calls[0].function.arguments) == ("Well.", '{"city": "Paris"}')
    messages = [*MESSAGES, message.model_dump(exclude_none=True), {"role": "tool", "content": "rain"}]
    assert mistral.prompt(messages=messages).endswith("[TOOL_CALLS]weatherWell.rain")


@in_real_time
async def test_a_template_without_tools_refuses_them_by_name(plain: Model) -> None:
    with pytest.raises(InvalidRequest, match=r"the model's chat template takes no tools: .*Qwen3") as caught:
        await plain.answer(tools=[WEATHER])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    plain.say("<think>Hm.</think>Yes.")
    assert (await plain.answer(tools=[WEATHER], tool_choice="none")).message.content == "<think>Hm.</think>Yes."


@in_real_time
async def test_a_schema_that_a_call_cannot_be_held_to_is_refused_with_its_place(hermes: Model) -> None:
    unkept = {"type": "object", "properties": {"days": {"type": "array", "uniqueItems": True}}}
    forecast = {"type": "function", "function": {"name": "forecast", "parameters": unkept, "strict": True}}
    told = r"^tools: the parameters of forecast: #/properties/days has keywords that are not supported: .*uniqueItems"
    for choice in ("required", "auto", {"type": "function", "function": {"name": "forecast"}}):
        with pytest.raises(InvalidRequest, match=told):
            await hermes.answer(tools=[WEATHER, forecast], tool_choice=choice)
    hermes.say(CALLS)
    named = {"type": "function", "function": {"name": "weather"}}
    assert (await hermes.answer(tools=[WEATHER, forecast], tool_choice=named)).message.tool_calls


@in_real_time
async def test_a_thought_is_no_part_of_the_content(thinking: Model) -> None:
    said = f"Hm.\n</think>\n\nI see.\n{CALLS}"
    thinking.say(said, said)
    choice, parts = await thinking.answer(tools=[WEATHER]), await thinking.deltas(tools=[WEATHER])
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "I see.")
    assert len(choice.message.tool_calls) == 1
    assert "".join(getattr(part.delta, "reasoning_content", None) or "" for part in parts) == "Hm."
    assert "".join(part.delta.content or "" for part in parts) == "I see."
    thinking.say("</think>Yes.", "Yes.", "Hm, ")
    assert (await thinking.answer()).message.content == "Yes."
    without = await thinking.answer(chat_template_kwargs={"enable_thinking": False})
    assert without.message.model_dump(exclude_none=True) == {"role": "assistant", "content": "Yes."}
    assert (await thinking.answer()).message.model_dump(exclude_none=True)["reasoning_content"] == "Hm,"


def test_how_much_to_think_is_said_to_the_template(thinking: Model, plain: Model) -> None:
    assert thinking.prompt().endswith("<think>\n")
    assert thinking.prompt(reasoning_effort="high").endswith("<think>\n")
    for body in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert thinking.prompt(**body).endswith("</think>\n\n")
    assert thinking.prompt(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}).endswith(
        "<think>\n"
    )
    assert plain.prompt(reasoning_effort="none", chat_template_kwargs={"enable_thinking": False}) == plain.prompt()
    for body, param in (
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
    ):
        with pytest.raises(InvalidRequest, match="no effect on the model's chat template") as caught:
            plain.prompt(**body)
        assert caught.value.param == param


def test_a_template_may_call_its_tools_otherwise(tmp_path: Path) -> None:
    template = HERMES.replace("in tools", "in xml_tools").replace("if tools", "if xml_tools")
    tokenizer = Tokenizer(chat_model(tmp_path, template), 1000)
    assert tokenizer.chat_template is not None
    (prompt,) = read_generation(chat(tools=[WEATHER]).body, chat=True).prompts
    assert json.dumps(WEATHER) in tokenizer.chat_template.render(prompt)


def test_a_file_of_chats_with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = chat_model(tmp_path / "model", HERMES)
    Script(monkeypatch, Tokenizer(folder, 1000)).say(CALLS, CALLS)
    lines = [{"custom_id": str(place), "messages": MESSAGES, "tools": [WEATHER]} for place in range(2)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run_file(source, tmp_path / "out.jsonl", model=str(folder), defaults=SamplingParams(max_tokens=200))
    assert report.succeeded == 2
    for result in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()):
        (choice,) = result["response"]["body"]["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}


def test_a_table_of_answers_has_the_calls_and_no_thoughts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = chat_model(tmp_path / "model", THINKING)
    Script(monkeypatch, Tokenizer(folder, 1000)).say(f"Hm.</think>I see. {CALLS}", "Hm.</think>Rain.")
    lines: list[dict[str, Any]] = [{"messages": MESSAGES, "tools": [WEATHER]}, {"messages": MESSAGES}]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run_file(
        source, tmp_path / "out.csv", model=str(folder), defaults=SamplingParams(max_tokens=200), max_num_seqs=1
    )
    assert report.succeeded == 2
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert json.loads(first["answer"])[0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert (first["finish_reason"], second["answer"], second["finish_reason"]) == ("tool_calls", "Rain.", "stop")
