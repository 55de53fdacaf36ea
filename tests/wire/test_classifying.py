"""Bodies that are ranked, scored and classified, in each of their forms."""

from __future__ import annotations

from typing import Any

import pytest

from batchwright.errors import InvalidRequest
from batchwright.lines.batch_line import check_batch_line, token_count
from batchwright.wire.classifying import pair_fields, read_classifying, read_rerank, read_score, sent_inputs
from batchwright.wire.requests import ALIASES, CLASSIFY_URL, PAIR_FIELDS, RERANK_URL, SCORE_URL


@pytest.mark.parametrize("names", PAIR_FIELDS)
def test_each_form_of_pairs(names: tuple[str, str]) -> None:
    first, second = names
    body = read_score({first: "a", second: ["b", "c"], "max_tokens_per_doc": 0})
    assert body.inputs == (("a", "b"), ("a", "c"))
    assert (body.first, body.second, body.first_param, body.param) == (("a",), ("b", "c"), first, second)
    assert read_score({first: ["a", "b"], second: ["c", "d"]}).inputs == (("a", "c"), ("b", "d"))
    assert sent_inputs(SCORE_URL, {first: "a", second: ["b", {"image": "c"}], "other": 1}) == ["a b", "a "]
    with pytest.raises(InvalidRequest, match=f"^{'documents' if first == 'queries' else second} is missing"):
        read_score({first: "a", "items": None})
    with pytest.raises(InvalidRequest, match="has 2 texts"):
        read_score({first: ["a", "b"], second: ["c"]})


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "text_1 is missing"),
        ({"text_2": "a"}, "text_1 is missing"),
        ({"text_1": "a", "text_2": "b", "data_1": "c"}, "data_1 is given beside text_1"),
        ({"queries": "a", "documents": "b", "items": "c"}, "items is given beside queries"),
        ({"text_1": "a", "data_2": "b"}, "data_2 is given beside text_1"),
        ({"text_1": "a", "text_2": "b", "instruction": "Rank"}, "instruction is not supported"),
    ],
)
def test_forms_are_not_mixed(body: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{told}"):
        read_score(body)


def test_ranks_as_vllm_asks_for_them() -> None:
    body = read_rerank({"query": "a", "documents": "b", "top_n": 0, "use_activation": True, "text_1": None})
    assert (body.inputs, body.top_n) == ((("a", "b"),), 1)
    assert sent_inputs(RERANK_URL, {"query": "a", "documents": [{"text": "b"}, 5]}) == ["a b", "a "]
    assert sent_inputs(CLASSIFY_URL, {"input": ["a", "b"], "labels": ["c"]}) == ["a", "b"]
    with pytest.raises(InvalidRequest, match=r"^use_activation is not supported"):
        read_classifying(CLASSIFY_URL, {"input": "a", "use_activation": False})


@pytest.mark.parametrize("url", ALIASES)
def test_other_paths_of_lines(url: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {}}
    assert check_batch_line(line).endpoint == ALIASES[url]


def test_pairs_without_texts_are_text_pairs() -> None:
    assert pair_fields({}) == ("text_1", "text_2")


def test_tokens_of_an_answer_that_states_their_sum_alone() -> None:
    assert token_count({"usage": {"total_tokens": 7}}, "prompt_tokens") == 7
    assert token_count({"usage": {"total_tokens": 7}}, "completion_tokens") == 0
    assert token_count({"usage": {"prompt_tokens": 5, "total_tokens": 7}}, "prompt_tokens") == 5
    assert token_count({"usage": {"input_tokens": 5, "total_tokens": 7}}, "prompt_tokens") == 5
