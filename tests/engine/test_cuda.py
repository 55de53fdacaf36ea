"""The core of exactness and attention once more, on a CUDA device where there is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from batchwright import Engine, SamplingParams
from batchwright.engine.attention import AttentionShape, KVShape, choose_attention
from batchwright.engine.attention.fa3 import FlashAttention3, load_flash
from batchwright.engine.attention.paged import ReferenceAttention
from batchwright.engine.attention.trial import disagreement
from batchwright.engine.bodies import load_body
from batchwright.engine.bodies.composed import ComposedStack
from batchwright.engine.bodies.linear import FP8_CAPABILITY, make_fp8_linear, to_fp8
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.bodies.weights import Projection
from batchwright.engine.sampling import maxima_are_torchs
from batchwright.engine.step.batch import batch_of
from batchwright.engine_config import EngineConfig

from .paged import Case, Paged, Problem, textbook
from .support import NEW_TOKENS, TINY, tiny_model

pytest.importorskip("triton", reason="Triton is not installed")
from batchwright.engine.bodies.triton_ops import FusedOps
from batchwright.engine.bodies.triton_products import BLOCKS, StreamedProducts
from batchwright.engine.triton_maxima import row_maxima

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("body", ["fused", "transformers"])
@pytest.mark.parametrize("max_batch_tokens", [64, 2048])
def test_exact(
    smollm2_path: Path, fewer_prompts: list[list[int]], expected: list[list[int]], body: str, max_batch_tokens: int
) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(
        smollm2_path, dtype="float32", device="cuda", body=body, max_batch_tokens=max_batch_tokens, kv_memory="1GiB"
    ) as engine:
        assert [list(response.token_ids) for response in engine.generate(fewer_prompts, params)] == expected
        assert engine.stats.cached_tokens > 0


def test_preemption(smollm2_path: Path, fewer_prompts: list[list[int]], expected: list[list[int]]) -> None:
    short = [index for index, prompt in enumerate(fewer_prompts) if len(prompt) <= 80]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    kv_memory = 30 * 2 * 3 * 64 * 4 * 16 * 10
    with Engine(smollm2_path, dtype="float32", device="cuda", kv_memory=kv_memory) as engine:
        responses = engine.generate([fewer_prompts[index] for index in short], params)
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


def _flash(head_dim: int, dtype: torch.dtype) -> FlashAttention3:
    made = load_flash(KVShape(100, 16, 2, head_dim, dtype, CUDA))
    if isinstance(made, str):
        pytest.skip(made)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 20])
def test_flash_attention(dtype: torch.dtype, window: int | None) -> None:
    _flash(64, dtype)
    lengths = ((0, 70), (40, 1), (45, 1), (300, 1), (0, 1), (100, 17))
    case = Case(lengths, kv_heads=2, group=3, head_dim=64, window=window, dtype=dtype)
    problem = Problem.of(case)
    torch.testing.assert_close(
        Paged("fa3", case, device=CUDA).run(problem).double(), textbook(problem), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("window", [None, 50])
def test_flash_attention_passes_its_trial(head_dim: int, group: int, window: int | None) -> None:
    flash, shape = _flash(head_dim, torch.bfloat16), KVShape(100, 16, 2, head_dim, torch.bfloat16, CUDA)
    layer = AttentionShape(2 * group, head_dim**-0.5, window)
    assert [disagreement(each, shape, layer) for each in (flash, *flash.variants())] == [None] * 3


@pytest.mark.parametrize(("sequences", "splits"), [(1, 32), (5, 4), (40, 1)])
def test_a_recorded_schedule_fits_other_lengths(sequences: int, splits: int) -> None:
    kv = KVShape(sequences * 64 + 1, 16, 2, 128, torch.bfloat16, CUDA)
    flash, layer = FlashAttention3(_flash(128, torch.bfloat16)._kernels, splits), AttentionShape(8, 128**-0.5)
    cache = flash.allocate(kv)
    for part in (cache.keys, cache.values):
        part.normal_()
    tables = 1 + np.arange(sequences * 64, dtype=np.int32).reshape(sequences, 64)
    ones = np.ones(sequences, np.int32)
    token_ids, rows = np.zeros(sequences, np.int64), np.arange(sequences)
    batch = batch_of(token_ids, ones, ones * 1023, tables, rows, 16, CUDA)
    query = torch.randn(sequences, 8 * 128, dtype=torch.bfloat16, device=CUDA)

    def layers() -> list[torch.Tensor]:
        batch.attention_plan = None
        return [flash.attend(query, cache, layer, batch) for _ in range(2)]

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for seed in range(3):
        contexts = np.random.default_rng(seed).integers(1, 1024, sequences).astype(np.int32)
        batch.context_lens.copy_(torch.from_numpy(contexts))
        batch.contexts, batch.attention_plan = contexts.tolist(), None
        expected = ReferenceAttention().attend(query, cache, layer, batch)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


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
        chosen = "triton" if isinstance(load_flash(KVShape(1, 16, 3, 64, torch.bfloat16, CUDA)), str) else "fa3"
        assert f"{chosen} attention" in engine.core.body.description
        body = engine.core.body
        assert isinstance(body, LlamaBody)
        assert body._graphs is not None
        assert body._graphs.disabled is None
        assert 24 in body._graphs.recorded
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


_HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY


@pytest.mark.parametrize("rows", [1, 7, 16, 100, 300])
def test_streamed_and_8_bit_products(rows: int) -> None:
    x, weight = (torch.randn(size, 1024, device=CUDA).bfloat16() for size in (rows, 512))
    expected = x.double() @ weight.double().t()

    def error(ours: torch.Tensor) -> float:
        return float((ours.double() - expected).norm() / expected.norm())

    def streamed(projection: Projection) -> list[torch.Tensor]:
        found = []
        for blocks in BLOCKS:
            if rows <= blocks.rows:
                found.append(torch.zeros(rows, 512, dtype=torch.bfloat16, device=CUDA))
                StreamedProducts(blocks, CUDA, FusedOps())._launch(found[-1], x, projection, adds=True)
        return found

    assert all(error(out) < 5e-3 for out in streamed(Projection(weight)))
    if _HAS_FP8:
        assert error(make_fp8_linear(weight)(x)) < 5e-2
        rounded, scales = to_fp8(weight)
        assert all(error(out) < 4e-2 for out in streamed(Projection(rounded, scales=scales)))


@pytest.mark.skipif(not _HAS_FP8, reason="this device has no products in 8-bit floating point")
def test_a_model_in_8_bit_floating_point(smollm2_path: Path) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    prompts = [f"Number {index} is" for index in range(20)]
    with Engine(smollm2_path, device="cuda", kv_memory="400MB") as engine:
        plain = [response.token_ids[0] for response in engine.generate(prompts, params)]
    with Engine(smollm2_path, device="cuda", kv_memory="400MB", quantization="fp8") as engine:
        assert "fp8 weights and activations" in engine.core.body.description
        ours = [response.token_ids[0] for response in engine.generate(prompts, params)]
        assert sum(one == other for one, other in zip(ours, plain, strict=True)) >= 10
        body = engine.core.body
        assert isinstance(body, LlamaBody)
        assert body._graphs is not None
        assert body._graphs.disabled is None


@pytest.mark.skipif(not _HAS_FP8, reason="this device has no products in 8-bit floating point")
def test_a_model_in_8_bit_floating_point_is_streamed(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 1024}
    tiny_model(tmp_path, "llama", **TINY | sizes)
    body = load_body(tmp_path, EngineConfig(dtype="bfloat16", device="cuda", quantization="fp8"))
    body.allocate(20, 16, "auto")
    assert isinstance(body, LlamaBody)
    assert isinstance(body.stack, ComposedStack)
    assert body.stack._streamed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_maxima(dtype: torch.dtype) -> None:
    assert maxima_are_torchs(row_maxima, CUDA, dtype)
