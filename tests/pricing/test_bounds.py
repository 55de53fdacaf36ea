"""The most that a request may cost: never less than it does, and refused where nothing bounds it."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InvalidRequest
from batchwright.pricing.bounds import most_cost, most_output
from batchwright.pricing.price_sources import given_prices
from batchwright.pricing.rates import ModelPrices, Rate, Rates
from batchwright.pricing.usage import TokensUsed
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL, RERANK_URL, SCORE_URL

PRICES = given_prices("input=1,cached=0.1,cache_write=1.25,output=4")
TIERED = ModelPrices.of(Rates(Rate(100, ((50, 300), (400, 200))), Rate(1000, ((50, 4000), (400, 3000)))))
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10}


def most(body: dict[str, Any], prices: ModelPrices = PRICES, endpoint: str = CHAT_URL, *, batch: bool = False) -> int:
    return most_cost(endpoint, body, len(msgspec.json.encode(body)), prices, batch=batch)


messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("prices", [PRICES, TIERED])
@given(messages=messages, limit=st.integers(0, 5000), n=st.integers(1, 8), data=st.data(), batch=st.booleans())
def test_nothing_that_is_possible_costs_more(
    prices: ModelPrices, messages: list[dict[str, str]], limit: int, n: int, data: st.DataObject, batch: bool
) -> None:
    body = {"messages": messages, "max_completion_tokens": limit, "n": n}
    # A byte a token, and what OpenAI adds: three for each message and three for the answer.
    tokens = sum(len(each["content"].encode(errors="replace")) + len(each["role"]) + 3 for each in messages) + 3
    prompt = data.draw(st.integers(0, tokens))
    cached = data.draw(st.integers(0, prompt))
    written = data.draw(st.integers(0, prompt - cached))
    used = TokensUsed(prompt, data.draw(st.integers(0, limit * n)), cached, written)
    rates = prices.batch if batch else prices.live
    assert used.cost(rates) <= most(body, prices, batch=batch)


@given(
    first=st.lists(st.text(min_size=1), min_size=1, max_size=3),
    second=st.lists(st.text(min_size=1), min_size=3, max_size=5),
    is_rank=st.booleans(),
)
def test_pairs_repeat_their_first_text(first: list[str], second: list[str], is_rank: bool) -> None:
    first = [*first, first[0], first[0]][: len(second)] if len(first) > 1 else first
    first = first[:1] if len(first) != len(second) else first
    body = {"query": first[0], "documents": second} if is_rank else {"data_1": first, "data_2": second}
    firsts = first[:1] * len(second) if is_rank or len(first) == 1 else first
    # A byte a token, and a template around each pair.
    tokens = sum(len((a + b).encode(errors="replace")) + 100 for a, b in zip(firsts, second, strict=True))
    assert TokensUsed(tokens, 0).cost(PRICES.live) <= most(body, endpoint=RERANK_URL if is_rank else SCORE_URL)


def test_ranked_images_have_no_bound() -> None:
    assert most({"query": "a", "documents": [{"text": "b"}]}, endpoint=RERANK_URL) > 0
    for name in ("query", "documents"):
        body: dict[str, Any] = {"query": "a", "documents": ["b"], name: [{"image": "c"}]}
        with pytest.raises(InvalidRequest, match=f"^{name} has more than texts"):
            most(body, endpoint=RERANK_URL)


def test_how_many_tokens_an_answer_may_have() -> None:
    assert most_output({"max_tokens": 5}) == 5
    assert most_output({"max_tokens": 5, "max_completion_tokens": 7, "n": 2}) == 14
    assert most_output({"max_output_tokens": 5}) == 5
    assert most_output({"max_tokens": 5, "n": 2, "best_of": 3, "prompt": ["a", "b"]}) == 30
    assert most_output({"max_tokens": 5, "prompt": [1, 2, 3]}) == 5
    with pytest.raises(InvalidRequest, match=r"max_tokens is missing.*--max-tokens"):
        most_output({"max_tokens": None})
    for body in ({"max_tokens": -1}, {"max_tokens": "5"}, {"max_tokens": 5, "n": 0}, {"max_tokens": 5, "n": 1.0}):
        with pytest.raises(InvalidRequest, match="must be a whole number"):
            most_output(body)


def test_embeddings_need_no_limit() -> None:
    body = {"input": ["a", "b"], "model": "m"}
    assert most(body, endpoint=EMBEDDINGS_URL) < most({**body, "max_tokens": 1}, endpoint=COMPLETION_URL)


def test_tools_and_tiers_cost_more_at_most() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert most({**CHAT, "tools": [tool]}) > most(CHAT) + 500 * 1_250_000
    prices = ModelPrices(PRICES.live, PRICES.batch, {"priority": PRICES.live.times(Fraction(2)), "flex": PRICES.batch})
    assert most({**CHAT, "service_tier": "priority"}, prices) > most(CHAT, prices)
    # The endpoint may fall back to the usual price.
    assert most({**CHAT, "service_tier": "flex"}, prices) > most(CHAT, prices)
    assert most({**CHAT, "service_tier": "default"}, prices) > most(CHAT, prices)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"service_tier": "priority"}, "service_tier='priority': its price is not known"),
        ({"web_search_options": {}}, "web_search_options: what it costs has no bound"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction: what it costs"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] is of type 'web_search'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            r"messages\[0\].content\[0\] is of type 'image_url', whose tokens have no bound; leave it out, or run",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "type 'file'"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "no bound"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\] is of type 'item_reference'"),
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"prompt": {"id": "x"}}, "stored prompt"),
    ],
)
def test_what_has_no_bound_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        most({**CHAT, **fields})


def test_parts_of_text_are_no_obstacle() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert most({**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert most({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 1})


NAMES = ["messages", "content", "type", "tools", "n", "max_tokens", "prompt", "input"]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.sampled_from(NAMES), each),
)


@given(st.dictionaries(st.sampled_from(NAMES), values))
def test_nonsense_gets_a_clear_error_or_a_bound(body: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        assert most_cost(CHAT_URL, body, 1000, PRICES) > 0
