"""Tools as the official client uses them, online and in a batch, over a tiny model whose answers the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from tests.inference.chat_models import HERMES, THINKING, Script, chat_model

from batchwright import AsyncEngine
from batchwright.inference.engine_inference import EngineInference

from .conftest import Service, running

Say = Callable[..., None]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int = 1


class Add(BaseModel):
    a: int
    b: int


class Mood(BaseModel):
    mood: Literal["good", "bad"]
    loud: bool


TOOLS: list[Any] = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Add)]


def call(name: str, **arguments: Any) -> str:
    """A call; of a strict tool it has all arguments, in the order of its schema."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


@pytest.fixture
def over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that runs a coroutine function with a service over a model with this template."""

    def run(
        main: Callable[[Service, Say], Coroutine[Any, Any, None]], template: str = HERMES, *, scripted: bool = True
    ) -> None:
        folder = chat_model(tmp_path / "model", template)
        (tmp_path / "data").mkdir()

        async def whole() -> None:
            engine = AsyncEngine(folder, dtype="float32", kv_memory="20MB")
            say: Say = Script(monkeypatch, engine.tokenizer).say if scripted else print
            async with asyncio.timeout(60), running(tmp_path / "data", EngineInference(engine, ["m"])) as service:
                await main(service, say)

        asyncio.run(whole())

    return run


def test_a_loop_of_calls_ends_with_an_answer(over: Callable[..., None]) -> None:
    async def main(service: Service, say: Say) -> None:
        say(
            "Let me see.\n" + call("Weather", city="Paris", days=2) + "\n" + call("Weather", city="Rome", days=1),
            call("Add", a=11, b=19),
            "Together it has 30 °C.",
        )
        done: list[str] = []
        messages: list[Any] = [{"role": "user", "content": "How warm is it in Paris and Rome, together?"}]
        for _ in range(9):
            answer = await service.client.chat.completions.parse(model="m", messages=messages, tools=TOOLS)
            choice = answer.choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            if choice.finish_reason != "tool_calls":
                break
            for called in choice.message.tool_calls or ():
                match called.function.parsed_arguments:
                    case Weather() as asked:
                        done.append(asked.city)
                        result = {"Paris": 11, "Rome": 19}[asked.city]
                    case Add() as asked:
                        done.append("sum")
                        result = asked.a + asked.b
                    case other:
                        raise AssertionError(other)
                messages.append({"role": "tool", "tool_call_id": called.id, "content": str(result)})
        assert done == ["Paris", "Rome", "sum"]
        assert messages[-1]["content"] == "Together it has 30 °C."
        assert [message["role"] for message in messages] == [
            "user", "assistant", "tool", "tool", "assistant", "tool", "assistant",
        ]  # fmt: skip

    over(main)


def test_the_clients_own_streams_collect_calls_and_their_arguments(over: Callable[..., None]) -> None:
    async def main(service: Service, say: Say) -> None:
        say("Well.\n" + call("Weather", city="Zürich", days=1) + call("Add", a=1, b=2))
        messages: list[Any] = [{"role": "user", "content": "Hi."}]
        async with service.client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [(event.name, event.parsed_arguments) for event in done] == [
            ("Weather", Weather(city="Zürich")), ("Add", Add(a=1, b=2)),
        ]  # fmt: skip
        assert len([event for event in events if event.type == "tool_calls.function.arguments.delta"]) > 10
        assert (final.choices[0].finish_reason, final.choices[0].message.content) == ("tool_calls", "Well.")

    over(main)


def test_a_thought_comes_before_the_answer_in_a_stream(over: Callable[..., None]) -> None:
    async def main(service: Service, say: Say) -> None:
        say("Hm, hm.\n</think>\n\nYes.")
        stream = await service.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi."}], stream=True, reasoning_effort="high"
        )
        thought, content = "", ""
        async for chunk in stream:
            delta = chunk.choices[0].delta
            assert not (content and getattr(delta, "reasoning_content", None))
            thought += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
        assert (thought, content) == ("Hm, hm.", "Yes.")

    over(main, THINKING)


def test_a_batch_has_calls_too(over: Callable[..., None]) -> None:
    async def main(service: Service, say: Say) -> None:
        say(call("Add", a=1, b=2))
        body = {"messages": [{"role": "user", "content": "1 + 2?"}], "tools": TOOLS}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        file = await service.client.files.create(file=json.dumps(line).encode(), purpose="batch")
        batch = await service.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        ended = await service.ended(batch.id)
        assert ended.output_file_id is not None
        output = json.loads((await service.client.files.content(ended.output_file_id)).text)
        (choice,) = output["response"]["body"]["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "Add", "arguments": '{"a": 1, "b": 2}'}

    over(main)


def test_a_call_that_is_required_has_arguments_of_its_schema(over: Callable[..., None]) -> None:
    async def main(service: Service, say: Say) -> None:
        messages: list[Any] = [{"role": "user", "content": "Hi."}]
        answer = await service.client.chat.completions.parse(
            model="m",
            messages=messages,
            tools=[openai.pydantic_function_tool(Mood)],
            tool_choice={"type": "function", "function": {"name": "Mood"}},
        )
        calls: Any = answer.choices[0].message.tool_calls
        (called,) = calls
        assert isinstance(called.function.parsed_arguments, Mood)

    over(main, scripted=False)
