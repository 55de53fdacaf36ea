"""Bodies of OpenAI chats as bodies of Anthropic's Messages API: each field, and that none is lost silently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_type_hints

import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming, MessageCreateParamsStreaming
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from pydantic import TypeAdapter

from batchwright.errors import InvalidRequest
from batchwright.request import SamplingParams
from batchwright.wire.anthropic_requests import DROPPED, TAKEN, cached_prefixes, messages_body
from batchwright.wire.requests import CHAT_URL, filled

HELLO = [{"role": "user", "content": "Hello"}]
BASE: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": HELLO}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SENT_TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def sent(**fields: Any) -> dict[str, Any]:
    """What goes out for a body with these fields, beside those of `BASE`."""
    body = messages_body(BASE | fields)
    for name in BASE:
        if name not in fields:
            assert body.pop(name) == BASE[name]
    return body


def messages(*given: dict[str, Any]) -> dict[str, Any]:
    body = messages_body(BASE | {"messages": [*given]})
    return {name: body[name] for name in ("system", "messages") if name in body}


def refused(body: Mapping[str, Any]) -> str | None:
    """The field that is to blame."""
    with pytest.raises(InvalidRequest) as caught:
        messages_body(body)
    assert caught.value.param is None or caught.value.param.partition("[")[0] in str(caught.value)
    return caught.value.param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1}, {"temperature": 1}),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, {"temperature": 0.0, "top_p": 0.5, "top_k": 3}),
        ({"stop": "x"}, {"stop_sequences": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop_sequences": ["x", "y"]}),
        ({"stop": []}, {}),
        ({"stream": True}, {"stream": True}),
        ({"user": "u"}, {"metadata": {"user_id": "u"}}),
        ({"user": "u", "safety_identifier": "s"}, {"metadata": {"user_id": "s"}}),
        ({"service_tier": "auto"}, {"service_tier": "auto"}),
        ({"service_tier": "default"}, {"service_tier": "standard_only"}),
        ({"reasoning_effort": "high"}, {"output_config": {"effort": "high"}}),
        ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}),
        ({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "adaptive"}}),
        ({"cache_control": {"type": "ephemeral"}}, {"cache_control": {"type": "ephemeral"}}),
        ({"tools": [TOOL]}, {"tools": [SENT_TOOL]}),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}, {}),
        ({"tools": [TOOL], "tool_choice": "auto"}, {"tools": [SENT_TOOL], "tool_choice": {"type": "auto"}}),
        ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [SENT_TOOL], "tool_choice": {"type": "none"}}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [SENT_TOOL], "tool_choice": {"type": "any"}}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"tools": [SENT_TOOL], "tool_choice": {"type": "tool", "name": "f"}},
        ),
        (
            {"tools": [TOOL], "parallel_tool_calls": False},
            {"tools": [SENT_TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        (
            {"tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "required"},
            {"tools": [SENT_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        ),
        (
            {"tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "none"},
            {"tools": [SENT_TOOL], "tool_choice": {"type": "none"}},
        ),
        ({"tools": [TOOL], "parallel_tool_calls": True}, {"tools": [SENT_TOOL]}),
        (
            {"tools": [{"type": "function", "function": {"name": "g", "description": "d", "strict": True}}]},
            {
                "tools": [
                    {
                        "name": "g",
                        "description": "d",
                        "input_schema": {"type": "object", "properties": {}},
                        "strict": True,
                    }
                ]
            },
        ),
        ({"response_format": {"type": "text"}}, {}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}, "description": "d"},
                },
                "reasoning_effort": "low",
            },
            {
                "output_config": {
                    "effort": "low",
                    "format": {"type": "json_schema", "schema": {"description": "d", "type": "object"}},
                }
            },
        ),
        # What asks for nothing, or for nothing that an answer depends on.
        ({"n": 1, "logprobs": False, "seed": None, "frequency_penalty": 0, "presence_penalty": 0.0, "stop": None}, {}),
        ({"logit_bias": {}, "top_logprobs": 0, "modalities": ["text"], "store": False, "functions": []}, {}),
        ({"metadata": {"a": "b"}, "stream_options": {"include_usage": True}, "prompt_cache_key": "k"}, {}),
        ({"prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h"}, {}),
    ],
)
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sent(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"seed": 0}, "seed"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"store": True}, "store"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"service_tier": []}, "service_tier"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "thinking": {"type": "adaptive"}}, "reasoning_effort"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"stop": [1]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"min_p": 0.1}, "min_p"),
        ({"max_token": 5}, "max_token"),
        ({"made_up": 1}, "made_up"),
        ({"user": 5}, "user"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(BASE | fields) == param


def test_a_limit_is_needed_and_may_be_that_of_the_job() -> None:
    body = {"messages": HELLO, "priority": 1}
    assert refused(body) == "max_tokens"
    assert messages_body(filled(CHAT_URL, body, {"max_tokens": 5}))["max_tokens"] == 5
    assert messages_body(filled(CHAT_URL, body, SamplingParams(max_tokens=6, temperature=0.0, stop=("x",)))) == {
        "messages": HELLO, "max_tokens": 6, "temperature": 0.0, "stop_sequences": ["x"],
    }  # fmt: skip
    assert messages_body(body | {"max_tokens": 1, "max_completion_tokens": 2})["max_tokens"] == 2


def test_system_messages_become_the_system_prompt() -> None:
    system, developer = {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "And kind."}
    assert messages(system, *HELLO) == {"system": "Be brief.", "messages": HELLO}
    assert messages(system, *HELLO, developer) == {
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "And kind."}],
        "messages": HELLO,
    }
    part = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    assert messages({"role": "system", "content": [part]}, *HELLO)["system"] == [part]
    assert refused(BASE | {"messages": [system]}) == "messages"


def test_parts_become_blocks() -> None:
    parts = [
        {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}},
        {"type": "image_url", "image_url": {"url": "https://host/a.png", "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": PIXEL}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0=", "filename": "a.pdf"}},
    ]
    assert messages({"role": "user", "content": parts})["messages"][0]["content"] == [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
            "title": "a.pdf",
        },
    ]


def test_tool_calls_and_their_results() -> None:
    other = CALL | {"id": "c2", "function": {"name": "g", "arguments": ""}}
    conversation: list[dict[str, Any]] = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [CALL, other], "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "1", "name": "f"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "Thus", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": "Go on"},
    ]
    assert messages(*conversation)["messages"] == [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "1"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "2"}]},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Thus"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}]},
        {"role": "user", "content": "Go on"},
    ]


def test_a_refusal_is_text() -> None:
    refusal = [{"type": "text", "text": "No."}]
    for message in (
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ):
        assert messages(*HELLO, message)["messages"][1] == {"role": "assistant", "content": refusal}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "name": "f", "content": "1"}, "messages[1].role"),
        ({"role": "user", "name": "n", "content": "x"}, "messages[1].name"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": [5]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}, "messages[1].content[0].y"),
        ({"role": "system", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}]},
            "messages[1].content[0].image_url.detail",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/tiff;base64,AA"}}]},
            "messages[1].content[0].image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
            "messages[1].content[0].image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]},
            "messages[1].content[0].file.file_id",
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
                ],
            },
            "messages[1].content[0].prompt_cache_breakpoint.ttl",
        ),
        ({"role": "assistant", "content": None}, "messages[1]"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[1].audio"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "messages[1].function_call"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "messages[1].tool_calls[0].type"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ("x", "messages[1]"),
    ],
)
def test_messages_that_cannot_be_translated(message: Any, param: str) -> None:
    assert refused(BASE | {"messages": [*HELLO, message]}) == param


VALUES: Mapping[str, Any] = {
    "messages": HELLO, "model": "m", "stream": True, "max_tokens": 3, "max_completion_tokens": 3, "temperature": 0.25,
    "top_p": 0.25, "stop": "halt", "tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False, "user": "me",
    "safety_identifier": "me", "reasoning_effort": "low", "service_tier": "default",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
}  # fmt: skip
"""A value for each field that is translated, which the body then tells from one without the field."""


@pytest.mark.parametrize("name", sorted(get_type_hints(CompletionCreateParamsStreaming)))
def test_every_field_of_openai_is_translated_or_dropped_knowingly_or_refused(name: str) -> None:
    need = {"tools": [TOOL]} if name in ("tool_choice", "parallel_tool_calls") else {}
    base = {field: value for field, value in (BASE | need).items() if field != name}
    if name in DROPPED:
        assert name in ("metadata", "prediction", "stream_options") or name.startswith("prompt_cache")
        return
    if name in TAKEN:
        body = messages_body(base | {name: VALUES[name]})
        if name in ("messages", "max_tokens"):
            assert refused(base) == name
        else:
            assert body != messages_body(base)
        return
    for value in (5, "x", [1], {"a": 1}):
        assert refused(base | {name: value}) == name


_TEXT = st.text(max_size=5)
_PART = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, _TEXT),
    st.just({"type": "image_url", "image_url": {"url": PIXEL}}),
    st.just({"type": "image_url", "image_url": {"url": "http://host/a"}}),
)
_ARGUMENTS = st.dictionaries(_TEXT, st.integers() | _TEXT, max_size=2).map(json.dumps)
_CALLS = st.lists(
    st.builds(
        lambda name, text: {"id": "c", "type": "function", "function": {"name": name, "arguments": text}},
        _TEXT,
        _ARGUMENTS,
    ),
    min_size=1,
    max_size=3,
)
_MESSAGES = st.lists(
    st.one_of(
        st.builds(
            lambda content: {"role": "user", "content": content}, _TEXT | st.lists(_PART, min_size=1, max_size=3)
        ),
        st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "developer"]), _TEXT),
        st.builds(lambda text: {"role": "assistant", "content": text}, _TEXT),
        st.builds(
            lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls}, _TEXT | st.none(), _CALLS
        ),
        st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, _TEXT),
    ),
    max_size=8,
).map(lambda given: [*given, *HELLO])
_FIELDS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 100), "model": st.just("m"), "messages": _MESSAGES},
    optional={
        "temperature": st.floats(0, 1),
        "stop": st.lists(_TEXT, max_size=2) | _TEXT,
        "stream": st.booleans(),
        "tools": st.lists(st.just(TOOL), max_size=2),
        "parallel_tool_calls": st.booleans(),
        "user": _TEXT,
        "service_tier": st.sampled_from(["auto", "default"]),
        "reasoning_effort": st.sampled_from(["none", "low", "medium", "high", "xhigh", "max"]),
    },
)


_FORMS: Mapping[bool, TypeAdapter[Any]] = {
    True: TypeAdapter(MessageCreateParamsStreaming),
    False: TypeAdapter(MessageCreateParamsNonStreaming),
}


@given(_FIELDS)
def test_bodies_have_the_form_that_the_official_client_sends(body: dict[str, Any]) -> None:
    made = messages_body(body)
    allowed = get_type_hints(MessageCreateParamsStreaming).keys() | {"temperature", "top_p", "top_k"}
    assert made.keys() <= allowed
    _FORMS[bool(made.get("stream"))].validate_python(made)
    assert body == json.loads(json.dumps(body))  # nothing of the body was changed


@given(_MESSAGES)
def test_every_text_and_every_call_goes_out_once_and_in_order(conversation: list[dict[str, Any]]) -> None:
    body = messages(*conversation)
    blocks: list[Any] = []
    for message in body["messages"]:
        content = message["content"]
        blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    expected: list[str] = []
    for message in conversation:
        content = message["content"]
        if message["role"] in ("user", "assistant") and isinstance(content, str):
            expected += [content] if content or not message.get("tool_calls") else []
        elif message["role"] == "user":
            expected += [part["text"] for part in content if part["type"] == "text"]
    assert texts == expected
    calls = [call for message in conversation for call in message.get("tool_calls", [])]
    used = [block for block in blocks if block["type"] == "tool_use"]
    assert [(use["name"], use["input"]) for use in used] == [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]
    results = [block["content"] for block in blocks if block["type"] == "tool_result"]
    assert results == [message["content"] for message in conversation if message["role"] == "tool"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(TAKEN | DROPPED | {"n", "seed", "priority", "made_up"})), _JSON))
def test_nothing_but_a_refusal_is_raised(body: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        messages_body({"max_tokens": 1, "messages": HELLO} | body)


def test_what_is_marked_is_cached_with_all_before_it() -> None:
    def part(name: str, **more: Any) -> dict[str, Any]:
        return {"type": "text", "text": name, **more}

    mark = {"cache_control": {"type": "ephemeral"}}
    plain: list[dict[str, Any]] = [{"content": "Be brief."}, {"role": "user", "content": [part("a"), part("b")]}]
    assert cached_prefixes({}, plain) == []
    assert cached_prefixes({"cache_control": None}, plain) == []
    assert cached_prefixes(mark, plain) == [([], plain, False)]
    system = [part("Be brief.", **mark)]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [part("r", **mark)]}
    marked: list[dict[str, Any]] = [{"content": system}, {"role": "user", "content": [part("a"), result, part("b")]}]
    assert [each.messages for each in cached_prefixes({}, marked)] == [
        [{"content": system}],
        [{"content": system}, {"role": "user", "content": [part("a"), result]}],
    ]
    assert cached_prefixes(mark, marked)[2].messages == marked


def test_tools_come_before_what_is_cached_and_a_mark_may_ask_for_an_hour() -> None:
    hourly = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools: list[dict[str, Any]] = [{"type": "function", **hourly}, {"type": "function"}]
    text = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    assert cached_prefixes({"tools": tools}, messages) == [(tools[:1], (), True), (tools, messages, False)]
    assert cached_prefixes({"tools": tools[1:], **hourly}, messages)[-1] == (tools[1:], messages, True)
