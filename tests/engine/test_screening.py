"""Likeliest tokens found through the head in 8 bits, against all logits: ties and the worst weights included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright import Engine, SamplingParams
from batchwright.engine.bodies.compiled import screen_for, turn
from batchwright.engine.bodies.weights import Projection
from batchwright.engine.native.large_pages import Arena
from batchwright.engine.native.weight_panels import PANEL, quantize_rows

from .heads import assert_same_tokens, scaled_rows
from .support import STORY, needs_decoder

BF16 = torch.bfloat16

KINDS = st.sampled_from(["plain", "outliers", "sparse", "few", "near", "uneven", "one direction", "other direction"])


@needs_decoder
@settings(max_examples=120, deadline=None)
@given(
    units=st.integers(1, 9),
    vocab=st.integers(1, 700),
    heads=KINDS,
    rows=KINDS,
    norm=st.sampled_from([1.0, -3.0, 1e-20, 1e-30, 1e20]),
    greedy=st.lists(st.booleans(), min_size=1, max_size=70).filter(any),
    seed=st.integers(0, 99),
)
def test_as_from_all_logits(
    units: int, vocab: int, heads: str, rows: str, norm: float, greedy: list[bool], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = 32 * units
    head = scaled_rows(heads, vocab, hidden, generator)
    x = scaled_rows(rows, len(greedy), hidden, generator)
    x[:, 0] += 1  # a row of nothing but zeros has no norm
    assert_same_tokens(head, torch.full((hidden,), norm, dtype=BF16), x, greedy)


@needs_decoder
@settings(max_examples=120, deadline=None)
@given(
    units=st.integers(1, 5),
    vocab=st.integers(1, 700),
    heads=KINDS,
    rows=KINDS,
    shares=st.lists(st.none() | st.sampled_from([0.0, 0.005, 0.1, 0.9, 1.0]), min_size=1, max_size=40),
    seed=st.integers(0, 99),
)
def test_of_rows_with_masks_only_what_they_allow(
    units: int, vocab: int, heads: str, rows: str, shares: list[float | None], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = 32 * units
    head = scaled_rows(heads, vocab, hidden, generator)
    x = scaled_rows(rows, len(shares), hidden, generator)
    x[:, 0] += 1
    allowed = [None if share is None else torch.rand(vocab, generator=generator) < share for share in shares]
    assert_same_tokens(head, torch.ones(hidden, dtype=BF16), x, [True] * len(shares), allowed)


@needs_decoder
@pytest.mark.parametrize(("heads", "rows"), [("half", "beside"), ("single", "single"), ("few", "beside")])
@pytest.mark.parametrize("hidden", [32, 96, 256])
def test_where_rounding_decides(heads: str, rows: str, hidden: int) -> None:
    """Products that are small beside their bounds, and products that bfloat16 cannot tell from each other."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        head, x = scaled_rows(heads, 500, hidden, generator), scaled_rows(rows, 60, hidden, generator)
        assert_same_tokens(head, torch.ones(hidden, dtype=BF16), x, [True] * 60)


@needs_decoder
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 13, 90])
def test_rows_that_are_not_finite_and_rows_of_zeros(
    threads: int, rows: int, torch_threads: Callable[[int], None]
) -> None:
    torch_threads(threads)
    generator = torch.Generator().manual_seed(rows)
    head, x = (scaled_rows("plain", n, 96, generator) for n in (333, rows))
    x[0, 5] = torch.nan
    x[rows // 2, 7] = torch.inf
    assert_same_tokens(head, torch.ones(96, dtype=BF16), x, [True] * rows)
    some = [torch.rand(333, generator=generator) < 0.2 for _ in range(rows)]
    assert_same_tokens(head, torch.ones(96, dtype=BF16), x, [True] * rows, some)
    assert_same_tokens(head, torch.zeros(96, dtype=BF16), scaled_rows("plain", rows, 96, generator), [True] * rows)


def test_no_screen_for_weights_that_have_no_bounds() -> None:
    head = torch.randn(40, 64).to(BF16)
    assert screen_for(Projection(head), Arena(0)) is not None
    assert screen_for(Projection(head, torch.zeros(40)), Arena(0)) is None
    assert screen_for(Projection(head.float()), Arena(0)) is None
    for wrong in (torch.nan, torch.inf, 1e20):
        spoilt = head.clone()
        spoilt[3, 4] = wrong
        assert screen_for(Projection(spoilt), Arena(0)) is None


def turned(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float64)
    turn(x.double(), out)
    return out


@settings(max_examples=60, deadline=None)
@given(units=st.integers(1, 20), vocab=st.integers(1, 80), heads=KINDS, rows=KINDS, seed=st.integers(0, 99))
def test_no_product_is_farther_than_the_bound(units: int, vocab: int, heads: str, rows: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    head, x = (scaled_rows(kind, n, 32 * units, generator) for kind, n in ((heads, vocab), (rows, 20)))
    screen = screen_for(Projection(head), Arena(0))
    assert screen is not None
    assert screen.rough.scales is not None
    whole, scales = quantize_rows(turned(x))
    rounded = whole.double() * scales[:, None]
    padded = -(-vocab // PANEL) * PANEL
    columns = screen.rough.panels.transpose(1, 2).reshape(padded, -1)[:vocab]
    product = rounded @ (columns.double() * screen.rough.scales[:vocab, None]).T
    bound = x.double().norm(dim=1)[:, None] * screen.errors[:vocab]
    bound += (turned(x) - rounded).norm(dim=1)[:, None] * screen.lengths[:vocab]
    assert bool(((product - x.double() @ head.double().T).abs() <= bound * (1 + 1e-6)).all())
    if heads == rows == "plain":
        assert float(bound.mean()) < 0.05 * float((x.double().norm(dim=1)[:, None] * head.double().norm(dim=1)).mean())


@needs_decoder
def test_the_real_model(smollm2_path: Path) -> None:
    """Greedy requests beside others: the same tokens as from all logits."""
    prompts = [STORY, "A list of rivers:", "12 + 30 =", "def main():"] * 4
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    others = [
        greedy,
        replace(greedy, logprobs=2),
        replace(greedy, temperature=1.0, seed=3),
        replace(greedy, logit_bias={17: 4.0}),
        replace(greedy, min_tokens=5, ignore_eos=False),
        replace(greedy, presence_penalty=0.4),
    ]
    params = [others[index % len(others)] for index in range(len(prompts))]
    with Engine(smollm2_path, dtype="bfloat16", device="cpu") as engine:
        stack = engine.core.body.stack  # type: ignore[attr-defined]
        assert stack.screens
        screened = engine.generate(prompts, params)
        stack.screens = False
        whole = engine.generate(prompts, params)
    assert [one.token_ids for one in screened] == [one.token_ids for one in whole]
    assert [one.error for one in screened] == [None] * len(prompts)
