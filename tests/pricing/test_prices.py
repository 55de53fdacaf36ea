"""Prices that are told, read from a file or published, and what answers cost by them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from genai_prices import Usage, calc_price
from genai_prices.data import providers
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InputError
from batchwright.pricing.price_sources import PriceBook, given_prices, price_table
from batchwright.pricing.published import published_prices
from batchwright.pricing.rates import (
    DOLLAR,
    ModelPrices,
    Rate,
    Rates,
    per_million,
    picodollars,
    shown_dollars,
)
from batchwright.pricing.usage import TokensUsed, rates_of, read_usage

AT = datetime(2026, 11, 1, tzinfo=UTC)
TOLD = given_prices("input=2.50,cached=1.25,output=10.00")
rates = st.builds(
    lambda base, starts, prices: Rate(base, tuple(zip(sorted(starts), prices, strict=False))),
    st.integers(0, 10**8),
    st.sets(st.integers(1, 10**6), max_size=3),
    st.lists(st.integers(0, 10**8), min_size=3, max_size=3),
)


def test_given_prices_are_exact() -> None:
    assert TOLD.live == Rates(Rate(2_500_000), Rate(10_000_000), cached=Rate(1_250_000))
    assert TOLD.batch == Rates(Rate(1_250_000), Rate(5_000_000), cached=Rate(625_000))
    assert given_prices("input=0.1, output=0, cache_write=0.125, batch=0.8").batch == Rates(
        Rate(80_000), Rate(0), cache_write=Rate(100_000)
    )
    assert per_million(Decimal("0.0000001")) == 1  # rounded up, never down to nothing


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("input", "must be a list of names and prices"),
        ("input=1,input=2,output=1", "must be a list"),
        ("input=1", "lacks output"),
        ("input=1,output=2,ouput=3", "has 'ouput': choose from input, output, cached, cache_write, cache_write_1h"),
        ("input=1,output=x", "output='x' must be dollars per million tokens"),
        ("input=-1,output=1", "input='-1' must be"),
        ("input=nan,output=1", "input='nan' must be"),
        ("input=1,output=1,batch=2", "batch='2' must be the part of the live price, 0 to 1"),
    ],
)
def test_prices_that_cannot_be_read(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        given_prices(text)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("openai/gpt-99", "openai/gpt-"),
        ("openia/gpt-4o", "openai/gpt-4o"),
        ("gpt-4o", "openai/gpt-4o"),
        ("anthropic/claude-sonnet", "anthropic/claude-sonnet-"),
    ],
)
def test_a_name_without_prices_is_told_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(InputError, match=rf"^price='{name}': no PROVIDER/MODEL .*near: .*{near}.*--prices FILE$"):
        PriceBook(at=AT, given=name)


def test_a_name_that_is_like_no_other() -> None:
    with pytest.raises(InputError, match=r"^price='§': no PROVIDER/MODEL of published prices; give what it costs"):
        PriceBook(at=AT, given="§")


def test_files_of_prices() -> None:
    toml = b'["gpt-4o"]\ninput = 2.50\ncached = 1.25\noutput = 10.00\n[small]\ninput = 1\noutput = 0\nbatch = 1\n'
    read = price_table(toml, "prices.toml")
    assert read["gpt-4o"] == TOLD
    assert read["small"].batch == read["small"].live
    text = json.dumps({"gpt-4o": {"input": 2.5, "cached": 1.25, "output": 10}}).encode()
    assert price_table(text, "prices.json")["gpt-4o"] == TOLD
    for content, name, told in (
        (b"[", "p.toml", "as TOML"),
        (b"[]", "p.json", "a table of prices for each model"),
        (b"{", "p.json", "as JSON"),
        (b"\xff", "p.toml", "as TOML"),
        (b"a = 1", "p.toml", "'a' is 1: must be a table"),
        (b"[a]\ninput = 1", "p.toml", "model 'a' lacks output"),
        (b"[a]\ninput = true\noutput = 1", "p.toml", "input=True must be"),
    ):
        with pytest.raises(InputError, match=told):
            price_table(content, name)
    book = PriceBook(at=AT, table=read, address="http://127.0.0.1:1/v1")
    assert (book.of("gpt-4o"), book.of("other"), book.of(None)) == (TOLD, None, None)


def test_published_prices_are_found_by_address_or_name() -> None:
    book = PriceBook(at=AT, address="https://api.openai.com/v1")
    found = book.of("gpt-4o-mini")
    assert found is not None
    assert found.live == Rates(Rate(150_000), Rate(600_000), cached=Rate(75_000))
    assert (found.batch.input, found.batch.output) == (Rate(75_000), Rate(300_000))
    assert found.tiers["priority"].output == Rate(1_000_000)
    assert PriceBook(at=AT, given="openai/gpt-4o-mini").of("anything") == found
    assert book.of("no-such-model") is None
    assert not PriceBook(at=AT, address="http://10.0.0.5:8000/v1").has_any
    assert not PriceBook(at=AT, address="https://llm.example.com/v1").has_any
    assert book.has_any
    with pytest.raises(InputError, match="PROVIDER/MODEL"):
        PriceBook(at=AT, given="openai/no-such-model")
    with pytest.raises(InputError, match="PROVIDER/MODEL"):
        PriceBook(at=AT, given="gpt-4o")


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("openai", "gpt-4o-mini"),
        ("google", "gemini-2.5-pro"),
        ("anthropic", "claude-sonnet-4-5"),
        ("openai", "text-embedding-3-small"),
    ],
)
@given(
    prompt=st.integers(0, 10**6), cached=st.integers(0, 10**6), written=st.integers(0, 10**6), out=st.integers(0, 10**5)
)
def test_published_prices_agree_with_their_own_calculator(
    provider: str, model: str, prompt: int, cached: int, written: int, out: int
) -> None:
    prices = PriceBook(at=AT, given=f"{provider}/{model}").of(None)
    assert prices is not None
    cached = min(cached, prompt)
    written = min(written, prompt - cached) if prices.live.cache_write else 0
    usage = Usage(input_tokens=prompt, cache_read_tokens=cached, cache_write_tokens=written, output_tokens=out)
    theirs = calc_price(usage, model, provider_id=provider, genai_request_timestamp=AT).total_price
    ours = TokensUsed(prompt, out, cached, written).cost(prices.live)
    if prices.live.cache_write is None or not written:
        assert Decimal(ours) / DOLLAR == theirs
    else:
        assert abs(Decimal(ours) / DOLLAR - theirs) < Decimal("1e-9")


def test_batches_are_not_taken_for_cheaper_than_they_may_be() -> None:
    together = published_prices("meta-llama/Llama-3.3-70B-Instruct-Turbo", at=AT, provider="together")
    assert together is not None
    assert together.batch == together.live
    groq = published_prices("moonshotai/kimi-k2-instruct-0905", at=AT, provider="groq")
    assert groq is not None
    assert groq.live.cached is not None
    assert (groq.batch.cached, groq.batch.input) == (None, groq.live.input.times(Fraction(1, 2)))


def test_all_published_prices_can_be_read() -> None:
    known = 0
    for provider in providers:
        for model in provider.models:
            found = published_prices(model.id, at=AT, provider=provider.id)
            if found is not None:
                known += 1
                assert 0 <= found.batch.input.most(10**6) <= found.live.input.most(10**6)
    assert known > 1000


@given(rates, rates, st.integers(0, 2 * 10**6))
def test_a_dearer_rate_is_nowhere_below_either(one: Rate, other: Rate, tokens: int) -> None:
    both = one.dearer(other)
    assert both.at(tokens) == max(one.at(tokens), other.at(tokens))


prices = st.builds(Rates, rates, rates, st.none() | rates, st.none() | rates, st.none() | rates)


@given(prices, prices, st.lists(st.integers(0, 10**5), min_size=5, max_size=5))
def test_no_use_is_cheaper_at_the_dearer_prices(one: Rates, other: Rates, tokens: list[int]) -> None:
    plain, output, *kinds = tokens
    used = TokensUsed(plain + sum(kinds), output, *kinds)
    assert used.cost(one.dearer(other)) >= max(used.cost(one), used.cost(other))


@given(rates, st.integers(0, 2 * 10**6), st.data())
def test_no_shorter_prompt_has_a_higher_price(rate: Rate, most: int, data: st.DataObject) -> None:
    assert rate.at(data.draw(st.integers(0, most))) <= rate.most(most)


@given(rates, st.fractions(0, 1), st.integers(0, 10**6))
def test_a_part_of_a_price_is_never_rounded_down(rate: Rate, factor: Fraction, tokens: int) -> None:
    assert 0 <= rate.times(factor).at(tokens) - rate.at(tokens) * factor < 1


@pytest.mark.parametrize(
    ("usage", "used"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}, TokensUsed(100, 7)),
        ({"prompt_tokens": 100, "total_tokens": 100}, TokensUsed(100, 0)),
        (
            {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}},
            TokensUsed(100, 7, 64),
        ),
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 20},
                "cache_creation": {"ephemeral_1h_input_tokens": 5},
            },
            TokensUsed(100, 7, 64, 15, 5),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 1, "prompt_cache_hit_tokens": 4}, TokensUsed(9, 1, 4)),
        (
            {"input_tokens": 50, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 10}},
            TokensUsed(50, 3, 10),
        ),
        (
            {"input_tokens": 5, "output_tokens": 3, "cache_read_input_tokens": 10, "cache_creation_input_tokens": 20},
            TokensUsed(35, 3, 10, 20),
        ),
        ({"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 11}}, None),
        ({"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"audio_tokens": 1}}, None),
        ({"total_tokens": 9}, TokensUsed(9, 0)),
        ({"total_tokens": 9, "output_tokens": 1}, None),
        ({"prompt_tokens": -1, "completion_tokens": 1}, None),
        ({"prompt_tokens": True, "completion_tokens": 1}, None),
        ({"prompt_tokens": 1.5, "completion_tokens": 1}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
)
def test_usage_is_read_in_all_forms(usage: Any, used: TokensUsed | None) -> None:
    assert read_usage({"usage": usage}) == used


@given(st.recursive(st.none() | st.integers() | st.text(), lambda each: st.dictionaries(st.text(), each)))
def test_nonsense_as_usage_is_no_usage(usage: Any) -> None:
    assert read_usage({"usage": usage}) is None


def test_costs_and_savings() -> None:
    live = Rates(Rate(100), Rate(1000), cached=Rate(10), cache_write=Rate(125), request=7)
    assert TokensUsed(10, 2).cost(live) == 7 + 1000 + 2000
    assert TokensUsed(10, 2, cached=4, written=3).cost(live) == 7 + 300 + 40 + 375 + 2000
    assert TokensUsed(10, 2, cached=4).saved_by_cache(live) == 4 * 90
    assert TokensUsed(10, 2, written=4).saved_by_cache(live) == -100
    tiered = Rates(Rate(1, ((100, 3),)), Rate(10, ((100, 20),)))
    assert (TokensUsed(100, 1).cost(tiered), TokensUsed(101, 1).cost(tiered)) == (110, 323)


def test_the_tier_that_was_given_is_paid() -> None:
    flex = Rates(Rate(1), Rate(1))
    prices = ModelPrices(TOLD.live, TOLD.batch, {"flex": flex})
    for answer, asked, expected in (
        ({}, None, TOLD.live),
        ({"service_tier": "default"}, "flex", TOLD.live),
        ({"service_tier": "flex"}, None, flex),
        ({}, "flex", flex),
        ({"service_tier": None}, "auto", TOLD.live),
        ({"service_tier": "unheard-of"}, None, None),
    ):
        assert rates_of(prices, answer, asked, batch=False) == expected
    assert rates_of(prices, {"service_tier": "unheard-of"}, None, batch=True) == TOLD.batch


def test_amounts() -> None:
    assert picodollars("budget", "5.00") == 5 * DOLLAR == picodollars("budget", 5)
    assert picodollars("budget", 0.1) == DOLLAR // 10
    for wrong in ("5 dollars", 0, -1, "nan", "inf", True, None, 10**9):
        with pytest.raises(InputError, match=r"budget=.*must be an amount in dollars"):
            picodollars("budget", wrong)
    shown = {0: "$0.00", DOLLAR: "$1.00", 1234 * DOLLAR: "$1,234.00", DOLLAR // 100: "$0.010", 123456: "$0.00000012"}
    assert {amount: shown_dollars(amount) for amount in shown} == shown
