"""Lines of batch inputs: OpenAI's codes for what is wrong with their frame, and that nothing is raised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InvalidRequest
from batchwright.lines.batch_line import BatchLine, check_batch_line, decode_line
from batchwright.wire.requests import CHAT_URL, EMBEDDINGS_URL, RESPONSES_URL

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 99}
LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": BODY}


def parse(value: Any) -> BatchLine | InvalidRequest:
    try:
        return check_batch_line(decode_line(value if isinstance(value, bytes) else json.dumps(value).encode()))
    except InvalidRequest as error:
        return error


def test_only_the_frame_is_checked() -> None:
    assert parse(LINE) == BatchLine("a", CHAT_URL, BODY)
    assert parse(LINE | {"url": EMBEDDINGS_URL, "body": {}}) == BatchLine("a", EMBEDDINGS_URL, {})
    assert parse(LINE | {"url": RESPONSES_URL}) == BatchLine("a", RESPONSES_URL, BODY)
    assert parse(b"\xef\xbb\xbf" + json.dumps(LINE).encode()) == BatchLine("a", CHAT_URL, BODY)
    assert parse(LINE | {"body": BODY | {"stream": False}}) == BatchLine("a", CHAT_URL, BODY | {"stream": False})


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
        ([1], "invalid_json_line", None),
        ({}, "missing_required_parameter", "custom_id"),
        ({"custom_id": "a"}, "missing_required_parameter", "method"),
        ({"custom_id": "a", "method": "POST"}, "missing_required_parameter", "url"),
        (LINE | {"body": None}, "missing_required_parameter", "body"),
        (LINE | {"custom_id": 5}, "invalid_type", "custom_id"),
        (LINE | {"custom_id": ""}, "invalid_custom_id", "custom_id"),
        (LINE | {"custom_id": "a\0"}, "invalid_custom_id", "custom_id"),
        (LINE | {"custom_id": "a" * 513}, "invalid_custom_id", "custom_id"),
        (LINE | {"method": "GET"}, "invalid_method", "method"),
        (LINE | {"url": "/v1/messages"}, "invalid_url", "url"),
        (LINE | {"url": {"a": 1}}, "invalid_url", "url"),
        (LINE | {"body": []}, "invalid_type", "body"),
        (LINE | {"body": BODY | {"stream": True}}, "invalid_request", "body.stream"),
        (LINE | {"body": BODY | {"model": 5}}, "invalid_type", "body.model"),
        (LINE | {"body": BODY | {"model": ""}}, "invalid_type", "body.model"),
    ],
)
def test_what_is_wrong_with_a_line(value: Any, code: str, param: str | None) -> None:
    error = parse(value)
    assert isinstance(error, InvalidRequest)
    assert (error.code, error.param) == (code, param)
    assert len(str(error)) < 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_whatever_the_bytes_the_error_is_the_same_class(content: bytes) -> None:
    assert isinstance(parse(content), InvalidRequest)


@given(
    st.fixed_dictionaries({
        "custom_id": st.just("a") | json_values, "method": st.just("POST") | json_values,
        "url": st.just(CHAT_URL) | json_values,
        "body": json_values | st.dictionaries(st.sampled_from(["model", "stream", "messages"]), json_values),
    })
)  # fmt: skip
def test_whatever_the_fields_the_error_is_the_same_class(line: dict[str, Any]) -> None:
    parse(line)
