"""The OpenAPI description of a request body agrees with the reader of the body about each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from batchwright.errors import InvalidRequest
from batchwright.server.routes.openapi_answers import (
    ChatBody,
    ClassifyBody,
    CompletionBody,
    EmbeddingsBody,
    RerankBody,
    ResponseBody,
    ScoreBody,
)
from batchwright.wire import bounds, fields
from batchwright.wire.classifying import read_classify, read_rerank, read_score
from batchwright.wire.requests import ROLES, read_embeddings, read_generation
from batchwright.wire.text_responses import chat_of_response

HELLO = {"role": "user", "content": "Hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


TOOL = {"type": "function", "function": {"name": "f"}}


FUNCTION = {"type": "function", "name": "f"}


class Form:
    """A kind of body: its description, its reader and what it must have."""

    def __init__(self, model: Any, needed: Mapping[str, Any], read: Callable[[Mapping[str, Any]], object]) -> None:
        schema = TypeAdapter(model).json_schema()
        self.needed = needed
        self.names = sorted(schema["properties"])
        self._schema = jsonschema_rs.Draft202012Validator(schema)
        self._read = read

    def assert_agrees(self, body: Mapping[str, Any]) -> None:
        try:
            self._read(body)
        except InvalidRequest as error:
            told: str | None = str(error)
        else:
            told = None
        is_valid = self._schema.is_valid(body)
        assert is_valid == (told is None) or (not is_valid and _has_schema_as_text(body)), (body, told)


def _has_schema_as_text(body: Mapping[str, Any]) -> bool:
    """Whether a JSON Schema is given as text, which vLLM's clients may do, and is not described."""
    form = body.get("structured_outputs")
    return any(isinstance(each, str) for each in (body.get("guided_json"), isinstance(form, dict) and form.get("json")))


FORMS = {
    "chat": Form(ChatBody, {"messages": [HELLO]}, lambda body: read_generation(body, chat=True)),
    "completion": Form(CompletionBody, {"prompt": "a"}, lambda body: read_generation(body, chat=False)),
    "embeddings": Form(EmbeddingsBody, {"input": "a"}, read_embeddings),
    "responses": Form(ResponseBody, {"input": "a"}, lambda body: read_generation(chat_of_response(body), chat=True)),
    "rerank": Form(RerankBody, {"query": "a", "documents": ["b"]}, read_rerank),
    "score": Form(ScoreBody, {"text_1": "a", "text_2": "b"}, read_score),
    "classify": Form(ClassifyBody, {"input": "a"}, read_classify),
}

FUNCTION_FIELDS: list[dict[str, Any]] = [
    {}, {"type": "web_search"}, {"name": None}, {"name": "f" * 65}, {"parameters": []}, {"parameters": None},
    {"description": "d", "parameters": {"type": "object"}, "strict": True}, {"strict": 1}, {"x": 1},
    {"defer_loading": False, "y": None},
]  # fmt: skip
EDGES: list[Any] = [
    None, True, False, -101, -100, -2, -1, 0, 1, 2, 3, 10, 11, 20, 21, 100, 101, 128, 129, 0.001, 0.5, 1.5, -0.5, 2.5,
    2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 1e12 + 0.5, 1e15 + 0.5,
    "", "a", "m" * 256, "m" * 257, "u" * 512, "u" * 513, "a\0b", "none", "auto", "float", "base64",
    [], ["a"], [""], ["a"] * 16, ["a"] * 17, ["a" * 256], ["a" * 257], [1], [-1], [1] * 256, [1] * 257, ["a", 1],
    [None], [[1], [2]], [[]], ["a"] * 2048, ["a"] * 2049, [1.5], [2**31], [True], ["text"], {},
    {"a": "b"}, {"a": 1}, {"5": 1}, {"5": 101}, {"5": "x"}, {str(key): 0 for key in range(1024)},
    {str(key): 0 for key in range(1025)}, {"12345678901": 1}, {"k" * 65: "v"}, {"k": "v" * 513}, {"type": "text"},
    dict.fromkeys(map(str, range(16)), "v"), dict.fromkeys(map(str, range(17)), "v"), {"include_usage": True},
    {"include_usage": 1}, [HELLO], [HELLO] * 2049, TOOL, "required", "low", "minimal", {"enable_thinking": False},
    {"enable_thinking": 1}, {"thinking": True, "thinking_budget": 5}, {"thinking_budget": True}, [{"type": "function"}],
    *([{"type": kind, "function": {"name": name, **more}}] for kind, name, more in (
        ("function", "f", {}), ("function", "a-Z_0.", {"description": None, "parameters": {"type": "object"}}),
        ("function", "", {}), ("function", "f" * 64, {}), ("function", "f" * 65, {}), ("function", "f\n", {}),
        ("custom", "f", {}), ("function", "f", {"parameters": []}), ("function", "f", {"description": 1}),
        ("function", "f", {"strict": True, "x": 1}), ("function", "f", {"strict": 1}), ("function", 5, {}))),
    FUNCTION, {"effort": "low"}, {"effort": "x"}, {"effort": None, "summary": None}, {"summary": "auto"},
    *({"format": form} for form in (
        None, {}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "xml"}, "text",
        {"type": "json_schema", "schema": []}, {"type": "json_schema", "name": "a", "schema": {"type": "object"}})),
    {"format": {"type": "text"}, "verbosity": "low"}, {"verbosity": None},
    *([{**FUNCTION, **more}] for more in FUNCTION_FIELDS),
    [FUNCTION] * 129,
]  # fmt: skip
ARGUMENTS: list[Any] = ["{", {}, None, 5]
MESSAGES: list[Any] = [
    *({"role": role, "content": "a"} for role in (*ROLES, "x", 5)), {}, "a", None,
    {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": 5}, {"content": "a"},
    {"role": "user", "content": []}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": [{"type": "image", "text": "a"}]},
    {"role": "user", "content": ["a"]}, {**HELLO, "name": "n" * 64}, {**HELLO, "name": "n" * 65}, {**HELLO, "name": 5},
    {**HELLO, "name": None}, {**HELLO, "k" * 64: 1}, {**HELLO, "k" * 65: 1}, {**HELLO, "tool_calls": 5},
    {"role": "assistant", "tool_calls": [{}]}, {"role": "assistant", "tool_calls": []},
    {"role": "assistant", "tool_calls": [CALL]}, {**HELLO, "role": "assistant", "tool_calls": [CALL]},
    *({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]} for value in ARGUMENTS),
    {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL] * 129}, {**HELLO, "tool_call_id": "i" * 513},
    {"role": "assistant", "function_call": {"name": "f"}}, {"role": "assistant", "function_call": {}},
    {**HELLO, **dict.fromkeys(map(str, range(30)))}, {**HELLO, **dict.fromkeys(map(str, range(31)))},
]  # fmt: skip

