"""The core of exactness and attention once more, on a CUDA device where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchwright import Engine, SamplingParams

from .paged import Case, Paged, Problem, textbook
from .support import NEW_TOKENS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("body", ["fused", "transformers"])
@pytest.mark.parametrize("max_batch_tokens", [64, 2048])
def test_exact(
    smollm2_path: Path, prompts: list[list[int]], expected: list[list[int]], body: str, max_batch_tokens: int
) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(
        smollm2_path,
        dtype="float32",
        device="cuda",
        body=body,
        max_batch_tokens=max_batch_tokens,
        kv_memory="1GiB",
    ) as engine:
        assert [list(response.token_ids) for response in engine.generate(prompts, params)] == expected
        assert engine.stats.cached_tokens > 0


def test_preemption(smollm2_path: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    short = [index for index, prompt in enumerate(prompts) if len(prompt) <= 80]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    kv_memory = 30 * 2 * 3 * 64 * 4 * 16 * 10
    with Engine(smollm2_path, dtype="float32", device="cuda", kv_memory=kv_memory) as engine:
        responses = engine.generate([prompts[index] for index in short], params)
        assert [list(response.token_ids) for response in responses] == [expected[index] for index in short]
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention(name: str, dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    lengths = ((0, 70), (40, 1), (45, 1), (300, 1), (0, 1), (100, 17))
    case = Case(lengths, kv_heads=2, group=3, head_dim=64, window=window, softcap=softcap, dtype=dtype)
    problem = Problem.of(case)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(
        Paged(name, case, device=CUDA).run(problem).double(), textbook(problem), rtol=tolerance, atol=tolerance
    )


def test_a_seed_gives_the_same_tokens_twice(smollm2_path: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=4, ignore_eos=True)
    with Engine(smollm2_path, device="cuda", kv_memory="200MB") as engine:
        first, second = (engine.generate("The sea", params)[0].token_ids for _ in range(2))
    assert first == second
