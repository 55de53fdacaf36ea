"""The core of exactness and attention once more, on a CUDA device where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchwright import Engine, SamplingParams
from batchwright.engine.attention import AttentionShape, KVShape, choose_attention
from batchwright.engine.attention.trial import disagreement
from batchwright.engine.bodies.llama import LlamaBody

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
        smollm2_path, dtype="float32", device="cuda", body=body, max_batch_tokens=max_batch_tokens, kv_memory="1GiB"
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


@pytest.mark.parametrize("name", ["reference", "sdpa", "triton"])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_the_kernels_pass_their_trial(dtype: torch.dtype, head_dim: int, group: int) -> None:
    chosen = choose_attention("triton", shape := KVShape(100, 16, 2, head_dim, dtype, CUDA))
    assert disagreement(chosen, shape, AttentionShape(2 * group, head_dim**-0.5)) is None


def test_the_fastest_is_chosen_and_decodes_are_replayed(smollm2_path: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [f"Number {index} is" for index in range(20)]
    with Engine(smollm2_path, device="cuda", kv_memory="400MB") as engine:
        together = [response.token_ids for response in engine.generate(prompts, params)]
        assert "triton attention" in engine.core.body.description
        body = engine.core.body
        assert isinstance(body, LlamaBody)
        assert body._graphs is not None
        assert body._graphs.disabled is None
        assert body._graphs.recorded == [24]
    with Engine(smollm2_path, device="cuda", kv_memory="400MB", attention="sdpa") as engine:
        plain = [response.token_ids for response in engine.generate(prompts, params)]
    # bfloat16 rounds differently, and a token that differs changes all after it: most do not.
    assert sum(one == other for one, other in zip(together, plain, strict=True)) >= 10


def test_a_shared_prefix_is_exact(smollm2_path: Path, prompts: list[list[int]]) -> None:
    common = max(prompts, key=len)
    several = [[*common[:1000], *prompt[:10]] for prompt in prompts[:12]]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    found = []
    for attention in ("auto", "reference"):
        with Engine(smollm2_path, dtype="float32", device="cuda", kv_memory="1GiB", attention=attention) as engine:
            found.append([response.token_ids for response in engine.generate(several, params)])
    assert found[0] == found[1]
