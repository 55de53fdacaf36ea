"""Prompts, what transformers makes of them, and small models of any architecture."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from batchwright import Engine, SamplingParams
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine.native import NativeKernels, load_kernels

from .support import NEW_TOKENS, confirmed_greedy, engines_over, nothing_left, slices, threads

# Triton reads this when it is first imported: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

_LENGTHS = [5, 6, 7, 9, 12, 15, 16, 17, 20, 24, 28, 31, 32, 33, 40, 47, 48, 49, 56, 64, 65, 80, 96, 112, 127, 128]
_LONGER = [129, 150, 192, 240, 256, 300, 350, 420]
_SHARED = [(64, 20), (64, 40), (256, 1), (256, 30), (900, 50), (900, 600)]
"""(tokens of a common prefix, tokens after it)."""
_FEWER = [0, 6, 7, 12, 19, 34, 35, 36, 37]
"""Places of some of the prompts, around the sizes of blocks; the last four begin alike, two of them for longer."""


@pytest.fixture(scope="session")
def prompts(smollm2_path: Path) -> list[list[int]]:
    """40 prompts of 5 to 1,500 tokens; six of them begin as another one does."""
    text = (Path(__file__).parent / "data" / "passages.txt").read_text(encoding="utf-8")
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(smollm2_path)(text)["input_ids"]
    several = slices(ids, _LENGTHS + _LONGER)
    several += [[*slices(ids, [head])[0], *slices(ids[head + 7 * tail :] + ids, [tail])[0]] for head, tail in _SHARED]
    return several


@pytest.fixture(scope="session")
def fewer_prompts(prompts: list[list[int]]) -> list[list[int]]:
    """Those of `prompts` that the whole model continues: 9 of 5 to 286 tokens."""
    return [prompts[place] for place in _FEWER]


@pytest.fixture(scope="session")
def together(smollm2_path: Path, fewer_prompts: list[list[int]]) -> tuple[list[list[int]], EngineStats]:
    """What the engine adds to the fewer prompts at once, in its default form but in float32; and its figures."""
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with threads(2), Engine(smollm2_path, dtype="float32", kv_memory="400MB") as engine:
        responses = engine.generate(fewer_prompts, greedy)
        assert [response.error for response in responses] == [None] * len(fewer_prompts)
        return [list(response.token_ids) for response in responses], engine.stats.copy()


@pytest.fixture(scope="session")
def expected(
    smollm2_path: Path, fewer_prompts: list[list[int]], together: tuple[list[list[int]], EngineStats]
) -> list[list[int]]:
    """The greedy float32 continuation of each of the fewer prompts by transformers' own model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    return [confirmed_greedy(model, *pair) for pair in zip(fewer_prompts, together[0], strict=True)]


@pytest.fixture(scope="module")
def make_engine(smollm2_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engines over the real model in float32, closed when the module is done."""
    yield from engines_over(smollm2_path)


@pytest.fixture
def native() -> NativeKernels | str:
    """The compiled float32 kernels, or why there are none."""
    return load_kernels(torch.float32)


@pytest.fixture(scope="module")
def shared_engine(shallow_path: Path) -> Iterator[Engine]:
    with Engine(shallow_path, dtype="float32", kv_memory="100MB", max_model_len=512) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """One engine for the tests of a module, each of which must leave nothing behind in it."""
    yield shared_engine
    assert nothing_left(shared_engine)


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads compute, for one test."""
    with threads(torch.get_num_threads()):
        yield torch.set_num_threads


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Two threads compute, for the tests of a module."""
    with threads(2):
        yield
