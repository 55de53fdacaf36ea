"""The choice of tokens: distributions against a plain reference, and every row as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchwright import SamplingParams
from batchwright.engine import sampling
from batchwright.engine.native import load_kernels
from batchwright.engine.sampling import Sampled, SamplingState, sample

Floats = np.ndarray[Any, np.dtype[np.float64]]


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with the compiled kernels, where there are some, and with torch."""
    if request.param == "torch":
        monkeypatch.setattr(sampling, "_kernels", lambda logits: None)
    elif isinstance(reason := load_kernels(torch.float32), str):
        pytest.skip(reason)


def state(index: int = 0, prompt: Sequence[int] = (0,), ends: Collection[int] = (), **params: Any) -> SamplingState:
    return SamplingState(SamplingParams(**params), index, prompt, frozenset(ends))


def tokens(logits: Tensor, states: list[SamplingState]) -> list[int | None]:
    return [outcome.token for outcome in sample(logits, states)]


def probabilities(
    logits: Floats, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Floats:
    """Temperature, then top-k, then min-p, then top-p, each over what the one before left."""
    scaled = logits / temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    keep[order[: top_k or len(p)]] = True
    p = np.where(keep, p, 0.0)
    p = np.where(p >= min_p * p.max(), p, 0.0)
    p /= p.sum()
    descending = p[order]
    inside = np.cumsum(descending) - descending < top_p
    p[order[~inside]] = 0.0
    p /= p.sum()
    return p


def chi_square(counts: Any, expected: Any) -> float:
    """How many standard deviations the chi-square statistic lies above its mean; rare tokens are put together."""
    total = counts.sum()
    rare = expected * total < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * total
    present = wanted > 0
    assert observed[~present].sum() == 0
    statistic = float(((observed[present] - wanted[present]) ** 2 / wanted[present]).sum())
    freedom = max(1, int(present.sum()) - 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


def draw_many(logits: Tensor, draws: int, **params: Any) -> Floats:
    rows = logits[None].expand(draws, -1).contiguous()
    chosen = tokens(rows, [state(seed=seed, max_tokens=1, **params) for seed in range(draws)])
    return np.bincount(np.array(chosen, dtype=np.int64), minlength=logits.shape[0]).astype(np.float64)


CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.1},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 30, "min_p": 0.05},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.6, "min_p": 0.15},
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_distribution(params: dict[str, Any]) -> None:
    logits = torch.randn(150, generator=torch.Generator().manual_seed(1)) * 1.5
    expected = probabilities(logits.double().numpy(), **params)
    counts = draw_many(logits, 4000, **params)
    assert set(counts.nonzero()[0]) <= set(expected.nonzero()[0])
    assert chi_square(counts, expected) < 5


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 3000, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.02, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.001},
    ],
    ids=str,
)
def test_distribution_over_a_large_vocabulary(params: dict[str, Any]) -> None:
    """The nucleus of these logits is wider than what is sorted at first."""
    size = 49152
    logits = torch.randn(size, generator=torch.Generator().manual_seed(2)) * 1.2
    expected = probabilities(logits.double().numpy(), **params)
    counts = np.zeros(size)
    for part in range(8):
        states = [state(seed=1000 * part + row, max_tokens=1, **params) for row in range(50)]
        np.add.at(counts, np.array(tokens(logits[None].expand(50, -1), states), dtype=np.int64), 1)
    # A token whose probability lies at the very edge may fall on either side of it.
    edge = np.sort(expected[expected > 0])[: max(2, int(0.002 * (expected > 0).sum()))].max()
    outside = counts[expected == 0]
    assert outside.sum() <= 2 * 400 * edge
    # 32 groups of tokens of like total probability: single tokens are too rare to count.
    order = np.argsort(-expected)
    group = np.minimum((np.cumsum(expected[order]) * 32).astype(int), 31)
    grouped = np.bincount(group, counts[order], 32), np.bincount(group, expected[order], 32)
    assert chi_square(grouped[0] * 1.0, grouped[1] / grouped[1].sum()) < 5


