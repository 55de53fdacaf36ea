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

from batchwright.errors import InvalidRequest
from batchwright.jobs.lines import BadLine, Line, LineParser
from batchwright.jobs.sources import Record
from batchwright.jobs.template import PromptTemplate
from batchwright.request import SamplingParams
from batchwright.wire.fields import sampling_overrides

SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}
DEFAULTS = SamplingParams(max_tokens=17, temperature=0.0)
MESSAGES = [{"role": "user", "content": "Hello"}]


def parse(value: Any, *, chat: bool = False, system: str | None = None) -> Line | BadLine:
    parser = LineParser("jsonl", DEFAULTS, chat=chat, system=system)
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


def test_forms_and_their_answers() -> None:
    assert good({"prompt": "Hi"}) == Line(7, None, False, ("Hi",), DEFAULTS)
    assert good({"messages": MESSAGES, "id": 12}) == Line(7, "12", True, (MESSAGES,), DEFAULTS)
    assert good({"prompt": [5, 6], "custom_id": "x"}) == Line(7, "x", False, ([5, 6],), DEFAULTS)
    assert good({"prompt": ["a", "b"]}).prompts == ("a", "b")
    assert good({"prompt": [[1], [2, 3]]}).prompts == ([1], [2, 3])
    assert good(batch({"messages": MESSAGES})) == Line(7, "a", True, (MESSAGES,), DEFAULTS)
    assert good(batch({"prompt": "Hi"}, "/v1/completions")) == Line(7, "a", False, ("Hi",), DEFAULTS)


def test_chat_makes_plain_prompts_into_chats() -> None:
    line = good({"prompt": "Hi"}, chat=True, system="Be brief.")
    assert line.chat
    assert line.prompts == ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],)
    assert not good({"prompt": [1, 2]}, chat=True).chat
    assert not good(batch({"prompt": "Hi"}, "/v1/completions"), chat=True).chat


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert good({"messages": [{"role": "user", "content": parts}]}).prompts == ([{"role": "user", "content": "ab"}],)


def test_sampling_fields() -> None:
    body = {
        "messages": MESSAGES, "model": "gpt-4o", "max_tokens": 5, "max_completion_tokens": 6, "temperature": 1,
        "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 1, "min_tokens": 2,
        "frequency_penalty": -1, "logit_bias": {"42": -100}, "seed": 9, "stop": "x", "stop_token_ids": [3], "n": 2,
        "logprobs": True, "top_logprobs": 4, "ignore_eos": True, "user": "u", "stream": False, "tools": [],
        "response_format": {"type": "text"}, "priority": 1, "store": True, "top": None,
    }  # fmt: skip
    line = good(batch(body))
    assert line.priority == 1
    assert line.params == SamplingParams(
        max_tokens=6, temperature=1, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.1, presence_penalty=1,
        frequency_penalty=-1, logit_bias={42: -100}, seed=9, stop=("x",), stop_token_ids=(3,), n=2, logprobs=4,
        ignore_eos=True, min_tokens=2,
    )  # fmt: skip
    assert good({"messages": MESSAGES, "logprobs": True}).params.logprobs == 0
    assert good({"prompt": "x", "logprobs": 3}).params.logprobs == 3
    assert good({"prompt": "x", "logprobs": False, "stop": ["a", "b"]}).params.stop == ("a", "b")


def test_null_means_not_set() -> None:
    assert good({"prompt": "x", "temperature": None, "seed": None, "tools": None, "id": None}).params is DEFAULTS


def test_columns_of_ones_own_are_ignored_in_simple_lines() -> None:
    assert good({"prompt": "x", "category": "q", "label": 3}).params is DEFAULTS


def test_columns_called_as_batch_fields_do_not_make_a_batch_line() -> None:
    assert good({"id": 1, "url": "http://x", "method": "GET", "prompt": "a"}).prompts == ("a",)
    assert good({"url": "http://x", "messages": MESSAGES}).chat


def test_deadlines() -> None:
    assert good({"prompt": "a"}).deadline is None
    assert good({"prompt": "a", "deadline": 2}).request(0, "r").deadline == 2.0
    assert good({"prompt": "a", "deadline_ms": 250}).request(0, "r").deadline == 0.25
    assert good(batch({"messages": MESSAGES, "deadline_ms": 1500})).request(0, "r").deadline == 1.5


