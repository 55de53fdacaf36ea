"""Which requests have the same answer, and which prompts are compared."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.request import SamplingParams
from batchwright.wire.identity import cacheable_prompt, counts_whole, identity_of
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL, RESPONSES_URL

BODY = {"prompt": "a", "temperature": 0}
SAME: list[dict[str, Any]] = [
    {"temperature": 0, "prompt": "a"},
    {"prompt": "a", "temperature": 0.0},
    {**BODY, "user": "u", "metadata": {"k": "v"}, "priority": 1, "deadline_ms": 5, "stream": False},
    {**BODY, "top_p": None},
    {**BODY, "n": 1, "stop": None},
]
OTHERS: list[dict[str, Any]] = [
    {**BODY, "prompt": "b"},
    {**BODY, "prompt": ["a"]},
    {**BODY, "n": 2},
    {**BODY, "seed": 1},
    {**BODY, "parallel_tool_calls": False},
    {**BODY, "model": "m"},
    {**BODY, "temperature": 0.5, "seed": 1},
    {**BODY, "guided_json": {"properties": {"a": {}, "b": {}}}},
    {**BODY, "guided_json": {"properties": {"b": {}, "a": {}}}},
    {**BODY, "tools": [{"parameters": {"properties": {"a": {}, "b": {}}}}]},
    {**BODY, "tools": [{"parameters": {"properties": {"b": {}, "a": {}}}}]},
]
SAME_HERE: list[dict[str, Any]] = [
    {**BODY, "max_tokens": 5},
    {**BODY, "max_completion_tokens": 5},
    {**BODY, "max_tokens": 9, "max_completion_tokens": 5},
    {**BODY, "max_tokens": 5, "seed": 1},
    {**BODY, "max_tokens": 5, "seed": 2, "top_p": 0.5, "top_k": 40, "min_p": 0.1},
    {**BODY, "max_tokens": 5, "stop": []},
    {**BODY, "max_tokens": 5, "stop_token_ids": [], "logit_bias": {}, "ignore_eos": False, "min_tokens": 0},
    {**BODY, "max_tokens": 5, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "top_p": 1},
]
"""For a model here."""
OTHERS_HERE: list[dict[str, Any]] = [
    {**BODY, "max_tokens": 6, "seed": 1},
    {**BODY, "max_tokens": 5, "seed": "1"},
    {**BODY, "max_tokens": 5, "top_p": 2},
    {**BODY, "max_tokens": 5, "top_p": True},
    {**BODY, "max_tokens": 5, "top_p": [0.5]},
    {**BODY, "max_tokens": 5, "seed": True},
    {**BODY, "max_tokens": 5, "seed": 2**63},
    {**BODY, "max_tokens": 5, "top_k": 40.0},
    {**BODY, "max_tokens": 5, "top_k": 10**30},
    {**BODY, "max_tokens": 9, "max_completion_tokens": 0},
    {**BODY, "max_tokens": 5, "temperature": 0.5, "seed": 1},
    {**BODY, "max_tokens": 5, "temperature": 0.5, "seed": 2},
    {**BODY, "max_tokens": 5, "temperature": 0.5, "seed": 2, "top_p": 0.5},
    {**BODY, "max_tokens": 5, "repetition_penalty": 1.1},
    {**BODY, "max_tokens": 5, "n": True},
    {**BODY, "max_tokens": 5, "stop": {}},
    {**BODY, "max_tokens": 5, "ignore_eos": 0},
]
NEVER: list[dict[str, Any]] = [
    {"prompt": "a"},
    {"prompt": "a", "temperature": None},
    {"prompt": "a", "temperature": False},
    {"prompt": "a", "temperature": 0.1},
    {"prompt": "a", "seed": None},
    {**BODY, "store": True},
    {**BODY, "web_search_options": {}},
    {**BODY, "stop": "\ud800"},
]


@pytest.mark.parametrize("body", SAME)
def test_what_changes_no_answer_makes_no_difference(body: dict[str, Any]) -> None:
    assert identity_of(COMPLETION_URL, body) == identity_of(COMPLETION_URL, BODY) is not None


def test_what_may_change_the_answer_makes_one() -> None:
    found = {identity_of(COMPLETION_URL, body) for body in [BODY, *OTHERS]}
    assert len(found) == 1 + len(OTHERS)
    assert None not in found
    assert identity_of(CHAT_URL, BODY) not in found


def test_greedy_answers_here_do_not_depend_on_how_tokens_are_drawn() -> None:
    for url in (COMPLETION_URL, CHAT_URL):
        (same,) = {identity_of(url, body, here=True) for body in SAME_HERE}
        assert len({identity_of(url, body, here=True) for body in OTHERS_HERE} - {same, None}) == len(OTHERS_HERE)
        # Of an endpoint it is not known, nor is it needed for responses, which repeat what was asked.
        assert len({identity_of(url, body) for body in SAME_HERE}) == len(SAME_HERE)
    assert len({identity_of(RESPONSES_URL, body, here=True) for body in SAME_HERE}) == len(SAME_HERE)
    greedy = SamplingParams(temperature=0.0, max_tokens=5, seed=7)
    for body in ({"prompt": "a"}, {"prompt": "a", "seed": 3}, {"prompt": "a", "max_completion_tokens": 5}):
        assert identity_of(COMPLETION_URL, body, greedy, here=True) == identity_of(
            COMPLETION_URL, SAME_HERE[0], here=True
        )
    # A name of one limit that is null is left out, as where it is computed.
    assert identity_of(COMPLETION_URL, {"prompt": "a", "max_tokens": None}, greedy, here=True) == identity_of(
        COMPLETION_URL, BODY, here=True
    )


@pytest.mark.parametrize("body", NEVER)
def test_what_is_drawn_anew_is_never_the_same(body: dict[str, Any]) -> None:
    assert identity_of(COMPLETION_URL, body) is None


def test_defaults_count_as_if_they_were_in_the_body() -> None:
    greedy = identity_of(COMPLETION_URL, {**BODY, "max_tokens": 5})
    for defaults in ({"temperature": 0.0, "max_tokens": 5}, SamplingParams(temperature=0.0, max_tokens=5)):
        assert identity_of(COMPLETION_URL, {"prompt": "a"}, defaults) == greedy
        assert identity_of(COMPLETION_URL, {"prompt": "a", "temperature": 1}, defaults) is None
        assert identity_of(COMPLETION_URL, {"prompt": "a", "temperature": None}, defaults) is None
    assert identity_of(COMPLETION_URL, {"prompt": "a"}, {"seed": 3}) is not None
    biased = identity_of(COMPLETION_URL, {**BODY, "logit_bias": {"5": 1.5}, "stop": ["x"]})
    assert identity_of(COMPLETION_URL, BODY, {"logit_bias": {5: 1.5}, "stop": ("x",)}) == biased is not None


def test_to_state_a_default_is_to_leave_the_field_out_unless_the_job_has_another() -> None:
    plain, one, several, null = BODY, {**BODY, "n": 1}, {**BODY, "n": 2}, {**BODY, "n": None}
    for here in (False, True):
        same = [identity_of(CHAT_URL, body, SamplingParams(), here=here) for body in (plain, one, null)]
        assert same[0] == same[1] == same[2]
        for defaults in (SamplingParams(n=2), {"n": 2}):
            found = [identity_of(CHAT_URL, body, defaults, here=here) for body in (plain, one, several, null)]
            assert found[0] == found[2]
            # Null may be one or two, according to what computes it.
            assert len({*found}) == 3
    # An endpoint may refuse an empty list of stop texts, and a model here a number of responses.
    assert identity_of(CHAT_URL, {**BODY, "stop": []}) != identity_of(CHAT_URL, BODY)
    assert identity_of(RESPONSES_URL, one, here=True) != identity_of(RESPONSES_URL, plain, here=True)


def test_a_body_that_states_a_default_does_not_count_unchanged() -> None:
    assert counts_whole({**BODY, "n": 2, "stop": ["x"], "top_p": 0.5})
    defaults: list[dict[str, Any]] = [{"n": 1}, {"stop": []}, {"top_p": 1}, {"presence_penalty": 0.0}]
    for stated in defaults:
        assert not counts_whole({**BODY, **stated})


def test_the_default_model_is_that_model() -> None:
    named = identity_of(COMPLETION_URL, {**BODY, "model": "m"}, None, "m")
    assert identity_of(COMPLETION_URL, BODY, None, "m") == named
    assert identity_of(COMPLETION_URL, BODY, None, "other") != named


def test_embeddings_are_always_the_same() -> None:
    one = identity_of(EMBEDDINGS_URL, {"input": "a"}, {"temperature": 0.7})
    assert one == identity_of(EMBEDDINGS_URL, {"input": "a", "user": "u"}) is not None
    assert one != identity_of(EMBEDDINGS_URL, {"input": "a", "encoding_format": "base64"})


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": text} for text in texts], **more}


@given(st.text(), st.text(), st.text())
def test_a_common_prefix_of_texts_is_one_of_prompts(common: str, one: str, other: str) -> None:
    for url, bodies in (
        (CHAT_URL, [chat(common, one), chat(common, other)]),
        (COMPLETION_URL, [{"prompt": common + "|" + one}, {"prompt": common + "|" + other}]),
    ):
        (scope, prompt), (other_scope, other_prompt) = (cacheable_prompt(url, body) for body in bodies)
        assert scope == other_scope
        assert prompt[: len(common.encode())] == other_prompt[: len(common.encode())]


def test_models_and_tools_are_not_shared() -> None:
    plain, other = cacheable_prompt(CHAT_URL, chat("a")), cacheable_prompt(CHAT_URL, chat("a", model="m"))
    assert plain[0] != other[0]
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = [cacheable_prompt(CHAT_URL, chat(text, tools=tools))[1] for text in ("a", "b")]
    assert with_tools[0] != plain[1]
    assert with_tools[0][:40] == with_tools[1][:40]
    assert cacheable_prompt(EMBEDDINGS_URL, {"input": "a"}) == (b"", b"")
    assert cacheable_prompt(CHAT_URL, {"messages": ["\ud800"]}) == (b"", b"")