def test_top_p_is_a_share_of_what_top_k_and_min_p_leave() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # 0.4 and 0.3 are left: 0.571 and 0.429 of their sum, so 0.55 of it is reached by the first alone.
    assert draw_many(logits, 300, temperature=1.0, top_k=2, top_p=0.55)[1] == 0
    assert draw_many(logits, 300, temperature=1.0, min_p=0.6, top_p=0.55)[1] == 0
    assert draw_many(logits, 300, temperature=1.0, top_p=0.55)[1] > 0


def test_top_p_over_a_large_top_k() -> None:
    """Of 3,000 equal tokens among many, half a nucleus is 1,500, though 1,024 are sorted at first."""
    logits = torch.zeros(8000)
    logits[:3000] = 5.0
    counts = draw_many(logits, 600, temperature=1.0, top_k=3000, top_p=0.3)
    assert 0 < np.count_nonzero(counts) <= 900
    assert counts[3000:].sum() == 0


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_hardly_any_temperature_is_greedy(temperature: float, more: dict[str, Any]) -> None:
    logits = torch.tensor([[1.0, 30.0, -40.0, 29.0, 2.0, 3.0, 4.0]] * 5)
    states = [state(seed=i, temperature=temperature, **more) for i in range(5)]
    assert tokens(logits, states) == [1] * 5


def penalised(
    logits: Floats, prompt: list[int], output: list[int], *, repetition: float, presence: float, frequency: float
) -> Floats:
    own = logits.copy()
    for token in set(prompt + output):
        own[token] = own[token] / repetition if own[token] > 0 else own[token] * repetition
    for token in set(output):
        own[token] -= presence + frequency * output.count(token)
    return own


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.7])
@pytest.mark.parametrize(("presence", "frequency"), [(0.0, 0.0), (0.6, 0.0), (0.0, 0.4), (-1.0, 2.0)])
def test_penalties(repetition: float, presence: float, frequency: float) -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(3))
    prompt, output = [1, 2, 3, 3, 9], [3, 5, 5, 5, 7]
    own = state(
        prompt=prompt,
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={11: 1.5, 5: -0.25},
    )
    for token in output:
        own.record(token)
    wanted = penalised(
        logits.double().numpy(), prompt, output, repetition=repetition, presence=presence, frequency=frequency
    )
    wanted[11] += 1.5
    wanted[5] -= 0.25
    adjusted = logits.clone()
    own.adjust(adjusted)
    np.testing.assert_allclose(adjusted.numpy(), wanted, rtol=1e-5, atol=1e-6)
    assert tokens(logits[None], [own]) == [int(wanted.argmax())]


def test_greedy_with_penalties_follows_them() -> None:
    own = state(temperature=0.0, presence_penalty=2.0)
    logits = torch.tensor([[3.0, 2.0, 1.5, -4.0]])
    chosen = []
    for _ in range(3):
        (token,) = tokens(logits, [own])
        assert token is not None
        own.record(token)
        chosen.append(token)
    assert chosen == [0, 1, 2]


def test_logit_bias_bans_and_forces() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]] * 50)
    banned = tokens(logits, [state(seed=i, temperature=1.0, logit_bias={0: -100.0}) for i in range(50)])
    assert 0 not in banned
    assert tokens(logits, [state(seed=i, temperature=1.0, logit_bias={3: 100.0}) for i in range(50)]) == [3] * 50


def test_ends_are_banned_until_min_tokens() -> None:
    logits = torch.tensor([[1.0, 9.0, 2.0, 8.0]])
    own = state(ends={1, 3}, temperature=0.0, min_tokens=2, max_tokens=5)
    for wanted in (2, 2, 1):
        assert tokens(logits, [own]) == [wanted]
        own.record(wanted)


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(4)) * 2
    states = [
        state(temperature=0.0, logprobs=0),
        state(temperature=0.3, seed=1, top_k=5, logit_bias={7: 50.0}, logprobs=5),
        state(temperature=1.0, seed=2, logprobs=20, repetition_penalty=2.0),
    ]
    own = logits.log_softmax(-1)
    for row, (outcome, count) in enumerate(zip(sample(logits, states), (0, 5, 20), strict=True)):
        assert outcome.token is not None
        assert outcome.logprobs is not None
        assert outcome.logprobs.chosen == pytest.approx(own[row, outcome.token].item(), abs=1e-6)
        best, ids = own[row].topk(count)
        assert outcome.logprobs.top_ids == ids.tolist()
        assert outcome.logprobs.top == pytest.approx(best.tolist(), abs=1e-6)


