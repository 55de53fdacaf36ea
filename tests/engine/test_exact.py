"""Greedy float32 output equals transformers' `generate` token for token, however it was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from batchwright import Engine, SamplingParams
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine.native import NativeKernels

from .support import NEW_TOKENS, confirmed_greedy, engines_over

MakeEngine = Callable[..., Engine]

GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def outputs(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    responses = engine.generate(prompts, GREEDY)
    assert [response.error for response in responses] == [None] * len(prompts)
    return [list(response.token_ids) for response in responses]


@pytest.fixture(scope="module")
def make_engine(shallow_path: Path) -> Iterator[MakeEngine]:
    """Engines over six layers of the model, for the many ways of computing."""
    yield from engines_over(shallow_path)


@pytest.fixture(scope="module")
def by_six_layers(shallow_path: Path, prompts: list[list[int]], make_engine: MakeEngine) -> list[list[int]]:
    """The greedy float32 continuation of each prompt by six layers of transformers' own model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shallow_path, dtype=torch.float32)
    likely = outputs(make_engine(), prompts)
    return [confirmed_greedy(model, *pair) for pair in zip(prompts, likely, strict=True)]


def test_the_prompts_are_as_they_should_be(prompts: list[list[int]], expected: list[list[int]]) -> None:
    lengths = sorted(map(len, prompts))
    assert len(prompts) == 40
    assert lengths[0] == 5
    assert lengths[-1] == 1500
    assert len(set(map(tuple, expected))) > 35


def test_all_together(together: tuple[list[list[int]], EngineStats], expected: list[list[int]]) -> None:
    found, stats = together
    assert found == expected
    assert stats.cached_tokens > 900
    assert stats.occupancy_peak > 8


def test_all_together_in_transformers(
    make_engine: MakeEngine, prompts: list[list[int]], by_six_layers: list[list[int]]
) -> None:
    engine = make_engine(body="transformers")
    # Not those of middle length, which take most of the time: short ones, and the two longest, which begin alike.
    some = [*(index for index, prompt in enumerate(prompts) if len(prompt) < 129), len(prompts) - 2, len(prompts) - 1]
    assert outputs(engine, [prompts[index] for index in some]) == [by_six_layers[index] for index in some]
    assert engine.stats.cached_tokens > 800


def test_alone(make_engine: MakeEngine, prompts: list[list[int]], by_six_layers: list[list[int]]) -> None:
    engine = make_engine(prefix_caching=False)
    # A few: each takes as many steps as all of them together.
    assert [outputs(engine, [prompt])[0] for prompt in prompts[::9]] == by_six_layers[::9]
    assert engine.stats.occupancy_peak == 1


def test_alone_with_a_warm_prefix_cache(
    make_engine: MakeEngine, prompts: list[list[int]], by_six_layers: list[list[int]]
) -> None:
    engine = make_engine()
    chosen = [index for index, prompt in enumerate(prompts) if len(prompt) < 130][::6]
    for _ in range(2):
        before = engine.stats.cached_tokens
        assert [outputs(engine, [prompts[index]])[0] for index in chosen] == [by_six_layers[index] for index in chosen]
    assert engine.stats.cached_tokens - before == sum((len(prompts[index]) - 1) // 16 * 16 for index in chosen)


@pytest.mark.parametrize(("body", "prefix_caching"), [("fused", True), ("fused", False), ("transformers", True)])
def test_steps_of_64_tokens(
    make_engine: MakeEngine, prompts: list[list[int]], by_six_layers: list[list[int]], body: str, prefix_caching: bool
) -> None:
    # Two that begin alike among them; the longest once.
    some = [*range(0, 34, 4), 34, 35, *([39] if body == "fused" and prefix_caching else [])]
    engine = make_engine(body=body, max_batch_tokens=64, prefix_caching=prefix_caching)
    assert outputs(engine, [prompts[index] for index in some]) == [by_six_layers[index] for index in some]
    assert (engine.stats.cached_tokens > 0) == prefix_caching


@pytest.mark.parametrize(("body", "prefix_caching"), [("fused", True), ("fused", False), ("transformers", True)])
def test_kv_so_small_that_sequences_are_preempted(
    make_engine: MakeEngine, prompts: list[list[int]], by_six_layers: list[list[int]], body: str, prefix_caching: bool
) -> None:
    short = [index for index, prompt in enumerate(prompts) if len(prompt) <= 80][::3]
    bytes_per_token = 6 * 2 * 3 * 64 * 4
    engine = make_engine(body=body, prefix_caching=prefix_caching, kv_memory=bytes_per_token * 16 * 10)
    assert outputs(engine, [prompts[index] for index in short]) == [by_six_layers[index] for index in short]
    assert engine.stats.preemptions > 0
    assert engine.stats.kv_blocks_peak <= engine.stats.kv_blocks == 10


def test_kv_for_little_more_than_the_longest_prompt(
    make_engine: MakeEngine, prompts: list[list[int]], by_six_layers: list[list[int]]
) -> None:
    bytes_per_token = 6 * 2 * 3 * 64 * 4
    engine = make_engine(kv_memory=bytes_per_token * 16 * 96)
    assert outputs(engine, prompts[3::6]) == by_six_layers[3::6]
    assert max(map(len, prompts)) == len(prompts[39]) > 15 * 96
    assert engine.stats.kv_blocks_peak <= engine.stats.kv_blocks == 96


@pytest.mark.parametrize("body", ["fused", "transformers"])
@pytest.mark.parametrize("attention", ["native", "sdpa", "reference"])
def test_every_attention(
    make_engine: MakeEngine,
    prompts: list[list[int]],
    by_six_layers: list[list[int]],
    attention: str,
    body: str,
    native: NativeKernels | str,
) -> None:
    if attention == "native" and isinstance(native, str):
        pytest.skip(native)
    if attention == "native" and torch.cuda.is_available():
        pytest.skip("engines are on the GPU here")
    some = [*[index for index, prompt in enumerate(prompts) if len(prompt) < 100][::4], len(prompts) - 3]
    engine = make_engine(attention=attention, body=body, max_batch_tokens=200)
    assert engine.core.body.attention.name == attention
    assert outputs(engine, [prompts[index] for index in some]) == [by_six_layers[index] for index in some]
