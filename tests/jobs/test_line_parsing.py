"""Records become lines of work or error lines: the forms, the fields, and that nothing raises."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.errors import InvalidRequest
from batchwright.jobs.lines import BadLine, Line, LineParser
from batchwright.jobs.sources import Record
from batchwright.jobs.templates import Templates
from batchwright.request import SamplingParams
from batchwright.wire.fields import sampling_overrides
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL, read_generation

SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}
MESSAGES = [{"role": "user", "content": "Hello"}]


def parse(value: Any, *, chat: bool = False, system: str | None = None) -> Line | BadLine:
    parser = LineParser("jsonl", chat=chat, system=system)
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parser.parse(Record(7, content))


def good(value: Any, **options: Any) -> Line:
    line = parse(value, **options)
    assert isinstance(line, Line), line
    return line


def bad(value: Any, **options: Any) -> BadLine:
    line = parse(value, **options)
    assert isinstance(line, BadLine), line
    assert line.number == 7
    return line


def batch(body: object, url: str = "/v1/chat/completions", **rest: object) -> dict[str, object]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body} | rest


def test_forms_and_their_bodies() -> None:
    assert good({"prompt": "Hi"}) == Line(7, None, COMPLETION_URL, {"prompt": "Hi"})
    assert good({"messages": MESSAGES, "id": 12}) == Line(7, "12", CHAT_URL, {"messages": MESSAGES})
    assert good({"prompt": [5, 6], "custom_id": "x"}) == Line(7, "x", COMPLETION_URL, {"prompt": [5, 6]})
    for url in (CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL):
        body = {"anything": 1}
        assert good(batch(body, url)) == Line(7, "a", url, body)


def test_chat_makes_plain_prompts_into_chats() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    line = good({"prompt": "Hi", "n": 2}, chat=True, system="Be brief.")
    assert (line.endpoint, line.body) == (CHAT_URL, {"messages": messages, "n": 2})
    assert good({"prompt": [1, 2]}, chat=True).endpoint == COMPLETION_URL
    assert good(batch({"prompt": "Hi"}, COMPLETION_URL), chat=True).endpoint == COMPLETION_URL


def test_columns_of_ones_own_are_left_out_of_the_body_and_a_model_is_not() -> None:
    line = good({"prompt": "x", "category": "q", "label": 3, "user": 5, "model": "gpt", "seed": None, "tools": []})
    assert line.body == {"prompt": "x", "model": "gpt", "seed": None, "tools": []}


def test_columns_called_as_batch_fields_do_not_make_a_batch_line() -> None:
    assert good({"id": 1, "url": "http://x", "method": "GET", "prompt": "a"}).body == {"prompt": "a"}
    assert good({"url": "http://x", "messages": MESSAGES}).endpoint == CHAT_URL


def test_the_endpoint_is_told_without_a_check() -> None:
    parser = LineParser("jsonl")
    assert parser.endpoint_of(Record(1, json.dumps(batch({}, EMBEDDINGS_URL)).encode())) == EMBEDDINGS_URL
    simple = json.dumps({"url": EMBEDDINGS_URL, "prompt": "x"}).encode()
    for content in (
        b"{",
        b"[1]",
        b'{"url": 5}',
        simple,
        json.dumps(batch({})).encode(),
        InvalidRequest("long"),
        {"a": 1},
    ):
        assert parser.endpoint_of(Record(1, content)) == COMPLETION_URL


@pytest.mark.parametrize(
    ("value", "code", "says"),
    [
        (b"{", "invalid_json_line", "not parseable"),
        (b"[1]", "invalid_json_line", "array"),
        (b"[" * 100_000, "invalid_json_line", "not parseable"),
        (b'{"prompt": "\xff"}', "invalid_json_line", "byte 13 is not UTF-8"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "invalid_json_line", ""),
        ({}, "missing_required_parameter", "no prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "invalid_request", "both"),
        ({"prompt": "a", "id": ""}, "invalid_custom_id", "id has 0 characters"),
        ({"prompt": "a", "id": 1.5}, "invalid_type", "id must be"),
        ({"prompt": "a", "id": True}, "invalid_type", "id must be"),
        ({"prompt": "a", "custom_id": "x" * 513}, "invalid_custom_id", "513"),
        ({"prompt": "a", "max_token": 5}, "unknown_parameter", "did you mean max_tokens?"),
        (batch({}, "/v1/messages"), "invalid_url", "/v1/messages"),
        (batch({"messages": MESSAGES}, method="GET"), "invalid_method", "POST"),
        (batch([]), "invalid_type", "body"),
        ({"method": "POST", "custom_id": "a", "url": "/v1/completions"}, "missing_required_parameter", "body"),
        ({"method": "POST", "url": "/v1/completions", "body": {}}, "missing_required_parameter", "custom_id"),
    ],
)  # fmt: skip
def test_what_is_refused_and_how(value: Any, code: str, says: str) -> None:
    line = bad(value)
    assert line.error.code == code
    assert says in str(line.error)
    assert len(str(line.error)) < 600


def test_a_bad_line_keeps_its_id() -> None:
    assert bad({"id": "mine", "prompt": "a", "messages": []}).custom_id == "mine"
    assert bad(batch([])).custom_id == "a"
    assert bad(batch([], custom_id="x" * 513)).custom_id is None


def test_cells_without_a_value_are_empty_text() -> None:
    parser = LineParser("csv", Templates.of("{{{a}}}: {b}", None, None), "id", max_line_bytes=20)
    line = parser.parse(Record(2, {"a": "x", "b": 3, "id": "k", "c": None}))
    assert isinstance(line, Line)
    assert (line.body, line.custom_id) == ({"prompt": "{x}: 3"}, "k")
    for empty in (None, ""):
        half = parser.parse(Record(3, {"a": "x", "b": empty, "id": empty}))
        assert isinstance(half, Line)
        assert (half.body, half.custom_id) == ({"prompt": "{x}: "}, None)
        missing = parser.parse(Record(3, {"a": None, "b": empty, "id": 7}))
        assert isinstance(missing, BadLine)
        assert (missing.error.code, missing.custom_id) == ("missing_field", "7")
    long = parser.parse(Record(4, {"a": "x" * 20, "b": b"y"}))
    assert isinstance(long, BadLine)
    assert long.error.code == "line_too_long"


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4)
)
json_values = scalars | st.lists(scalars, max_size=3)
names = st.sampled_from([
    "prompt", "messages", "id", "custom_id", "method", "url", "body", "temperature", "max_tokens", "stop", "n", "seed",
    "logit_bias", "logprobs", "top_logprobs", "stop_token_ids", "tools", "stream", "priority", "top_k", "min_tokens",
    "deadline", "deadline_ms",
])  # fmt: skip


def likely_line(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    known = st.sampled_from(
        ["POST", "/v1/completions", "/v1/chat/completions", "text", MESSAGES, [1, 2], {"prompt": "x"}]
    )
    body = st.dictionaries(names, values | known, max_size=4)
    return st.dictionaries(names, values | known | body, max_size=6)


@settings(max_examples=examples(100, long=300))
@given(st.binary(max_size=60) | likely_line(json_values).map(lambda value: msgspec.json.encode(value)))
def test_any_bytes_are_a_line_or_an_error_line(content: bytes) -> None:
    line = LineParser("jsonl").parse(Record(3, content))
    assert line.number == 3
    if isinstance(line, Line):
        if line.endpoint != EMBEDDINGS_URL:
            with suppress(InvalidRequest):
                read_generation(line.body, chat=line.endpoint == CHAT_URL)
    else:
        assert line.error.code
        msgspec.json.encode(str(line.error))


@given(likely_line(json_values))
def test_fields_are_translated_or_refused(body: dict[str, Any]) -> None:
    for chat in (False, True):
        with suppress(InvalidRequest):
            assert sampling_overrides(body, chat=chat).keys() <= SAMPLING_FIELDS


@pytest.mark.parametrize("text", ["plain", "{}", "{a!r}", "{a:>3}", "{a", "a}", "{{a}}"])
def test_templates_that_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="template"):
        Templates.of(text, None, None)
