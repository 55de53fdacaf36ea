"""Greedy float32 output equals transformers' `generate` token for token, however it was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from batchwright import Engine, SamplingParams
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine.native import NativeKernels

from .support import NEW_TOKENS, confirmed_greedy, engines_over

MakeEngine = Callable[..., Engine]

GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


SHORT = [0, 2, 5, 6, 7, 11, 12, 13, 16, 19, 22, 24]
"""Places of prompts of up to 127 tokens."""
LONG = [28, 31, 34, 35, 38, 39]
"""Places of longer ones, four of which begin as another one does; the last is the longest."""


def outputs(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    responses = engine.generate(prompts, GREEDY)
    assert [response.error for response in responses] == [None] * len(prompts)
    return [list(response.token_ids) for response in responses]


@dataclass(frozen=True)
class Known:
    """Prompts, and the greedy float32 continuation of each by the narrow model in transformers."""

    prompts: dict[int, list[int]]
    answers: dict[int, list[int]]

    def check(self, engine: Engine, places: list[int], *, alone: bool = False) -> None:
        """Fail unless the engine continues the prompts at these places so, one after the other or all together."""
        for some in [[place] for place in places] if alone else [places]:
            found = outputs(engine, [self.prompts[place] for place in some])
            assert found == [self.answers[place] for place in some]


@pytest.fixture(scope="module")
def make_engine(narrow_path: Path) -> Iterator[MakeEngine]:
    """Engines over a narrow model, for the many ways of computing."""
    yield from engines_over(narrow_path)


@pytest.fixture(scope="module")
def known(narrow_path: Path, prompts: list[list[int]], make_engine: MakeEngine) -> Known:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(narrow_path, dtype=torch.float32)
    chosen = {place: prompts[place] for place in SHORT + LONG}
    likely = outputs(make_engine(), [*chosen.values()])
    answers = [confirmed_greedy(model, *pair) for pair in zip(chosen.values(), likely, strict=True)]
    return Known(chosen, dict(zip(chosen, answers, strict=True)))


def test_the_prompts_are_as_they_should_be(
    prompts: list[list[int]], fewer_prompts: list[list[int]], expected: list[list[int]], known: Known
) -> None:
    lengths = sorted(map(len, prompts))
    assert len(prompts) == 40
    assert lengths[0] == 5
    assert lengths[-1] == 1500
    assert len(fewer_prompts) == 9
    assert len(set(map(tuple, expected))) == 9
    assert len(set(map(tuple, known.answers.values()))) > 15


def test_all_together(together: tuple[list[list[int]], EngineStats], expected: list[list[int]]) -> None:
    found, stats = together
    assert found == expected
    assert stats.cached_tokens >= 64 + 256
    assert stats.occupancy_peak > 8


def test_all_together_in_transformers(make_engine: MakeEngine, known: Known) -> None:
    engine = make_engine(body="transformers")
    known.check(engine, [*SHORT, 38, 39])
    assert engine.stats.cached_tokens > 800


def test_alone(make_engine: MakeEngine, known: Known) -> None:
    engine = make_engine(prefix_caching=False)
    # A few: each takes as many steps as all of them together.
    known.check(engine, [0, 7, 16, 28], alone=True)
    assert engine.stats.occupancy_peak == 1


def test_alone_with_a_warm_prefix_cache(make_engine: MakeEngine, known: Known) -> None:
    engine = make_engine()
    chosen = SHORT[::4]
    for _ in range(2):
        before = engine.stats.cached_tokens
        known.check(engine, chosen, alone=True)
    cached = engine.stats.cached_tokens - before
    assert cached == sum((len(known.prompts[place]) - 1) // 16 * 16 for place in chosen) > 0


@pytest.mark.parametrize(("body", "prefix_caching"), [("fused", True), ("fused", False), ("transformers", True)])
def test_steps_of_64_tokens(make_engine: MakeEngine, known: Known, body: str, prefix_caching: bool) -> None:
    # Two that begin alike among them; the longest once.
    some = [*SHORT[::3], 28, 34, 35, *([39] if body == "fused" and prefix_caching else [])]
    engine = make_engine(body=body, max_batch_tokens=64, prefix_caching=prefix_caching)
    known.check(engine, some)
    assert (engine.stats.cached_tokens > 0) == prefix_caching


@pytest.mark.parametrize(("body", "prefix_caching"), [("fused", True), ("fused", False), ("transformers", True)])
def test_kv_so_small_that_sequences_are_preempted(
    make_engine: MakeEngine, known: Known, body: str, prefix_caching: bool
) -> None:
    bytes_per_token = 2 * 2 * 2 * 16 * 4
    engine = make_engine(body=body, prefix_caching=prefix_caching, kv_memory=bytes_per_token * 16 * 10)
    known.check(engine, SHORT[:10:2])
    assert engine.stats.preemptions > 0
    assert engine.stats.kv_blocks_peak <= engine.stats.kv_blocks == 10


def test_kv_for_little_more_than_the_longest_prompt(make_engine: MakeEngine, known: Known) -> None:
    bytes_per_token = 2 * 2 * 2 * 16 * 4
    engine = make_engine(kv_memory=bytes_per_token * 16 * 96)
    known.check(engine, [2, 7, 16, 31, 39])
    assert len(known.prompts[39]) > 15 * 96
    assert engine.stats.kv_blocks_peak <= engine.stats.kv_blocks == 96


@pytest.mark.parametrize("body", ["fused", "transformers"])
@pytest.mark.parametrize("attention", ["native", "sdpa", "reference"])
def test_every_attention(
    make_engine: MakeEngine, known: Known, attention: str, body: str, native: NativeKernels | str
) -> None:
    if attention == "native" and isinstance(native, str):
        pytest.skip(native)
    if attention == "native" and torch.cuda.is_available():
        pytest.skip("engines are on the GPU here")
    engine = make_engine(attention=attention, body=body, max_batch_tokens=200)
    assert engine.core.body.attention.name == attention
    known.check(engine, [*SHORT[::3], 31])