TEXT = {"type": "input_text", "text": "a"}
_ITEMS: list[tuple[Any, tuple[str, ...], list[tuple[Any, ...]]]] = [
    ("function_call", ("call_id", "name", "arguments"), [
        ("c", "f", "{}"), ("c", "f", ""), ("c", "f", {}), ("c", None, "{}"), (None, "f", "{}"), ("", "f", "{}"),
        ("c" * 512, "", "{"), ("c" * 513, "f", "{}"),
    ]),
    ("function_call_output", ("call_id", "output"), [
        ("c", "5"), ("c", ""), ("c", [TEXT]), ("c", []), ("c", [{"type": "input_image"}]), ("c", None), ("c", 5),
        (5, "5"), ("c" * 513, "5"),
    ]),
    ("reasoning", ("content", "summary", "encrypted_content"), [
        (None, [], None), ([{"type": "reasoning_text", "text": "a"}], [], None), ([], [{"text": "a"}], None),
        (None, [{"type": "summary_text", "text": "a"}], None), ([TEXT], [], None), ([], [], "gAAA"), (5, [], None),
        ("a", [], None),
    ]),
    ("message", ("role", "content"), [("user", [TEXT]), ("tool", "a"), ("assistant", None)]),
    ("item_reference", (), [()]),
    (None, (), [()]),
]  # fmt: skip
ITEMS = [{"type": kind, **dict(zip(names, values, strict=True))} for kind, names, some in _ITEMS for values in some]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e6, 1e6).filter(lambda x: not x.is_integer()) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("form", FORMS)
def test_of_each_field_at_its_edges(form: str) -> None:
    kind = FORMS[form]
    longest = "max_output_tokens" if form == "responses" else "max_tokens"
    tools: dict[str, dict[str, Any]] = {"chat": {"tools": [TOOL]}, "responses": {"tools": [FUNCTION]}}
    for name in kind.names:
        # Fields without which this one is refused for another's sake.
        besides: dict[str, dict[str, Any]] = {
            "min_tokens": {longest: 2**31 - 1},
            "top_logprobs": {"logprobs": True} if form == "chat" else {},
            "tool_choice": tools.get(form, {}),
        }
        beside = besides.get(name, {})
        for value in EDGES:
            if form == "score" and name == "text_1" and isinstance(value, list) and len(value) > 1:
                continue  # there must be as many of the other
            kind.assert_agrees({**kind.needed, **beside, name: value})
    kind.assert_agrees({})
    kind.assert_agrees({**kind.needed, "top_logprobs": 1})
    kind.assert_agrees({**kind.needed, "text": {"format": {"type": "text"}}})
    kind.assert_agrees({**kind.needed, "unheard_of": 1})
    kind.assert_agrees({**kind.needed, **dict.fromkeys(map(str, range(127)))})
    kind.assert_agrees({**kind.needed, **dict.fromkeys(map(str, range(128)))})


@pytest.mark.parametrize("message", MESSAGES)
def test_of_messages(message: Any) -> None:
    FORMS["chat"].assert_agrees({"messages": [HELLO, message]})


@pytest.mark.parametrize("item", ITEMS)
def test_of_items(item: Any) -> None:
    FORMS["responses"].assert_agrees({"input": [HELLO, item]})


@settings(max_examples=300)
@given(form=st.sampled_from(sorted(FORMS)), data=st.data())
def test_of_any_value(form: str, data: st.DataObject) -> None:
    kind = FORMS[form]
    name = data.draw(st.sampled_from(sorted({*kind.names, "x"} - {"min_tokens"})))
    kind.assert_agrees({**kind.needed, name: data.draw(json_values)})


def test_every_field_that_is_taken_is_described() -> None:
    described = {name for form in FORMS.values() for name in form.names}
    assert described >= fields.RANGES.keys() | fields.IGNORED.keys() | fields.REFUSED.keys()
    assert bounds._BOUNDS.keys() <= described