def test_more_logprobs_than_tokens() -> None:
    (outcome,) = sample(torch.zeros(1, 4), [state(temperature=0.0, logprobs=20)])
    assert outcome.logprobs is not None
    assert sorted(outcome.logprobs.top_ids) == [0, 1, 2, 3]


_MIXED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.2},
    {"temperature": 1.5, "min_p": 0.01, "logprobs": 3},
    {"temperature": 2.0, "top_k": 2000, "top_p": 0.99},
    {"temperature": 1.0, "presence_penalty": 0.5, "logit_bias": {3: 2.0}},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 49152])
def test_a_seeded_row_is_the_same_in_any_company(dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(14, vocab, generator=generator) * 2).to(dtype)

    def fresh(row: int) -> SamplingState:
        return state(prompt=[row], seed=100 + row, **_MIXED[row % len(_MIXED)])

    alone = [sample(logits[row : row + 1], [fresh(row)])[0] for row in range(14)]
    for _ in range(4):
        order = torch.randperm(14, generator=generator).tolist()
        for rows in (order, order[:5], order[9:]):
            assert sample(logits[rows], [fresh(row) for row in rows]) == [alone[row] for row in rows]


def draw_at(uniform: float, *states: SamplingState) -> None:
    """Have the next tokens drawn with this number."""
    for each in states:
        each._coming.clear()
        each._coming.append(uniform)


def test_random_numbers_are_the_same_however_many_are_asked_for() -> None:
    one_by_one, ahead = state(seed=1, temperature=1.0), state(seed=1, temperature=1.0)
    wanted = []
    for token in range(5):
        wanted += one_by_one.uniforms(1)
        one_by_one.record(token)
    assert ahead.uniforms(5) == wanted
    ahead.record(0)
    ahead.record(1)
    assert ahead.uniforms(3) == wanted[2:]
    unasked = state(seed=1, temperature=1.0)
    unasked.record(0)
    assert unasked.uniforms(4) == wanted[1:]


def test_weights_of_a_row_are_bitwise_the_same_in_any_company() -> None:
    """The target falls on the very edge of a token's weight, where a difference in rounding would show."""
    logits = torch.randn(8, 49152, generator=torch.Generator().manual_seed(6)) * 2
    several: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.95}]
    for params in several:
        for row in range(3):
            own = state(seed=0, **params)
            low, high = 0.5, 1.0
            draw_at(low, own)
            (first,) = tokens(logits[row : row + 1], [own])
            for _ in range(40):  # bisection for a uniform at which the choice flips
                middle = (low + high) / 2
                draw_at(middle, own)
                (token,) = tokens(logits[row : row + 1], [own])
                low, high = (middle, high) if token == first else (low, middle)
            for uniform in (low, high):
                mates = [state(seed=i, **params) for i in range(8)]
                draw_at(uniform, own, mates[row])
                assert tokens(logits, mates)[row] == tokens(logits[row : row + 1], [own])[0]


def test_the_same_seed_gives_different_completions_of_one_prompt() -> None:
    logits = torch.zeros(6, 5000)
    assert len(set(tokens(logits, [state(index=i, seed=9, temperature=1.0) for i in range(6)]))) > 4


def test_a_step_that_is_computed_again_draws_the_same() -> None:
    logits = torch.zeros(1, 5000)
    own = state(seed=3, temperature=1.0)
    (first,) = tokens(logits, [own])
    assert tokens(logits, [own]) == [first]
    assert first is not None
    own.record(first)
    assert tokens(logits, [own]) != [first]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}]
)
def test_a_row_that_is_not_finite_has_no_token(bad: float, params: dict[str, Any]) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(7))
    without = sample(logits[[0, 2]], [state(seed=row, **params) for row in (0, 2)])
    logits[1, 499] = bad
    outcomes = sample(logits, [state(seed=row, **params) for row in range(3)])
    assert outcomes[1] == Sampled(None)
    assert [outcomes[0], outcomes[2]] == without


def test_a_row_of_nothing_but_minus_infinity_has_no_token() -> None:
    assert tokens(torch.full((1, 50), -math.inf), [state(temperature=1.0)]) == [None]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 10}])
