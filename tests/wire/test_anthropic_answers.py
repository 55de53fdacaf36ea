"""Answers, streams and errors of Anthropic's Messages API in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from batchwright.wire.anthropic_answers import MessageChunks, openai_body, openai_error, openai_usage, status_of_error

NOW = 1_700_000_000
USAGE: dict[str, Any] = {"input_tokens": 3, "output_tokens": 5}
_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def message(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A message as Anthropic's official client reads it."""
    made = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": [*content],
        "stop_reason": "end_turn", "stop_sequence": None, "usage": USAGE,
    } | fields  # fmt: skip
    Message.model_validate(made)
    return made


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def use(call_id: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": given}


def translated(answer: dict[str, Any]) -> dict[str, Any]:
    """The body, which OpenAI's official client can read."""
    body = openai_body(answer, NOW)
    ChatCompletion.model_validate(body)
    return body


def test_an_answer() -> None:
    usage = USAGE | {
        "cache_read_input_tokens": 10, "cache_creation_input_tokens": 20, "service_tier": "standard",
        "cache_creation": {"ephemeral_1h_input_tokens": 20, "ephemeral_5m_input_tokens": 0},
        "output_tokens_details": {"thinking_tokens": 2},
    }  # fmt: skip
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    assert translated(message(thought, hidden, text("Hel"), text("lo"), usage=usage)) == {
        "id": "msg_1",
        "object": "chat.completion",
        "created": NOW,
        "model": "claude",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None, "reasoning_content": "hm"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 33,
            "completion_tokens": 5,
            "total_tokens": 38,
            "prompt_tokens_details": {"cached_tokens": 10, "cache_write_tokens": 20},
            "completion_tokens_details": {"reasoning_tokens": 2},
            "cache_creation": {"ephemeral_1h_input_tokens": 20, "ephemeral_5m_input_tokens": 0},
        },
        "service_tier": "default",
    }


def test_tool_calls() -> None:
    choice = translated(message(use("c1", a=[1]), use("c2"), stop_reason="tool_use"))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [(call["id"], call["function"]) for call in choice["message"]["tool_calls"]] == [
        ("c1", {"name": "f", "arguments": '{"a":[1]}'}),
        ("c2", {"name": "f", "arguments": "{}"}),
    ]
    both = translated(message(text("So"), use("c1"), stop_reason="tool_use"))["choices"][0]["message"]
    assert (both["content"], len(both["tool_calls"])) == ("So", 1)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("pause_turn", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
    ],
)
def test_reasons(theirs: str, ours: str) -> None:
    assert translated(message(text("x"), stop_reason=theirs))["choices"][0]["finish_reason"] == ours


def test_a_refusal_is_told() -> None:
    details = {"type": "refusal", "category": None, "explanation": "Not this."}
    choice = translated(message(stop_reason="refusal", stop_details=details))["choices"][0]
    assert (choice["message"]["content"], choice["message"]["refusal"]) == ("", "Not this.")


def test_usage_that_makes_no_sense_counts_nothing() -> None:
    usage = openai_usage({"input_tokens": -1, "output_tokens": "5", "cache_read_input_tokens": None})
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, 0)


@pytest.mark.parametrize("usage", [None, {}, {"input_tokens": 3}, {"input_tokens": -1, "output_tokens": 2}])
def test_an_answer_that_does_not_say_what_it_took_has_no_usage(usage: Any) -> None:
    """Zeros would say that it cost nothing."""
    assert openai_body(message(text("x")) | {"usage": usage}, 0)["usage"] is None


def test_errors() -> None:
    assert openai_error({"type": "not_found_error", "message": "no"}) == {
        "message": "no", "type": "not_found_error", "param": None, "code": "not_found_error",
    }  # fmt: skip
    assert openai_error({"type": "invalid_request_error", "details": {"error_code": "x"}})["code"] == "x"
    assert openai_error({"type": "billing_error", "message": "pay"})["code"] == "insufficient_quota"
    assert status_of_error({"type": "overloaded_error"}) == 529
    assert status_of_error({"type": "new_error"}) is None


def events(*blocks: tuple[dict[str, Any], Iterable[dict[str, Any]]], **end: Any) -> list[dict[str, Any]]:
    """A stream of blocks, each with its deltas, as Anthropic sends it."""
    start = message(stop_reason=None, usage={"input_tokens": 3, "output_tokens": 1, "cache_read_input_tokens": 4})
    made: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, (block, deltas) in enumerate(blocks):
        made.append({"type": "content_block_start", "index": index, "content_block": block})
        made += ({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas)
        made.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": "end_turn", "stop_sequence": None} | end
    made.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 7, "input_tokens": None}})
    made.append({"type": "message_stop"})
    for event in made:
        _EVENT.validate_python(event)
    return made


