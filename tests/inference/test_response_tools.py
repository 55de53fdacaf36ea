"""`/v1/responses` with tools, forms and thoughts, through the official client, over tiny models with a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx2
import openai
import pytest
from pydantic import BaseModel, Field

from batchwright import SamplingParams
from batchwright import run as run_file
from batchwright.engine.tokenizer import Tokenizer
from batchwright.server.app import create_app
from batchwright.service.composition import open_services
from batchwright.service.settings import Settings

from .chat_models import HERMES, THINKING, Script, chat_model

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
QUESTION: Any = {"role": "user", "content": "How is the weather?"}


def call_of(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    is_large: bool


def with_client(
    folder: Path, template: str, ask: Callable[[openai.AsyncOpenAI], Awaitable[None]], said: Sequence[str] = ()
) -> None:
    """Ask a model with this template; with `said`, those are its answers, else random."""
    model = chat_model(folder / "model", template)
    settings = Settings.model_validate({
        "data": folder / "data", "embedding_model": "", "model": str(model), "dtype": "float32", "kv_memory": "20MB",
    })  # fmt: skip

    async def asked() -> None:
        async with open_services(settings) as services:
            transport = httpx2.ASGITransport(create_app(services))
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
                await ask(openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http))

    with pytest.MonkeyPatch.context() as patch:
        if said:
            Script(patch, Tokenizer(model, 1000)).say(*said)
        asyncio.run(asked())


def test_a_loop_of_calls(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        model = (await client.models.list()).data[0].id
        asked: list[Any] = [QUESTION]
        outputs: list[str] = []
        while True:
            response = await client.responses.create(model=model, input=asked, tools=[WEATHER])
            asked += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                outputs.append(f"It rains in {json.loads(call.arguments)['city']}.")
                asked.append({"type": "function_call_output", "call_id": call.call_id, "output": outputs[-1]})
        assert (response.output_text, response.status) == ("It rains.", "completed")
        assert outputs == ["It rains in Paris.", "It rains in Rome."]
        assert [item.get("type", "message") for item in asked] == [
            *("message", "message", "function_call", "function_call", "function_call_output", "function_call_output"),
            "message",
        ]
        bad: Any = {**WEATHER, "name": "?"}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=model, input="a", tools=[bad])
        assert caught.value.param == "tools[0].name"

    with_client(tmp_path, HERMES, ask, [f"I see.\n{call_of('Paris')}\n{call_of('Rome')}", "It rains."])


def test_a_stream_of_a_thought_text_and_calls(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        model = (await client.models.list()).data[0].id
        whole = await client.responses.create(
            model=model, input=[QUESTION], tools=[WEATHER], reasoning={"effort": "high"}
        )
        async with client.responses.stream(model=model, input=[QUESTION], tools=[WEATHER]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        without = {"id", "call_id", "parsed_arguments", "parsed"}
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert [item.to_dict().keys() - without for item in final.output] == [
            item.to_dict().keys() - without for item in whole.output
        ]
        for answer in (whole, final):
            thought, _, call = answer.output
            assert thought.type == "reasoning"
            assert thought.content is not None
            assert thought.content[0].text == "Hm."
            assert answer.output_text == "I see."
            assert call.type == "function_call"
            assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
        deltas = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
        assert len(deltas) > 5
        assert "".join(deltas) == '{"city": "Rome"}'
        asked: list[Any] = [QUESTION, *(item.model_dump() for item in whole.output)]
        again = await client.responses.create(model=model, input=asked, reasoning={"effort": "none"})
        assert again.output_text == "Yes."

    said = f"Hm.\n</think>\n\nI see.\n{call_of('Rome')}"
    with_client(tmp_path, THINKING, ask, [said, said, "Yes."])


def test_what_a_random_model_says_has_the_form(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        model = (await client.models.list()).data[0].id
        schema = {**City.model_json_schema(), "additionalProperties": False}
        form: Any = {"format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True}}
        for seed in range(3):
            more: dict[str, Any] = {"extra_body": {"seed": seed}}
            parsed = await client.responses.parse(model=model, input="A city.", text_format=City, **more)
            assert isinstance(parsed.output_parsed, City)
            told = await client.responses.create(model=model, input="A city.", text=form, **more)
            City.model_validate_json(told.output_text)
            assert told.text is not None
            assert told.text.format is not None
            assert told.text.format.type == "json_schema"
            choice: Any = {"type": "function", "name": "weather"}
            must = await client.responses.create(
                model=model, input="A city.", tools=[WEATHER], tool_choice=choice if seed else "required",
                parallel_tool_calls=False, **more,
            )  # fmt: skip
            (call,) = must.output
            assert call.type == "function_call"
            assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        anything = await client.responses.create(
            model=model, input="A city.", text={"format": {"type": "json_object"}}, max_output_tokens=9
        )
        assert anything.output_text.startswith("{")
        bad: dict[str, object] = {"type": "object", "propertyNames": {"not": {}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(
                model=model, input="a", text={"format": {"type": "json_schema", "name": "a", "schema": bad}}
            )
        assert caught.value.param == "text.format"

    with_client(tmp_path, HERMES, ask)


def test_a_file_of_responses_with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = chat_model(tmp_path / "model", HERMES)
    Script(monkeypatch, Tokenizer(folder, 1000)).say(call_of("Paris"), "Fine.")
    lines = [
        {"custom_id": str(place), "method": "POST", "url": "/v1/responses", "body": {"input": "a", "tools": [WEATHER]}}
        for place in range(2)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run_file(
        source, tmp_path / "out.csv", model=str(folder), defaults=SamplingParams(max_tokens=200), max_num_seqs=1
    )
    assert report.succeeded == 2
    told = (tmp_path / "out.csv").read_text()
    assert ",tool_calls," in told
    assert "Paris" in told
    assert "Fine." in told
