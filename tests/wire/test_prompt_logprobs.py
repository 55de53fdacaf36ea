"""Log-probabilities of prompts in bodies: `echo` in OpenAI's form, `prompt_logprobs` in vLLM's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from batchwright.errors import InvalidRequest
from batchwright.request import Choice, InferenceResponse, SamplingParams, TokenLogprob, Usage
from batchwright.wire.bounds import MAX_LOGPROBS
from batchwright.wire.requests import read_generation
from batchwright.wire.responses import Echo, Head, completion_body

MESSAGES = [{"role": "user", "content": "Hello"}]


def read(chat: bool = False, **fields: Any) -> Any:
    return read_generation({"messages": MESSAGES, **fields} if chat else {"prompt": "Hello", **fields}, chat=chat)


@pytest.mark.parametrize(
    ("fields", "computed", "echoed", "shown"),
    [
        ({}, None, None, None),
        ({"logprobs": 4}, None, None, None),
        ({"echo": True}, None, None, None),
        ({"echo": False, "logprobs": 4}, None, None, None),
        ({"echo": True, "logprobs": 4}, 4, 4, None),
        ({"echo": True, "logprobs": 0}, 0, 0, None),
        ({"echo": True, "logprobs": True}, 0, 0, None),
        ({"echo": True, "max_tokens": 0}, 0, None, None),
        ({"echo": True, "max_tokens": 0, "logprobs": 2}, 2, 2, None),
        ({"prompt_logprobs": 3}, 3, None, 3),
        ({"prompt_logprobs": False}, None, None, None),
        ({"prompt_logprobs": 0, "max_tokens": 0}, 0, None, 0),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 5}, 5, 5, 1),
        ({"prompt_logprobs": 5, "echo": True, "logprobs": 1}, 5, 1, 5),
    ],
)
def test_what_is_computed_echoed_and_shown(
    fields: dict[str, Any], computed: int | None, echoed: int | None, shown: int | None
) -> None:
    body = read(**fields)
    assert body.params(100).prompt_logprobs == computed
    assert (body.echoed_logprobs, body.prompt_logprobs) == (echoed, shown)
    assert body.echo is fields.get("echo", False)


def test_a_chat_has_prompt_logprobs_and_no_echo() -> None:
    body = read(chat=True, prompt_logprobs=2, max_tokens=0)
    assert (body.params(100).prompt_logprobs, body.params(100).max_tokens, body.prompt_logprobs) == (2, 0, 2)
    with pytest.raises(InvalidRequest, match="echo is not supported"):
        read(chat=True, echo=True)


def test_defaults_of_a_job_may_ask_for_them() -> None:
    defaults = SamplingParams(prompt_logprobs=2, max_tokens=0)
    body = read_generation({"prompt": "Hello"}, chat=False, defaults=defaults)
    assert (body.params(100).prompt_logprobs, body.prompt_logprobs, body.params(100).max_tokens) == (2, 2, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": 1}, "echo"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": "all"}, "logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": "all", "echo": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"echo": True, "stream": True}, "echo"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_one_body_has_a_bounded_number_of_them() -> None:
    body = read(prompt_logprobs=1, n=2)
    body.require_few_prompt_logprobs(MAX_LOGPROBS // 4)
    with pytest.raises(InvalidRequest, match="are more than 1,048,576 in all") as caught:
        body.require_few_prompt_logprobs(MAX_LOGPROBS // 4 + 1)
    assert caught.value.param == "prompt_logprobs"
    with pytest.raises(InvalidRequest, match="are more than") as caught:
        read(echo=True, logprobs=0).require_few_prompt_logprobs(MAX_LOGPROBS + 1)
    assert caught.value.param == "logprobs"
    read().require_few_prompt_logprobs(MAX_LOGPROBS + 1)


_PROMPT = (
    None,
    TokenLogprob(8, " name", -2.5, ((7, " own", -0.5), (9, "�", -1.5)), rank=3),
    TokenLogprob(7, " own", -0.25, ((7, " own", -0.25), (8, " name", -math.inf)), rank=1),
)
_ANSWER = (TokenLogprob(5, " is", -1.0, ((5, " is", -1.0), (6, " was", -2.0))),)


def response(*choices: Choice) -> InferenceResponse:
    return InferenceResponse("r", "", 0, 1.0, usage=Usage(3, 1), choices=choices, prompt_logprobs=_PROMPT)


def test_an_echo_has_the_tokens_of_the_prompt_before_those_of_the_answer() -> None:
    answered = response(Choice(0, " is", (5,), "length", _ANSWER), Choice(1, "", (), "length", ()))
    body = completion_body(Head("k", 1, "m", False, 2), [answered], echoes=[Echo("My name own", "My", 1)])
    first, second = body["choices"]
    assert first == {
        "index": 0,
        "text": "My name own is",
        "logprobs": {
            "tokens": ["My", " name", " own", " is"],
            "token_logprobs": [None, -2.5, -0.25, -1.0],
            "top_logprobs": [None, {" own": -0.5}, {" own": -0.25}, {" is": -1.0, " was": -2.0}],
            "text_offset": [0, 2, 7, 11],
        },
        "finish_reason": "length",
    }
    assert (second["index"], second["text"], second["logprobs"]["tokens"]) == (
        1,
        "My name own",
        ["My", " name", " own"],
    )


def test_an_echo_without_log_probabilities_is_text() -> None:
    body = completion_body(
        Head("k", 1, "m", False), [response(Choice(0, " is", (5,), "stop"))], echoes=[Echo("My name own", "My", None)]
    )
    assert body["choices"] == [{"index": 0, "text": "My name own is", "logprobs": None, "finish_reason": "stop"}]


def test_prompt_logprobs_are_in_the_form_of_vllm() -> None:
    form = [
        None,
        {
            "8": {"logprob": -2.5, "rank": 3, "decoded_token": " name"},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": " own"},
            "9": {"logprob": -1.5, "rank": 2, "decoded_token": "�"},
        },
        {
            "7": {"logprob": -0.25, "rank": 1, "decoded_token": " own"},
            "8": {"logprob": -9999.0, "rank": 2, "decoded_token": " name"},
        },
    ]
    answered = response(Choice(0, "", (), "length"), Choice(1, "", (), "length"))
    text = completion_body(Head("k", 1, "m", False, 2), [answered], prompt_logprobs=2)
    assert [choice["prompt_logprobs"] for choice in text["choices"]] == [form, form]
    assert "prompt_logprobs" not in text
    chat = completion_body(Head("k", 1, "m", True, 2), [answered], prompt_logprobs=2)
    assert chat["prompt_logprobs"] == form
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])
    own = completion_body(Head("k", 1, "m", False, 2), [answered], prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert own == [None, {"8": form[1]["8"]}, {"7": form[2]["7"]}]  # type: ignore[index]