def said(*parts: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return text(""), [{"type": "text_delta", "text": part} for part in parts]


def called(call_id: str, *parts: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return use(call_id), [{"type": "input_json_delta", "partial_json": part} for part in parts]


def thought(*parts: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    deltas = [{"type": "thinking_delta", "thinking": part} for part in parts]
    return {"type": "thinking", "thinking": "", "signature": ""}, [
        *deltas,
        {"type": "signature_delta", "signature": "s"},
    ]


def streamed(stream: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chunks of a stream, which OpenAI's official client can read."""
    of = MessageChunks(NOW).of
    chunks = [chunk for event in stream for chunk in of(event)]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert (chunk["id"], chunk["created"], chunk["model"]) == ("msg_1", NOW, "claude")
    return chunks


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message and the reason that the chunks add up to."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "reason": None}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            whole[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            call = whole["calls"].setdefault(part["index"], {"id": part.get("id"), "arguments": ""})
            call["arguments"] += part["function"]["arguments"]
        whole["reason"] = choice["finish_reason"] or whole["reason"]
    return whole


def test_a_stream() -> None:
    stream = events(thought("h", "m"), said("Hel", "lo"), stop_reason="max_tokens")
    stream.insert(2, {"type": "ping"})
    stream.insert(3, {"type": "new_kind_of_event", "index": 0})
    chunks = streamed(stream)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks) == {"content": "Hello", "reasoning_content": "hm", "calls": {}, "reason": "length"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 7,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    }
    assert not any("usage" in chunk for chunk in chunks[:-1])


def test_a_stream_of_tool_calls() -> None:
    at_once: tuple[dict[str, Any], list[dict[str, Any]]] = use("c3", b=2), []
    blocks = said("So"), called("c1", "", '{"a"', ": 1}"), called("c2"), at_once
    chunks = streamed(events(*blocks, stop_reason="tool_use"))
    assert joined(chunks) == {
        "content": "So",
        "reasoning_content": "",
        "calls": {
            0: {"id": "c1", "arguments": '{"a": 1}'},
            1: {"id": "c2", "arguments": "{}"},
            2: {"id": "c3", "arguments": '{"b":2}'},
        },
        "reason": "tool_calls",
    }


_WORD = st.text(max_size=4)


@given(
    st.lists(
        st.one_of(
            st.lists(_WORD, max_size=3).map(lambda parts: said(*parts)),
            st.lists(_WORD, max_size=3).map(lambda parts: thought(*parts)),
            st.tuples(st.dictionaries(_WORD, st.integers(), max_size=3), st.integers(1, 5)).map(
                lambda given: called("c", *_pieces(json.dumps(given[0]), given[1]))
            ),
        ),
        max_size=5,
    )
)
def test_a_stream_says_the_same_as_the_answer(blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    stream = joined(streamed(events(*blocks)))
    content = []
    for block, deltas in blocks:
        whole = "".join(delta.get("text", delta.get("thinking", delta.get("partial_json", ""))) for delta in deltas)
        if block["type"] == "tool_use":
            content.append(block | {"input": json.loads(whole)})
        else:
            content.append(block | {block["type"]: whole})
    answer = translated(message(*content))["choices"][0]["message"]
    assert stream["content"] == (answer["content"] or "")
    assert stream["reasoning_content"] == answer.get("reasoning_content", "")
    calls = [json.loads(call["function"]["arguments"]) for call in answer.get("tool_calls", [])]
    assert [json.loads(call["arguments"]) for call in stream["calls"].values()] == calls


def _pieces(whole: str, size: int) -> list[str]:
    return [whole[start : start + size] for start in range(0, len(whole), size)]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORD, inner, max_size=3),
    max_leaves=6,
)
_KINDS = st.sampled_from(["text", "tool_use", "thinking", "new", None])


_BLOCK = st.fixed_dictionaries({"type": _KINDS, "text": _JSON, "input": _JSON, "thinking": _JSON})
_ANSWER = {"content": st.lists(_BLOCK) | _JSON, "usage": _JSON, "stop_reason": _JSON, "stop_details": _JSON}


@given(st.fixed_dictionaries({}, optional=_ANSWER))
def test_nonsense_from_an_endpoint_raises_nothing(answer: dict[str, Any]) -> None:
    assert openai_body(answer, NOW)["choices"]
