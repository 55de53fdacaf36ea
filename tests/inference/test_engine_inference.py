"""Chats and completions by the real engine over the default model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from batchwright import AsyncEngine, InferenceRequest, InferenceResponse
from batchwright.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    ModelNotFound,
)
from batchwright.inference.engine_inference import EngineInference
from batchwright.inference.inference import Call, work_of
from batchwright.inference.routing import RoutedInference
from batchwright.request import Traffic

from .running import in_real_time, run

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": "100MB", "max_model_len": 96, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def engine(shallow_path: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(shallow_path, **OPTIONS)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def inference(engine: AsyncEngine) -> EngineInference:
    return EngineInference(engine, ["smollm2", "alias"], unix_time=lambda: 1700000000.5)


def chat(traffic: Traffic = "online", *, timeout: float | None = None, **body: Any) -> Call:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    return Call(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 12} | body, "req_7", traffic, timeout)


def text(**body: Any) -> Call:
    return Call(TEXT, {"prompt": "The sky is", "temperature": 0, "max_tokens": 8} | body, "req_8")


def streamed(inference: EngineInference, call: Call) -> AsyncGenerator[dict[str, Any]]:
    return cast("AsyncGenerator[dict[str, Any]]", inference.stream(call))


async def collected(inference: EngineInference, call: Call) -> list[dict[str, Any]]:
    return [chunk async for chunk in inference.stream(call)]


@in_real_time
async def test_a_chat_is_what_the_engine_says(engine: AsyncEngine, inference: EngineInference) -> None:
    from batchwright import SamplingParams

    body = await inference.answer(chat(n=2))
    own = await engine.generate(chat().body["messages"], SamplingParams(max_tokens=12, temperature=0.0))
    body, own = body, own
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert [choice.message.content for choice in parsed.choices] == [own.output] * 2
    assert (parsed.id, parsed.model, parsed.created) == ("chatcmpl-7", "smollm2", 1700000000)
    assert parsed.usage is not None
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens) == (own.usage.prompt_tokens, 24)
    assert parsed.choices[0].finish_reason == "length"


@in_real_time
async def test_a_stream_is_the_answer_in_pieces(inference: EngineInference) -> None:
    options: dict[str, Any] = {"n": 2, "temperature": 0.9, "seed": 3, "logprobs": True, "top_logprobs": 1}

    answer = await inference.answer(chat(**options))
    answer, bodies = answer, await collected(inference, chat(**options, stream_options={"include_usage": True}))
    chunks = [ChatCompletionChunk.model_validate(body, strict=True) for body in bodies]
    for choice in answer["choices"]:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice["index"]]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == choice["message"]["content"]
        named = [entry.token for c in own if c.logprobs for entry in c.logprobs.content or ()]
        assert named == [entry["token"] for entry in choice["logprobs"]["content"]]
        assert [c.finish_reason for c in own if c.finish_reason] == [choice["finish_reason"]]
    assert bodies[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert bodies[-1]["choices"] == []


@in_real_time
async def test_several_prompts_in_one_completion(engine: AsyncEngine, inference: EngineInference) -> None:
    ids = engine.tokenizer.encode("The sky is")

    prompts = ["The sky is", "Paris is the capital of"]
    whole, chunks, by_ids, usual = [
        await inference.answer(text(prompt=prompts, n=2)),
        await collected(inference, text(prompt=prompts, n=2)),
        await inference.answer(text(prompt=ids)),
        await inference.answer(text(max_tokens=None)),
    ]
    parsed = Completion.model_validate(whole, strict=True)
    assert [choice.index for choice in parsed.choices] == [0, 1, 2, 3]
    assert parsed.choices[0].text == parsed.choices[1].text != parsed.choices[2].text
    texts = ["", "", "", ""]
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice.text for choice in parsed.choices]
    assert by_ids["choices"][0]["text"] == texts[0]
    assert by_ids["usage"]["prompt_tokens"] == len(ids)
    assert usual["usage"]["completion_tokens"] == 16


def test_a_chat_without_a_limit_ends_with_the_context(inference: EngineInference) -> None:
    body = run(inference.answer(chat(max_tokens=None, ignore_eos=True)))
    assert body["usage"]["total_tokens"] == 96
    assert body["choices"][0]["finish_reason"] == "length"


@in_real_time
async def test_a_chat_without_a_limit_ends_with_the_cache_where_that_is_smaller(shallow_path: Path) -> None:
    inference = EngineInference(AsyncEngine(shallow_path, **(OPTIONS | {"kv_memory": "1MB", "max_model_len": None})))
    try:
        body = await inference.answer(chat(max_tokens=None, ignore_eos=True))
    finally:
        await inference.close()
    assert body["usage"]["total_tokens"] < 300


def test_names_of_the_model(inference: EngineInference) -> None:
    assert run(inference.answer(chat(model="alias", max_tokens=1)))["model"] == "alias"
    with pytest.raises(ModelNotFound, match="choose from smollm2, alias"):
        run(inference.answer(chat(model="gpt-4o")))
    with pytest.raises(ModelNotFound):
        run(collected(inference, chat(model="gpt-4o")))


@pytest.mark.parametrize(
    ("call", "kind", "param"),
    [
        (chat(temperature=99), InvalidRequest, "temperature"),
        (chat(tools=[{}]), InvalidRequest, "tools[0].type"),
        (chat(tools=[{"type": "function", "function": {"name": "f"}}]), InvalidRequest, "tools"),
        (chat(messages=[{"role": "user", "content": "sky " * 300}]), ContextLengthExceeded, "prompt"),
        (chat(messages=[{"role": "user", "content": "sky " * 300}], max_tokens=None), ContextLengthExceeded, "prompt"),
        (text(prompt="\ud800"), InvalidRequest, "prompt"),
        (text(prompt=[10**6]), InvalidRequest, "prompt"),
        (text(prompt=["good", ""]), InvalidRequest, "prompt"),
        (text(logit_bias={"1000000": 1}), InvalidRequest, "logit_bias"),
    ],
)
def test_what_can_never_be_computed(
    inference: EngineInference, call: Call, kind: type[InvalidRequest], param: str
) -> None:
    for outcome in (inference.answer(call), collected(inference, call)):
        with pytest.raises(kind) as caught:
            run(cast("Coroutine[Any, Any, Any]", outcome))
        assert type(caught.value) is kind
        assert caught.value.param == param
    assert inference.wants == 8


@in_real_time
async def test_who_leaves_frees_the_slot_at_once(engine: AsyncEngine, inference: EngineInference) -> None:
    endless: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "n": 4}

    first = engine.stats.generated_tokens
    async with aclosing(streamed(inference, chat(**endless))) as chunks:
        await anext(chunks)
        assert inference.wants == 4
    assert inference.wants == 8
    await inference.answer(chat(max_tokens=1))

    before = engine.stats.generated_tokens
    waiting = asyncio.ensure_future(inference.answer(chat(**endless)))
    while engine.stats.generated_tokens == before:  # noqa: ASYNC110 - counted on the engine's own thread
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert inference.wants == 8
    await inference.answer(chat(max_tokens=1))
    first, last = first, engine.stats.generated_tokens
    # All places were taken: the others were answered because these gave theirs up, long before their 2 x 192 tokens.
    assert last - first < 192


@in_real_time
async def test_the_work_of_a_job_is_known_while_it_is_computed(engine: AsyncEngine, inference: EngineInference) -> None:
    routed = RoutedInference([inference])
    assert await work_of(routed, "req_7") is None
    calls = [asyncio.ensure_future(inference.answer(chat(max_tokens=48, ignore_eos=True))) for _ in range(3)]
    while True:
        work = await work_of(routed, "req_7")
        if work is not None and len(work.running) == 3 and any(tokens for tokens, _ in work.running):
            break
        assert not all(call.done() for call in calls)
    assert {limit for _, limit in work.running} == {48}
    assert work.prompt_tokens + work.prompt_tokens_left > 0
    assert (work.places, work.longest) == (1, 96)
    other = await inference.work_of("req_8")
    assert (other.running, other.prompt_tokens, other.prompt_tokens_left) == ([], 0, 0)
    await asyncio.gather(*calls)
    after = await inference.work_of("req_7")
    assert not after.running
    assert after.step_tokens > work.step_tokens


def test_deadlines(inference: EngineInference) -> None:
    endless: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
    for call in (chat(deadline_ms=1, **endless), chat(timeout=0.001, **endless), chat(timeout=0.0)):
        with pytest.raises(DeadlineExceeded):
            run(inference.answer(call))
        with pytest.raises(DeadlineExceeded):
            run(collected(inference, call))


@in_real_time
async def test_online_requests_that_wait_do_not_keep_out_what_batches_are_owed(engine: AsyncEngine) -> None:
    inference = EngineInference(engine)
    assert inference.room == 8
    online = [asyncio.ensure_future(inference.answer(chat(n=8, max_tokens=1))) for _ in range(5)]
    await asyncio.sleep(0)
    assert inference.room == 4
    lines = [asyncio.ensure_future(inference.answer(chat("batch", n=4, max_tokens=1))) for _ in range(2)]
    await asyncio.sleep(0)
    assert inference.room == -4
    await asyncio.gather(*online, *lines)


def test_what_the_engine_is_told(
    engine: AsyncEngine, inference: EngineInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[InferenceRequest] = []
    own = engine.generate

    async def generate(request: Any) -> InferenceResponse:
        told.append(request)
        return await own(request)

    monkeypatch.setattr(engine, "generate", generate)
    run(inference.answer(chat("batch", timeout=50.0, deadline_ms=70_000, priority=2, max_tokens=1)))
    run(inference.answer(chat(deadline_ms=40_000, max_tokens=1)))
    assert [(each.traffic, each.priority) for each in told] == [("batch", 2), ("online", 5)]
    # What tokenizing took is no longer left.
    assert (told[1].deadline or 0.0) <= 40.0 < (told[0].deadline or 0.0) <= 50.0
    assert len({each.request_id for each in told}) == 2


@in_real_time
async def test_closing_answers_what_is_being_computed(shallow_path: Path) -> None:
    inference = EngineInference(AsyncEngine(shallow_path, **OPTIONS))
    assert inference.models == (str(shallow_path),)
    endless = chat(max_tokens=48, ignore_eos=True)
    chunks = streamed(inference, endless)
    await anext(chunks)
    waiting = asyncio.ensure_future(inference.answer(endless))
    streaming = asyncio.ensure_future(_rest(chunks))
    await asyncio.sleep(0)
    await inference.close()
    outcomes: list[Any] = await asyncio.gather(waiting, streaming, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineClosed, EngineClosed]
    with pytest.raises(EngineClosed):
        await inference.answer(endless)


async def _rest(chunks: AsyncGenerator[dict[str, Any]]) -> None:
    async for _ in chunks:
        pass
