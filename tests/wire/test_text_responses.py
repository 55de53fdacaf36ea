"""Requests for `/v1/responses` as chats, their answers, and the events of their streams."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from batchwright.errors import InvalidRequest
from batchwright.wire.text_responses import ResponseEvents, chat_of_response, response_of_chat

SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "The Rh"}], "id": "msg_1"}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"input": "a"}, {"messages": [{"role": "user", "content": "a"}]}),
        (
            {"input": "a", "instructions": "Be brief.", "max_output_tokens": 5, "temperature": 0, "store": True},
            {
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}],
                "max_tokens": 5,
                "temperature": 0,
            },
        ),
        (
            {
                "input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}, SAID],
                "seed": 1,
            },
            {
                "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "The Rh"}],
                "seed": 1,
            },
        ),
        (
            {"input": "a", "text": {"format": {"type": "text"}}, "tools": [], "metadata": {"a": "b"}, "model": "m"},
            {"messages": [{"role": "user", "content": "a"}], "model": "m", "response_format": {"type": "text"}},
        ),
        ({"input": "a", "text": {"format": None}}, {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_request_as_a_chat(body: dict[str, Any], chat: dict[str, Any]) -> None:
    assert chat_of_response(body) == chat


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "5"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": 5}, "instructions"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_of_response({"input": "a", **fields})
    assert caught.value.param == param


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["message", "user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "format"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=300)
@given(
    body=st.dictionaries(
        st.sampled_from(["input", "instructions", "text", "max_output_tokens", "tools", "stream"]), json_values
    )
)
def test_nothing_but_a_refusal_is_raised(body: dict[str, Any]) -> None:
    try:
        chat = chat_of_response(body)
    except InvalidRequest:
        return
    assert all(isinstance(each["content"], str) for each in chat["messages"])


def chat_answer(text: str, reason: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-k",
        "created": 7,
        "model": "m",
        "choices": [{"index": 0, "message": {"content": text}, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_an_answer(reason: str, status: str) -> None:
    asked = {"input": "a", "metadata": {"a": "b"}, "temperature": 0.5}
    found = Response.model_validate(response_of_chat(asked, chat_answer("The Rhine.", reason)))
    assert (found.id, found.output_text, found.status, found.metadata) == ("resp_k", "The Rhine.", status, {"a": "b"})
    assert found.usage is not None
    used = found.usage
    assert (used.input_tokens, used.output_tokens, used.input_tokens_details.cached_tokens) == (5, 2, 3)
    why = found.incomplete_details
    assert (None if why is None else why.reason) == (None if reason == "stop" else "max_output_tokens")


def test_the_events_of_a_stream_add_up_to_the_answer() -> None:
    whole = chat_answer("The Rhine.", "stop")
    head = {name: whole[name] for name in ("id", "created", "model")}

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], "usage": None}

    chunks = [
        chunk({"role": "assistant", "content": ""}),
        *(chunk({"content": part}) for part in ("The ", "Rhine.")),
        chunk({}, "stop"),
        head | {"choices": [], "usage": whole["usage"]},
    ]
    events = ResponseEvents({"input": "a"})
    made = [event for each in chunks for event in events.of_chunk(each)]
    assert [each["type"].removeprefix("response.") for each in made] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [each["sequence_number"] for each in made] == list(range(len(made)))
    assert made[-1]["response"] == response_of_chat({"input": "a"}, whole)