def test_minus_infinity_is_never_drawn(params: dict[str, Any]) -> None:
    logits = torch.full((40, 300), -math.inf)
    logits[:, [17, 230]] = 0.0
    assert set(tokens(logits, [state(seed=i, **params) for i in range(40)])) <= {17, 230}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_greedy_ties_go_to_the_lowest_id(dtype: torch.dtype, logprobs: int | None) -> None:
    logits = torch.randint(0, 3, (64, 3000), generator=torch.Generator().manual_seed(8)).to(dtype)
    wanted = [int(row.argmax()) for row in logits.float().numpy()]
    assert tokens(logits, [state(temperature=0.0, logprobs=logprobs)] * 64) == wanted


@pytest.mark.parametrize("vocab", [1, 127, 1000, 49152])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.01},
        {"temperature": 1e-300},
        {"min_p": 0.05},
        {"top_k": 1},
        {"top_k": 40, "min_p": 0.1},
        {"top_p": 0.5},
        {"temperature": 2.0, "top_p": 0.95},
        {"temperature": 0.3, "top_p": 0.999999},
        {"temperature": 2.0, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 3.0, "top_p": 0.999, "top_k": 5000},
    ],
)
def test_kernels_and_torch_draw_the_same_tokens(vocab: int, params: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(40, vocab, generator=generator)
    logits[::3, : vocab // 2] = -torch.inf
    some = list(range(0, 40, 2))
    each = [SamplingParams(**({"temperature": 1.0} | params))] * len(some)
    uniforms = torch.rand(len(some), generator=generator, dtype=torch.float64).tolist()
    logits[2, 7 % vocab], logits[3, 8 % vocab] = torch.nan, torch.inf
    greatest, tokens = sampling.choose(logits, some, each, uniforms)
    assert np.array_equal(greatest, logits.amax(-1).numpy(), equal_nan=True)
    is_drawn = torch.zeros(len(logits), dtype=torch.bool)
    is_drawn[some] = True
    is_drawn[[2, 3]] = False
    plain, drawn = (~is_drawn).nonzero()[:, 0].tolist(), is_drawn.nonzero()[:, 0].tolist()
    uniforms = [uniforms[some.index(row)] for row in drawn]
    assert [tokens[row] for row in drawn] == sampling.draw_with_torch(logits[drawn], each[: len(drawn)], uniforms)
    likeliest = sampling.row_maxima(logits)[1]
    assert [tokens[row] for row in plain] == likeliest[plain].tolist()


def test_a_draw_where_sums_end_is_not_a_token_without_a_chance() -> None:
    """The same weights summed in another order may come to less than what is looked for among them."""
    logits = -torch.rand(12000, generator=torch.Generator().manual_seed(8))
    logits[::3] -= 21
    logits[0] = -torch.inf
    weights = logits.double().exp()
    likely = float(weights[logits > -2].sum() / weights.sum())
    uniforms = [likely * (1 + step * 1e-9) for step in range(-100, 101)]
    each = [SamplingParams(temperature=1.0, top_p=1 - 1e-12)] * len(uniforms)
    _, drawn = sampling.choose(
        logits.expand(len(uniforms), -1).contiguous(), list(range(len(uniforms))), each, uniforms
    )
    assert 0 not in drawn


@pytest.mark.parametrize("values", [1, 2, 5, 300])
@pytest.mark.parametrize("params", [{"top_p": 0.2}, {"top_p": 0.97}, {"top_k": 70}, {"top_k": 3, "top_p": 0.5}])
def test_a_draw_is_as_far_down_the_order_where_logits_are_equal(values: int, params: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randint(0, values, (30, 5000), generator=generator) * 0.25).bfloat16()
    uniforms = torch.rand(len(logits), generator=generator, dtype=torch.float64).tolist()
    each = [SamplingParams(**({"temperature": 1.0} | params))] * len(logits)
    _, drawn = sampling.choose(logits, list(range(len(logits))), each, uniforms)
    for row, uniform, token in zip(logits.double().numpy(), uniforms, drawn, strict=True):
        order = np.argsort(-row, kind="stable")
        wanted = order[np.searchsorted(np.cumsum(probabilities(row, **params)[order]), uniform, side="right")]
        assert row[token] == row[wanted]
