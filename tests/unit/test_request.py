"""What a request may say, and how one that may not be served is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.errors import BatchwrightError, InvalidRequest, shown
from batchwright.request import (
    FORM_FIELDS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    InferenceRequest,
    SamplingParams,
    Usage,
)

_BEYOND_PRINTING = 10**5000
"""An integer with more digits than Python is willing to print."""

_ACCEPTED: dict[str, list[Any]] = {
    "max_tokens": [1, 2**40],
    "min_tokens": [0, 256],
    "temperature": [0, 0.0, -0.0, 1e-12, 1, 10.0],
    "top_p": [0, 1e-9, 0.5, 1],
    "top_k": [0, 1, 10**9],
    "min_p": [0, 1.0],
    "repetition_penalty": [0.01, 1, 10.0],
    "presence_penalty": [-2.0, 0, 2],
    "frequency_penalty": [-2.0, 0, 2],
    "logit_bias": [{}, {0: -100, 7: 100.0}],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "n": [1, 128],
    "logprobs": [None, 0, MAX_TOP_LOGPROBS],
    "prompt_logprobs": [None, 0, MAX_TOP_LOGPROBS],
    "prompt_logprobs_start": [0, 10**9],
    "ignore_eos": [True, False],
    "stop_token_ids": [(), (0, 5)],
    "stop": [(), ("a", "\n"), ("終わり🙂",)],
    "schema": [None, {}, {"type": "object"}, {"properties": {"ключ": {}}}, list[int]],
    "json_object": [True, False],
    "regex": [None, "[0-9]+"],
    "choices": [(), ("a", "b"), ("終わり🙂",)],
    "grammar": [None, 'start: "a"'],
    "request_id": ["x", "ключ 🙂"],
    "priority": [-(10**30), 0, 5],
    "traffic": ["online", "batch"],
    "deadline": [None, 1e-9, 3, 1e9],
    "max_wait_ms": [None, 0, 0.5, 1000],
}

_REFUSED: dict[str, list[Any]] = {
    "prompt_logprobs": [-1, MAX_TOP_LOGPROBS + 1, True, 1.0, "all"],
    "prompt_logprobs_start": [-1, True, 1.0, None],
    "max_tokens": [0, -1, 1.0, True, "5", None, math.nan, math.inf],
    "min_tokens": [-1, 257, 0.5, False, None],
    "temperature": [-0.01, 10.01, math.nan, math.inf, -math.inf, True, "0.7", None, _BEYOND_PRINTING, 1j],
    "top_p": [-1e-9, -0.5, 1.0001, math.nan, True, None, 10**400],
    "top_k": [-2, 1.5, True, math.inf, None, -_BEYOND_PRINTING],
    "min_p": [-1e-9, 1.1, math.nan, None],
    "repetition_penalty": [0, -1, 10.5, math.inf, None],
    "presence_penalty": [-2.1, 2.1, math.nan, None],
    "frequency_penalty": [-2.1, 2.1, math.nan, None],
    "logit_bias": [[], "x", 5, None, {"7": 1.0}, {-1: 1.0}, {True: 1.0}, {1: 101}, {1: -101}, {1: math.nan}, {1: None}],
    "seed": [1.0, True, "1", 2**64, -(2**63) - 1, _BEYOND_PRINTING],
    "n": [0, 129, 1.0, True, None],
    "logprobs": [-1, MAX_TOP_LOGPROBS + 1, True, 1.0],
    "ignore_eos": [0, 1, "true", None],
    "stop_token_ids": [0, 5, False, (-1,), ("a",), (1.5,), "ab", {3: 1}],
    "stop": [0, 5, False, "", ("a", ""), (5,), (None,), {"a": 1}, b"ab"],
    "schema": [True, False, 5, "x", [], b"x", {"a": math.nan}, {"a": {1, 2}}, {"a": "x" * 300_000}, open],
    "json_object": [0, 1, None, "true"],
    "regex": ["", 5, True, b"x", "a" * 300_000],
    "choices": ["ab", [], ("",), (5,), (None,), 5, {"a": 1}, ("a",) * 10_001, ("a" * 300_000,)],
    "grammar": ["", 5, "a" * 300_000],
    "request_id": ["", None, 5, b"x"],
    "priority": [1.0, True, None, "5", math.nan],
    "traffic": ["", "Batch", None, 5, ["batch"]],
    "deadline": [0, 0.0, -1, 1e10, 10**400, math.nan, math.inf, True, "3", 1j],
    "max_wait_ms": [-1, -0.1, 1e13, 10**400, math.nan, math.inf, True, "3", 1j],
}


def _cases(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{number}")
        for name, values in table.items()
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(("name", "value"), _cases(_ACCEPTED))
def test_values_up_to_the_edge_are_accepted(name: str, value: Any) -> None:
    request = InferenceRequest("x", **{name: value})
    assert getattr(request, name) == value


@pytest.mark.parametrize(("name", "value"), _cases(_REFUSED))
def test_values_past_the_edge_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        InferenceRequest("x", **{name: value})
    assert caught.value.param == name
    assert caught.value.code == "invalid_request"
    assert name in str(caught.value)
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, (BatchwrightError, ValueError))


def test_every_sampling_parameter_has_its_edges_tested() -> None:
    names = {field.name for field in dataclasses.fields(InferenceRequest)}
    untouched = {"prompt", "created_at", "callback", "metadata", "flow", "around_form"}
    assert names - untouched == _ACCEPTED.keys() == _REFUSED.keys()


@settings(max_examples=examples(100, long=300))
@given(
    name=st.sampled_from(sorted(_REFUSED)),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
)
def test_whatever_a_field_holds_nothing_but_a_refusal_is_raised(name: str, value: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        assert InferenceRequest("x", **{name: value}).prompt == "x"


def test_nothing_may_be_generated_where_the_prompt_is_scored() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(InvalidRequest, match=r"max_tokens=0: must be ≥ 1, unless prompt_logprobs"):
        SamplingParams(max_tokens=0, prompt_logprobs_start=3)


def test_the_defaults_are_valid() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.stop, params.greedy) == (256, 0.7, (), False)
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=-0.0).greedy
    assert SamplingParams(top_p=0).greedy
    assert not SamplingParams(top_p=1e-9).greedy


@pytest.mark.parametrize(
    ("stop", "kept"), [("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), (None, ())]
)
def test_stop_may_be_a_text_a_list_or_none(stop: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == kept


def test_stop_strings_have_a_number_and_a_length_in_all() -> None:
    most, letters = MAX_STOPS, MAX_STOP_CHARACTERS
    assert len(SamplingParams(stop=("a",) * most).stop) == most
    assert SamplingParams(stop=("a" * letters,)).stop
    with pytest.raises(InvalidRequest, match="stop has 65,537 texts, the most is 65,536"):
        SamplingParams(stop=("a",) * (most + 1))
    with pytest.raises(InvalidRequest, match="stop has 1,048,577 characters in all, the most is 1,048,576"):
        SamplingParams(stop=("a" * letters, "b"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("a" * 1000, "'" + "a" * 98 + "…"),
        ([1] * 9, "(list of 9)"),
        ([[1] * 9, {"a": 1}], "[[...], {...}]"),
        (dict.fromkeys(range(10**6)), "(dict of 1,000,000)"),
        (_BEYOND_PRINTING, "(int)"),
    ],
    ids=["number", "text", "list", "nested", "dict", "beyond printing"],
)
def test_values_in_messages_are_short(value: Any, text: str) -> None:
    assert shown(value) == text


def test_stop_token_ids_may_be_any_iterable_or_none() -> None:
    assert SamplingParams(stop_token_ids=[0, 3]).stop_token_ids == (0, 3)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]


def test_minus_one_turns_top_k_off() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


def test_min_tokens_above_max_tokens_names_both() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens=9: must be ≤ max_tokens=8") as caught:
        SamplingParams(max_tokens=8, min_tokens=9)
    assert caught.value.param == "min_tokens"
    assert SamplingParams(max_tokens=8, min_tokens=8).min_tokens == 8


def test_a_range_is_shown_with_both_its_ends() -> None:
    with pytest.raises(InvalidRequest, match=r"top_p=2: must be ≥ 0\.0 and ≤ 1\.0"):
        SamplingParams(top_p=2)


def test_parameters_are_frozen_and_taken_by_name_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(3)  # type: ignore[call-arg]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    with pytest.raises(InvalidRequest, match="Unprintable"):
        SamplingParams(max_tokens=Unprintable())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "a",
        "naïve 🙂 \u0000 \u202e 日本語",
        "\ud800",
        [0],
        [1, 2, 3],
        (1, 2),
        range(1, 4),
        array("i", [1, 2]),
        [{"role": "user", "content": "hi"}],
        ({"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}),
        [{"role": "assistant"}],
    ],
)
def test_prompts_of_every_kind_are_kept_as_they_are(prompt: Any) -> None:
    assert InferenceRequest(prompt).prompt is prompt


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        (b"bytes", "prompt"),
        (bytearray(b"x"), "prompt"),
        ({"role": "user", "content": "hi"}, "prompt"),
        ({1, 2}, "prompt"),
        (iter([1, 2]), "prompt"),
        ([], "prompt"),
        ((), "prompt"),
        ([-1], "prompt"),
        ([3, -(10**5000)], "prompt"),
        ([1, True], "messages[0]"),
        ([1.0], "messages[0]"),
        (["a", "b"], "messages[0]"),
        ([{"role": "user", "content": "hi"}, {"content": "no role"}], "messages[1]"),
        ([{"role": 5, "content": "hi"}], "messages[0]"),
        ([{"role": "user"}, 7], "messages[1]"),
        ([[1, 2], [3]], "messages[0]"),
    ],
)
def test_other_prompts_are_refused_by_place(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        InferenceRequest(prompt)
    assert caught.value.param == param


def test_the_message_of_a_refusal_stays_short() -> None:
    with pytest.raises(InvalidRequest) as caught:
        InferenceRequest([{"content": "x" * 100_000}])
    assert len(str(caught.value)) < 300


def test_requests_get_distinct_ids_and_a_time() -> None:
    first, second = InferenceRequest("x"), InferenceRequest("x")
    assert first.request_id != second.request_id
    assert len(first.request_id) == 32
    assert first.created_at > 1.6e9


def test_a_request_of_parameters_takes_all_of_them() -> None:
    params = SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.1,
        top_p=0.2,
        top_k=3,
        min_p=0.4,
        repetition_penalty=1.5,
        presence_penalty=0.6,
        frequency_penalty=0.7,
        logit_bias={1: 2.0},
        seed=8,
        stop=("z",),
        stop_token_ids=(9,),
        n=2,
        logprobs=1,
        prompt_logprobs=2,
        prompt_logprobs_start=3,
        ignore_eos=True,
        schema={"type": "object"},
    )
    request = InferenceRequest.of("x", params, request_id="r", priority=0, deadline=2.0, metadata={"k": 1})
    for field in dataclasses.fields(SamplingParams):
        assert getattr(request, field.name) == getattr(params, field.name)
        # Of those that give a form only one can be set.
        assert field.name in FORM_FIELDS[1:] or getattr(params, field.name) != getattr(SamplingParams(), field.name)
    assert (request.prompt, request.request_id, request.priority) == ("x", "r", 0)
    assert (request.deadline, request.metadata) == (2.0, {"k": 1})


def test_a_request_can_be_made_of_another_ones_parameters() -> None:
    other = InferenceRequest("x", request_id="a", max_tokens=3, priority=1)
    request = InferenceRequest.of("y", other)
    assert (request.prompt, request.max_tokens, request.priority) == ("y", 3, 5)
    assert request.request_id != "a"


def test_a_request_can_be_changed_by_replace_and_sent_between_processes() -> None:
    request = InferenceRequest("x", request_id="a")
    assert dataclasses.replace(request, max_tokens=5).request_id == "a"
    with pytest.raises(InvalidRequest):
        dataclasses.replace(request, max_tokens=0)
    assert pickle.loads(pickle.dumps(request)) == request


def test_usage_adds_up() -> None:
    assert Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2).total_tokens == 7


def test_a_callback_that_nobody_would_await_is_refused() -> None:
    async def later(response: object) -> None: ...

    class Later:
        async def __call__(self, response: object) -> None: ...

    for callback in (later, Later(), 5):
        with pytest.raises(InvalidRequest, match="callback") as raised:
            InferenceRequest("x", callback=callback)  # type: ignore[arg-type]
        assert raised.value.param == "callback"


def test_requests_can_be_kept_in_sets() -> None:
    one = InferenceRequest("x", logit_bias={1: 1.0}, metadata={"a": []}, stop=("b",))
    other = InferenceRequest([{"role": "user", "content": "x"}])
    assert len({one, other, one, dataclasses.replace(one)}) == 2
