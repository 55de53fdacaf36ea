"""Bodies of requests: what is read, what is refused, and that nothing else is ever raised."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InvalidRequest
from batchwright.request import SamplingParams
from batchwright.wire.requests import (
    EmbeddingsBody,
    GenerationBody,
    read_embeddings,
    read_generation,
    read_model,
    texts_of_sent,
)

MESSAGES = [{"role": "user", "content": "Hello"}]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**4000) | st.just("\ud800")
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([
    "messages", "prompt", "input", "model", "stream", "stream_options", "max_tokens", "temperature", "n", "stop",
    "logprobs", "top_logprobs", "logit_bias", "seed", "priority", "deadline_ms", "encoding_format", "dimensions",
    "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort", "user", "min_tokens",
])  # fmt: skip
inputs = st.sampled_from(["Hi", ["a", "b"], [1, 2], [[1], [2]], MESSAGES])


@given(
    given_body=st.dictionaries(names | st.text(max_size=50), values | inputs, max_size=6),
    prompt=inputs | values,
)
def test_whatever_json_holds_it_is_read_or_refused(given_body: dict[str, Any], prompt: Any) -> None:
    for read, needed in (
        (lambda body: read_generation(body, chat=True), "messages"),
        (lambda body: read_generation(body, chat=False), "prompt"),
        (read_embeddings, "input"),
    ):
        for body in (given_body, {needed: prompt}, {needed: MESSAGES if needed == "messages" else "Hi", **given_body}):
            try:
                result = read(body)
            except InvalidRequest as error:
                (error.param or "").encode()
            else:
                assert isinstance(result, (GenerationBody, EmbeddingsBody))
                if isinstance(result, GenerationBody) and isinstance(body.get("max_tokens"), int):
                    assert result.params(1).max_tokens == body.get("max_completion_tokens", body["max_tokens"])


def test_what_is_left_out_is_as_openai_has_it() -> None:
    chat = read_generation({"messages": MESSAGES}, chat=True)
    assert chat.params(room=1234) == SamplingParams(max_tokens=1234, temperature=1.0)
    assert (chat.model, chat.priority, chat.deadline, chat.stream, chat.include_usage) == (None, 5, None, False, False)
    assert read_generation({"prompt": "a"}, chat=False).params(1234) == SamplingParams(max_tokens=16, temperature=1.0)
    # The engine says that the prompt is too long; it is given something to say it of.
    assert chat.params(room=-5).max_tokens == 1


def test_a_limit_is_kept_whatever_the_context() -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 7, "model": "m", "stream": True, "priority": 1}
    chat = read_generation(body | {"stream_options": {"include_usage": True}, "deadline_ms": 1500}, chat=True)
    assert chat.params(room=3).max_tokens == 7
    assert (chat.model, chat.priority, chat.deadline, chat.stream, chat.include_usage) == ("m", 1, 1.5, True, True)


def test_more_tokens_at_least_than_the_context_holds() -> None:
    chat = read_generation({"messages": MESSAGES, "min_tokens": 50}, chat=True)
    with pytest.raises(InvalidRequest, match="min_tokens=50") as caught:
        chat.params(room=10)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "missing_required_parameter"),
        ({"messages": MESSAGES, "functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"messages": MESSAGES, "response_format": {"type": "json"}}, "response_format", "unsupported_parameter"),
        ({"messages": MESSAGES, "moderation": {"model": "m"}}, "moderation", "unsupported_parameter"),
        ({"messages": MESSAGES, "max_token": 3}, "max_token", "unknown_parameter"),
        ({"messages": MESSAGES, "stream": "yes"}, "stream", "invalid_request"),
        ({"messages": MESSAGES, "stream_options": []}, "stream_options", "invalid_request"),
        (
            {"messages": MESSAGES, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "invalid_request",
        ),
        ({"messages": MESSAGES, "model": 5}, "model", "invalid_request"),
        ({"messages": MESSAGES, "temperature": 99}, "temperature", "invalid_request"),
        ({"messages": MESSAGES, "n": 0}, "n", "invalid_request"),
        ({"messages": MESSAGES, "priority": 1.5}, "priority", "invalid_request"),
        ({"messages": MESSAGES, "model": "a\0"}, "model", "invalid_request"),
        ({"messages": MESSAGES, "temperature": math.nan}, "temperature", "invalid_request"),
        ({"messages": MESSAGES, "deadline_ms": math.nan}, "deadline_ms", "invalid_request"),
        ({"messages": MESSAGES, "deadline_ms": math.inf}, "deadline_ms", "invalid_request"),
    ],
)  # fmt: skip
def test_what_a_chat_cannot_have(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_generation(body, chat=True)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_harmless_fields_are_ignored() -> None:
    body = {
        "messages": MESSAGES,
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "tools": [],
    }
    assert read_generation(body, chat=True) == read_generation({"messages": MESSAGES}, chat=True)


def test_one_body_asks_for_so_many_completions_at_most() -> None:
    assert len(read_generation({"prompt": ["a"] * 16, "n": 128}, chat=False).prompts) == 16
    with pytest.raises(InvalidRequest, match="17 prompts with n=128"):
        read_generation({"prompt": ["a"] * 17, "n": 128}, chat=False)


@pytest.mark.parametrize(
    ("given_input", "inputs"),
    [
        ("sky", ("sky",)),
        (["sky", "sea"], ("sky", "sea")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
    ],
)
def test_forms_of_inputs_to_embed(given_input: Any, inputs: tuple[Any, ...]) -> None:
    body = read_embeddings({"input": given_input, "model": "m", "user": "u"})
    assert (body.inputs, body.encoding_format, body.dimensions) == (inputs, "float", None)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_request"),
        ({"input": ["a", ""]}, "input", "invalid_request"),
        ({"input": ["a", 1]}, "input", "invalid_request"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_request"),
        ({"input": "a", "dimensions": True}, "dimensions", "invalid_request"),
        ({"input": "a", "dimension": 5}, "dimension", "unknown_parameter"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown_parameter"),
    ],
)
def test_what_embeddings_cannot_have(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_embeddings(body)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_models() -> None:
    assert read_model({}) is None
    assert read_model({"model": "m"}) == "m"
    with pytest.raises(InvalidRequest):
        read_model({"model": ""})


def test_each_prompt_of_a_body_that_is_sent_is_a_text() -> None:
    assert texts_of_sent({"prompt": ["a", "b"], "suffix": "x"}) == ["a", "b"]
    assert texts_of_sent({"prompt": "a"}) == ["a"]
    assert texts_of_sent({"messages": [{"content": [{"text": "a"}, {"image_url": {}}]}, {"content": "b"}]}) == ["a\nb"]
