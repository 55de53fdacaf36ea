"""The form that bodies ask for, as OpenAI's clients and vLLM's say it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchwright.errors import InvalidRequest
from batchwright.request import SamplingParams
from batchwright.wire.anthropic_requests import messages_body
from batchwright.wire.identity import identity_of
from batchwright.wire.requests import CHAT_URL, RESPONSES_URL, filled, read_generation

MESSAGES = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


def read(defaults: Any = None, **fields: Any) -> SamplingParams:
    return read_generation({"messages": MESSAGES, **fields}, chat=True, defaults=defaults).params(100)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_object", "schema": {"required": ["a"]}}},
            {"schema": {"type": "object", "required": ["a"]}},
        ),
        ({"response_format": NAMED}, {"schema": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choices": ("a", "b")}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"json_object": False}}, {}),
        ({"guided_json": SCHEMA}, {"schema": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"schema": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choices": ("a",)}),
        ({"guided_grammar": 'start: "a"', "guided_json": None}, {"grammar": 'start: "a"'}),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, {"regex": "a+"}),
    ],
)
def test_each_way_to_say_it(fields: dict[str, Any], form: dict[str, Any]) -> None:
    assert (
        read(**fields) == read() == read()
        if not form
        else read(**fields) == SamplingParams(temperature=1.0, max_tokens=100, **form)
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_json": "x"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None}}, "structured_outputs"),
        ({"response_format": {**NAMED, "json_schema": {"schema": "{}"}}}, "response_format.json_schema.schema"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_json": {"a": "x" * 300_000}}, "guided_json"),
    ],
)
def test_what_is_no_form_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_two_forms_are_refused_by_both_names() -> None:
    with pytest.raises(InvalidRequest, match=r"response_format and structured_outputs\.regex are given together"):
        read(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json and structured_outputs\.regex"):
        read(structured_outputs={"json": SCHEMA, "regex": "a"})


def test_a_line_that_asks_for_a_form_has_that_and_not_the_jobs() -> None:
    defaults = SamplingParams(choices=("a", "b"), temperature=0)
    assert read(defaults).choices == ("a", "b")
    assert read(defaults, guided_regex="x").constraint == SamplingParams(regex="x").constraint
    assert read(defaults, response_format={"type": "text"}).constraint is None


@pytest.mark.parametrize(
    ("defaults", "sent"),
    [
        (SamplingParams(temperature=1, schema=SCHEMA), {"response_format": {"type": "json_schema", "json_schema": {
            "name": "answer", "schema": SCHEMA, "strict": True}}}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
        ({"regex": "a"}, {"structured_outputs": {"regex": "a"}}),
        ({"choices": ("a", "b")}, {"structured_outputs": {"choice": ("a", "b")}}),
    ],
)  # fmt: skip
def test_an_endpoint_is_sent_its_own_fields(defaults: Any, sent: dict[str, Any]) -> None:
    body = filled(CHAT_URL, {"messages": MESSAGES}, defaults)
    assert {name: value for name, value in body.items() if name not in ("messages", "max_tokens")} == sent
    own = filled(CHAT_URL, {"messages": MESSAGES, "response_format": {"type": "text"}}, defaults)
    assert "structured_outputs" not in own
    assert own["response_format"] == {"type": "text"}


def test_responses_and_anthropic_have_fields_of_their_own_for_a_schema() -> None:
    body = filled(RESPONSES_URL, {"input": "x"}, {"schema": SCHEMA})
    assert body["text"]["format"] == {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    chat = filled(CHAT_URL, {"messages": MESSAGES, "max_tokens": 5}, {"schema": SCHEMA})
    assert messages_body(chat)["output_config"]["format"]["schema"] == SCHEMA
    with pytest.raises(InvalidRequest, match="guided_regex"):
        messages_body({"messages": MESSAGES, "max_tokens": 5, "guided_regex": "a"})


def test_requests_of_different_forms_are_different() -> None:
    body = {"messages": MESSAGES, "temperature": 0}
    ids = [identity_of(CHAT_URL, body, form) for form in ({}, {"regex": "a"}, {"regex": "b"}, {"schema": SCHEMA})]
    assert len(set(ids)) == 4
