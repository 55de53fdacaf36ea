"""Requests for `/v1/responses` as chats, their answers, and the events of their streams."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.long_form import examples

from batchwright.errors import InvalidRequest
from batchwright.wire.requests import read_generation
from batchwright.wire.response_answers import ResponseEvents, response_of_chat
from batchwright.wire.text_responses import chat_of_response, named_in_response

SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "The Rh"}], "id": "msg_1"}
PART = {"type": "input_text", "text": "a"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "5"}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "name": "f"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


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
            {
                "messages": [{"role": "user", "content": "a"}],
                "model": "m",
                "response_format": {"type": "text"},
                "tools": [],
            },
        ),
        (
            {
                "input": "a",
                "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
                "reasoning": {"effort": "low"},
                "tools": [{"type": "function", "name": "f", "parameters": None, "strict": True}],
                "tool_choice": {"type": "function", "name": "f"},
                "parallel_tool_calls": False,
            },
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                },
                "reasoning_effort": "low",
                "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {"input": [THOUGHT, SAID, CALL, CALL, OUTPUT, THOUGHT, CALL, {**OUTPUT, "output": [PART]}, THOUGHT]},
            {
                "messages": [
                    {"role": "assistant", "content": "The Rh", "reasoning_content": "Hm.", "tool_calls": [CALLED] * 2},
                    {"role": "tool", "tool_call_id": "c", "content": "5"},
                    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALLED]},
                    {"role": "tool", "tool_call_id": "c", "content": "a"},
                    {"role": "assistant", "content": "", "reasoning_content": "Hm."},
                ]
            },
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
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{**THOUGHT, "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"role": "tool", "content": "5"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [FUNCTION | {"defer_loading": True}]}, "tools[0]"),
        ({"tools": [FUNCTION | {"name": "?"}]}, "tools[0].name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": 5}, "instructions"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    def read() -> None:
        chat = chat_of_response({"input": "a", **fields})
        with named_in_response():
            read_generation(chat, chat=True)

    with pytest.raises(InvalidRequest) as caught:
        read()
    assert caught.value.param == param
    assert param in str(caught.value)
    assert ".function" not in str(caught.value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["message", "user", "assistant", "text", "function_call", "function_call_output", "reasoning"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "format", "call_id", "name", "arguments", "output"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=examples(100, long=300))
@given(
    body=st.dictionaries(
        st.sampled_from(
            ["input", "instructions", "text", "max_output_tokens", "tools", "tool_choice", "reasoning", "stream"]
        ),
        json_values,
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


def test_thoughts_and_calls_are_items_also_in_a_stream() -> None:
    whole = chat_answer("", "tool_calls")
    message = {"content": None, "reasoning_content": "Hm, so.", "tool_calls": [CALLED, CALLED | {"id": "d"}]}
    whole["choices"][0]["message"] = message
    asked = {"input": "a", "tools": [FUNCTION], "tool_choice": "required", "reasoning": {"effort": "low"}}
    found = Response.model_validate(response_of_chat(asked, whole))
    assert [item.type for item in found.output] == ["reasoning", "function_call", "function_call"]
    assert [item.id for item in found.output] == ["rs_k", "fc_k", "fc_k_1"]
    assert (found.output_text, found.tool_choice, found.tools[0].type) == ("", "required", "function")
    head = {name: whole[name] for name in ("id", "created", "model")}
    begun = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm, "},
        {"reasoning_content": "so."},
        {"tool_calls": [begun]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in "{}"),
        {"tool_calls": [begun | {"id": "d"}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    chunks = [
        *(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None} for delta in deltas),
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": None},
        head | {"choices": [], "usage": whole["usage"]},
    ]
    events = ResponseEvents(asked)
    made = [event for each in chunks for event in events.of_chunk(each)]
    for event in made:
        EVENT.validate_python(event)
    assert [each["type"].removeprefix("response.") for each in made] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert made[-1]["response"] == response_of_chat(asked, whole)


def test_what_is_cut_is_the_last_item() -> None:
    cut = chat_answer("Well.", "length")
    cut["choices"][0]["message"]["tool_calls"] = [CALLED]
    assert [item["status"] for item in response_of_chat({"input": "a"}, cut)["output"]] == ["completed", "incomplete"]
