"""Sizes of what is in a body: each list, text and object has a bound, which is told with the field and its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from batchwright.errors import InvalidRequest
from batchwright.lines.batch_line import check_batch_line
from batchwright.wire import bounds
from batchwright.wire.bounds import require_sizes
from batchwright.wire.requests import EMBEDDINGS_URL, read_embeddings, read_generation

CALL = {"function": {"name": "f", "arguments": "{}"}}
HELLO = {"role": "user", "content": "Hello"}
MILLION = 10**6


class Unread(list[Any]):
    """A list whose items may not be looked at, but for the first."""

    def __getitem__(self, index: Any) -> Any:
        assert index == 0
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("its items were looked at")


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [HELLO], **fields}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [HELLO, {**HELLO, **fields}]}


def parts(count: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": "a"}] * count


def keys(count: int) -> dict[str, int]:
    return {str(key): 1 for key in range(count)}


AT_MOST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stop": (chat(stop=["a"] * 16), chat(stop=["a"] * 17)),
    "stop[15]": (chat(stop=["a"] * 15 + ["a" * 256]), chat(stop=["a"] * 15 + ["a" * 257])),
    "stop_token_ids": (chat(stop_token_ids=[1] * 256), chat(stop_token_ids=[1] * 257)),
    "logit_bias": (chat(logit_bias=keys(1024)), chat(logit_bias=keys(1025))),
    "n": (chat(n=128), chat(n=129)),
    "model": (chat(model="m" * 256), chat(model="m" * 257)),
    "user": (chat(user="u" * 512), chat(user="u" * 513)),
    "safety_identifier": (chat(safety_identifier="u" * 512), chat(safety_identifier="u" * 513)),
    "metadata": (chat(metadata=dict.fromkeys(map(str, range(16)), "v")), chat(metadata=keys(17))),
    "metadata.a": (chat(metadata={"a": "v" * 512}), chat(metadata={"a": "v" * 513})),
    "prediction": (chat(prediction={"content": parts(3332)}), chat(prediction={"content": parts(3333)})),
    "messages": ({"messages": [HELLO] * 2048}, {"messages": [HELLO] * 2049}),
    "messages[1].name": (message(name="n" * 64), message(name="n" * 65)),
    "messages[1].role": (message(role="assistant"), message(role="a" * MILLION)),
    "messages[1].content": (message(content=parts(4096)), message(content=parts(4097))),
    "messages[1].content[0].text": (
        message(content=[{"type": "text", "text": "a" * bounds.MAX_TEXT}]),
        message(content=[{"type": "text", "text": "a" * (bounds.MAX_TEXT + 1)}]),
    ),
    "messages[1].tool_calls": (message(tool_calls=[CALL] * 128), message(tool_calls=[CALL] * 129)),
    "messages[1]": (message(**dict.fromkeys("abcdefghijklmnopqrstuvwxyzABCD")), message(**keys(31))),
    "messages[1].a": (message(a=[0] * 9999), message(a=[0] * 10_000)),
    "prompt": ({"prompt": ["a"] * 2048}, {"prompt": ["a"] * 2049}),
    "prompt[1]": ({"prompt": ["a", "a" * bounds.MAX_TEXT]}, {"prompt": ["a", "a" * (bounds.MAX_TEXT + 1)]}),
    "seed": (chat(seed=2**63 - 1), chat(seed=2**63)),
    "max_tokens": (chat(max_tokens=2**31 - 1), chat(max_tokens=2**31)),
    "max_completion_tokens": (chat(max_completion_tokens=1), chat(max_completion_tokens=0)),
    "min_tokens": (chat(min_tokens=2**31 - 1, max_tokens=2**31 - 1), chat(min_tokens=2**31)),
    "priority": (chat(priority=-(2**31)), chat(priority=2**31)),
    "deadline_ms": (chat(deadline_ms=1e12), chat(deadline_ms=1.1e12)),
    "deadline": (chat(deadline=1e9), chat(deadline=1.1e9)),
    "temperature": (chat(temperature=2), chat(temperature=2.01)),
    "top_p": (chat(top_p=0), chat(top_p=1.01)),
    "presence_penalty": (chat(presence_penalty=-2), chat(presence_penalty=-2.1)),
    "frequency_penalty": (chat(frequency_penalty=2), chat(frequency_penalty=2.1)),
    "top_logprobs": (chat(logprobs=True, top_logprobs=20), chat(logprobs=True, top_logprobs=21)),
    "logprobs": ({"prompt": "a", "logprobs": 20}, {"prompt": "a", "logprobs": 21}),
}
"""By the field that is told: a body that has as much as it may, and one that has more."""


def read(body: Mapping[str, Any]) -> None:
    read_generation(body, chat="messages" in body)


@pytest.mark.parametrize("param", AT_MOST)
def test_each_field_has_a_bound(param: str) -> None:
    fits, exceeds = AT_MOST[param]
    read(fits)
    with pytest.raises(InvalidRequest) as caught:
        read(exceeds)
    assert caught.value.param == param
    assert param in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_message_has_the_size_and_the_limit() -> None:
    with pytest.raises(InvalidRequest, match=r"stop has 1,000,000 entries, the most is 16$") as caught:
        read(chat(stop=["a"] * MILLION))
    assert caught.value.code == "array_above_max_length"
    with pytest.raises(InvalidRequest, match=r"stop\[0\] has 1,000,000 characters, the most is 256$") as caught:
        read(chat(stop=["a" * MILLION]))
    assert caught.value.code == "string_above_max_length"
    with pytest.raises(InvalidRequest, match=r"logit_bias has 1,025 members, the most is 1,024$") as caught:
        read(chat(logit_bias=keys(1025)))
    assert caught.value.code == "object_above_max_properties"
    with pytest.raises(InvalidRequest, match=r"a key of metadata has 65 characters, the most is 64$") as caught:
        read(chat(metadata={"k" * 65: "v"}))
    assert caught.value.param == "metadata"
    with pytest.raises(InvalidRequest, match=r"temperature=2\.5: must be ≥ 0 and ≤ 2$"):
        read(chat(temperature=2.5))
    with pytest.raises(InvalidRequest, match=r"the body has 129 fields, the most is 128$") as caught:
        read(chat(**dict.fromkeys(map(str, range(128)))))
    assert caught.value.param is None


READERS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "messages": lambda body: read_generation(body, chat=True),
    "prompt": lambda body: read_generation(body, chat=False),
    "input": read_embeddings,
}


@pytest.mark.parametrize("needed", READERS)
@pytest.mark.parametrize("item", [HELLO, "a", 1, {}, None, [1]])
def test_a_list_is_refused_before_its_items_are_looked_at(needed: str, item: Any) -> None:
    for name in (
        "messages", "prompt", "input", "stop", "stop_token_ids", "tools", "functions", "user", "metadata", "model",
        "temperature", "n", "seed", "logit_bias", "priority", "deadline", "logprobs", "top_logprobs", "stream",
        "stream_options", "response_format", "dimensions", "encoding_format", "prediction", "max_tokens", "unknown",
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            READERS[needed]({needed: [HELLO] if needed == "messages" else "a", name: Unread([item] * MILLION)})
        assert caught.value.param == name


def test_token_ids_are_counted_in_all_prompts_together() -> None:
    ids = [5] * (bounds.MAX_TOKEN_IDS // 2)
    read({"prompt": [ids, ids]})
    read_embeddings({"input": [*ids, *ids]})
    with pytest.raises(InvalidRequest, match="prompt has 524,289 token ids in all, the most is 524,288"):
        read({"prompt": [ids, ids, [1]]})
    with pytest.raises(InvalidRequest, match="input has 524,289 entries, the most is 524,288"):
        read_embeddings({"input": [*ids, *ids, 1]})


def test_parts_are_counted_in_all_messages_together() -> None:
    many = {"role": "user", "content": parts(3)}
    read({"messages": [many] * 1365})
    with pytest.raises(InvalidRequest, match="messages has 4,098 parts in all, the most is 4,096"):
        read({"messages": [many] * 1366})


def test_log_probabilities_are_counted_in_all() -> None:
    read(chat(logprobs=True, top_logprobs=20, n=12))
    read(chat(logprobs=True, top_logprobs=20, n=128, max_tokens=390))
    read({"prompt": ["a"] * 2048, "logprobs": 1, "max_tokens": 256})
    with pytest.raises(InvalidRequest, match="13 completions of 4,096 tokens with 21 log-probabilities each") as caught:
        read(chat(logprobs=True, top_logprobs=20, n=13))
    assert caught.value.param == "top_logprobs"
    with pytest.raises(InvalidRequest, match="are more than 1,048,576 in all: ask for fewer") as caught:
        read({"prompt": ["a"] * 2048, "logprobs": 1, "max_tokens": 257})
    assert caught.value.param == "logprobs"
    with pytest.raises(InvalidRequest, match="log-probabilities"):
        read({"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 391})


def test_embeddings_have_the_same_bounds() -> None:
    read_embeddings({"input": ["a"] * 2048, "user": "u" * 512})
    for name, value in {"input": ["a"] * 2049, "user": "u" * 513, "model": "m" * 257, "priority": 2**31}.items():
        with pytest.raises(InvalidRequest) as caught:
            read_embeddings({"input": "a", name: value})
        assert caught.value.param == name


def test_what_goes_to_an_endpoint_elsewhere_is_bounded_in_size_and_not_judged() -> None:
    require_sizes(chat(temperature=9, tools=[{"type": "function"}] * 128, response_format={"type": "json_object"}, x=1))
    for name, value in {
        "tools": [{}] * 129,
        "response_format": {"schema": {"enum": [1] * 10_000}},
        "x": [[[0]] * 5000],
        "stop": ["a"] * 17,
    }.items():
        with pytest.raises(InvalidRequest) as caught:
            require_sizes(chat(**{name: value}))
        assert caught.value.param == name


def test_the_frame_of_a_batch_line() -> None:
    line = {"custom_id": "a", "method": "POST", "url": EMBEDDINGS_URL, "body": {"input": "a", "model": "m" * 256}}
    check_batch_line(line)
    with pytest.raises(InvalidRequest, match="model has 257 characters"):
        check_batch_line(line | {"body": {"input": "a", "model": "m" * 257}})


def test_fields_that_are_ignored_have_the_types_that_openai_gives_them() -> None:
    for name, value in {"user": 5, "store": "yes", "metadata": {"a": 5}, "prediction": "x", "service_tier": []}.items():
        with pytest.raises(InvalidRequest, match=f"{name}.*: must be") as caught:
            read(chat(**{name: value}))
        assert (caught.value.param or "").partition(".")[0] == name


def test_false_is_not_zero() -> None:
    read(chat(best_of=1, echo=False))
    for name, value in {"best_of": True, "echo": 0}.items():
        with pytest.raises(InvalidRequest, match=f"{name} is not supported"):
            read(chat(**{name: value}))


@pytest.mark.parametrize("key", ["", "-1", "+1", " 1", "1_0", "1.0", "x", "٣", "12345678901"])
def test_keys_of_logit_bias_are_token_ids(key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(chat(logit_bias={key: 1}))
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_roles_are_those_of_openai(role: str) -> None:
    read({"messages": [{"role": role, "content": "a"}]})


@pytest.mark.parametrize("role", ["", "User", "human", "bot", "a" * 64])
def test_other_roles_are_refused_by_name(role: str) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.role=.*: must be one of system, developer") as caught:
        read({"messages": [{"role": role, "content": "a"}]})
    assert caught.value.param == "messages[0].role"