@pytest.mark.parametrize(
    ("value", "code", "says"),
    [
        (b"{", "invalid_json", "not JSON"),
        (b"[1]", "invalid_json", "list"),
        (b"[" * 100_000, "invalid_json", "not JSON"),
        (b'{"prompt": "\xff"}', "invalid_encoding", "UTF-8"),
        (b'{"prompt": "\\ud800"}', "invalid_json", "not JSON"),
        ({}, "missing_field", "no prompt"),
        ({"prompt": None}, "invalid_request", "prompt must be"),
        ({"prompt": []}, "invalid_request", "prompt must be"),
        ({"prompt": ["a", 1]}, "invalid_request", "prompt must be"),
        ({"prompt": [-1]}, "invalid_request", "prompt must be"),
        ({"prompt": "a", "messages": MESSAGES}, "invalid_request", "both"),
        ({"messages": []}, "invalid_request", "messages must be"),
        ({"messages": [{"content": "x"}]}, "invalid_request", r"messages[0]"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_parameter",
            "image_url",
        ),
        ({"prompt": "a", "id": ""}, "invalid_request", "id must be"),
        ({"prompt": "a", "id": 1.5}, "invalid_request", "id must be"),
        ({"prompt": "a", "temperature": 99}, "invalid_request", "temperature"),
        ({"prompt": "a", "temperature": "1"}, "invalid_request", "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"prompt": "a", "max_token": 5}, "unknown_parameter", "did you mean max_tokens?"),
        ({"prompt": "a", "seed": 10**30}, "invalid_request", "seed"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "invalid_json", ""),
        ({"prompt": "a", "stop": 5}, "invalid_request", "stop"),
        ({"prompt": "a", "stop_token_ids": 5}, "invalid_request", "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "invalid_request", "logit_bias"),
        ({"prompt": "a", "logit_bias": [1]}, "invalid_request", "logit_bias"),
        ({"prompt": "a", "top_logprobs": 1}, "invalid_request", "top_logprobs"),
        ({"messages": MESSAGES, "top_logprobs": 1}, "invalid_request", "logprobs: true"),
        ({"messages": MESSAGES, "logprobs": 3}, "invalid_request", "top_logprobs"),
        ({"prompt": "a", "priority": "high"}, "invalid_request", "priority"),
        ({"prompt": "a", "deadline": "soon"}, "invalid_request", "deadline must be a number of seconds above 0"),
        ({"prompt": "a", "deadline_ms": 0}, "invalid_request", "deadline_ms must be a number of milliseconds"),
        ({"prompt": "a", "deadline_ms": 10**400}, "invalid_request", "deadline_ms"),
        ({"prompt": "a", "deadline_ms": 1, "deadline": 1}, "invalid_request", "both deadline and deadline_ms"),
        ({"prompt": "a", "stream": True}, "unsupported_parameter", "stream"),
        ({"prompt": "a", "echo": True}, "unsupported_parameter", "echo"),
        ({"prompt": "a", "suffix": "z"}, "unsupported_parameter", "suffix"),
        ({"prompt": "a", "best_of": 2}, "unsupported_parameter", "best_of"),
        (batch({"messages": MESSAGES, "tools": [{"type": "function"}]}), "unsupported_parameter", "tools"),
        (batch({"messages": MESSAGES, "functions": [{}]}), "unsupported_parameter", "functions"),
        (
            batch({"messages": MESSAGES, "response_format": {"type": "json_object"}}),
            "unsupported_parameter",
            "response_format",
        ),
        (batch({"messages": MESSAGES, "made_up": 1}), "unknown_parameter", "made_up"),
        (batch({"messages": MESSAGES, "prompt": "x"}), "unknown_parameter", "prompt"),
        (batch({}), "missing_field", "messages"),
        (batch({"prompt": "x"}, "/v1/embeddings"), "unsupported_url", "/v1/embeddings"),
        (batch({"messages": MESSAGES}, method="GET"), "invalid_request", "POST"),
        (batch([]), "invalid_request", "body"),
        ({"method": "POST", "custom_id": "a", "url": "/v1/completions"}, "missing_field", "body"),
        ({"method": "POST", "url": "/v1/completions", "body": {}}, "missing_field", "custom_id"),
    ],
)  # fmt: skip
def test_what_is_refused_and_how(value: Any, code: str, says: str) -> None:
    line = bad(value)
    assert line.error.code == code
    assert says in str(line.error)
    assert len(str(line.error)) < 600


def test_a_bad_line_keeps_its_id() -> None:
    assert bad({"id": "mine", "prompt": "a", "n": 0}).custom_id == "mine"


def test_a_table_needs_a_value_in_each_column_of_the_template() -> None:
    parser = LineParser("csv", DEFAULTS, PromptTemplate.parse("{{{a}}}: {b}"), max_line_bytes=20)
    line = parser.parse(Record(2, {"a": "x", "b": 3, "id": "k", "c": None}))
    assert isinstance(line, Line)
    assert (line.prompts, line.custom_id) == (("{x}: 3",), "k")
    missing = parser.parse(Record(3, {"a": "x", "b": None, "id": ""}))
    assert isinstance(missing, BadLine)
    assert (missing.error.code, missing.custom_id) == ("missing_field", None)
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


@settings(max_examples=300)
@given(st.binary(max_size=60) | likely_line(json_values).map(lambda value: msgspec.json.encode(value)))
def test_any_bytes_are_a_line_or_an_error_line(content: bytes) -> None:
    line = LineParser("jsonl", DEFAULTS).parse(Record(3, content))
    assert line.number == 3
    if isinstance(line, Line):
        for index in range(len(line.prompts)):
            line.request(index, "r")
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
    with pytest.raises(Exception, match="prompt template"):
        PromptTemplate.parse(text)
