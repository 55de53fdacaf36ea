"""The compiled layers and their int8 products against torch, transformers and whole-number arithmetic."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchwright import Engine, SamplingParams
from batchwright.engine.bodies import load_body
from batchwright.engine.bodies.body import ModelBody
from batchwright.engine.bodies.compiled import CompiledStack
from batchwright.engine.bodies.composed import ComposedStack
from batchwright.engine.bodies.linear import make_quantized_linear
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.bodies.rotation import Rotation
from batchwright.engine.native import load_kernels
from batchwright.engine.native.large_pages import Arena
from batchwright.engine.native.weight_panels import PANEL, interleaved, pack, quantize_rows
from batchwright.engine.step.batch import StepBatch, build_batch
from batchwright.engine_config import DtypeName, EngineConfig
from batchwright.errors import NonFiniteLogits
from batchwright.scheduling import Chunk, Sequence

from .support import COMPILED, TINY, needs_decoder, only, tiny_model

CPU = torch.device("cpu")
BF16 = torch.bfloat16
_FOUND = load_kernels(BF16)
needs_kernels = pytest.mark.skipif(isinstance(_FOUND, str), reason=f"no compiled kernels: {_FOUND}")

_WIDE = TINY | {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 1, "num_key_value_heads": 1}
CASES = [
    pytest.param("llama", TINY, id="heads-of-16"),
    pytest.param("llama", TINY | {"head_dim": 32, "vocab_size": 256}, id="heads-of-32"),
    pytest.param("llama", TINY | {"head_dim": 64, "tie_word_embeddings": True}, id="heads-of-64-tied"),
    pytest.param("llama", _WIDE | {"head_dim": 128}, id="one-head-of-128"),
    pytest.param("llama", TINY | {"hidden_size": 192, "num_attention_heads": 6, "vocab_size": 97}, id="6-heads"),
    pytest.param("llama", TINY | {"attention_bias": True}, id="biases"),
    pytest.param("qwen2", TINY, id="qwen2"),
    pytest.param("qwen3", TINY | {"head_dim": 32}, id="qwen3"),
    pytest.param("mistral", TINY | {"sliding_window": 9}, id="mistral"),
]
both_precisions = pytest.mark.parametrize("quantized", [False, True], ids=["bfloat16", "int8"])


def saved_model(folder: Path, model_type: str, config: dict[str, Any]) -> Any:
    """A tiny model whose weights are bfloat16 exactly, so that float32 and bfloat16 compute with the same ones."""
    model = tiny_model(folder, model_type, **config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(BF16))
    model.save_pretrained(folder)
    return model


def loaded(folder: Path, *, quantized: bool, dtype: DtypeName = "bfloat16", composed: bool = False) -> LlamaBody:
    """The fused body; with `composed`, through torch's products where the compiled layers would be chosen."""
    body = load_body(
        folder, EngineConfig(body="fused", dtype=dtype, device="cpu", quantization="int8" if quantized else None)
    )
    assert isinstance(body, LlamaBody)
    if composed:
        body.quantized = False  # which is to say, its caches
        ModelBody.allocate(body, 400, 16, "native")
        body.quantized = quantized
        body.stack = ComposedStack(body._weights, body.caches, body.attention, quantized=quantized)
    else:
        body.allocate(400, 16, "native")
    return body


class Prompts:
    """Sequences in the cache of a body, each with blocks of its own."""

    def __init__(self, prompts: Many[Many[int]]) -> None:
        self.sequences: list[Sequence] = []
        blocks = 1
        for prompt in prompts:
            sequence = Sequence(list(prompt), len(prompt), len(prompt))
            needed = -(-len(prompt) // 16)
            sequence.table.blocks.extend(range(blocks, blocks + needed))
            blocks += needed
            self.sequences.append(sequence)

    def step(self, parts: list[tuple[int, int, int]]) -> StepBatch:
        """`(index, start, count)` each, with the logits of all rows."""
        chunks = [Chunk(self.sequences[index], start, count, False, True) for index, start, count in parts]
        batch = build_batch(chunks, 16, CPU)
        return replace(batch, logit_rows=torch.arange(batch.num_tokens))


def all_logits(body: LlamaBody, prompts: Many[Many[int]]) -> Tensor:
    """Of every token of every prompt: their first two thirds in one step, and the rest in another."""
    several = Prompts(prompts)
    cuts = [2 * len(prompt) // 3 for prompt in prompts]
    first = [(index, 0, cut) for index, cut in enumerate(cuts) if cut]
    rest = [(index, cut, len(prompts[index]) - cut) for index, cut in enumerate(cuts)]
    with torch.inference_mode():
        steps = [body.forward(several.step(parts)).float() for parts in (first, rest)]
    rows = [step.split([count for _, _, count in parts]) for step, parts in zip(steps, (first, rest), strict=True)]
    begun = dict(zip([index for index, _, _ in first], rows[0], strict=True))
    return torch.cat([torch.cat([begun[i], part]) if i in begun else part for i, part in enumerate(rows[1])])


def reference(model: Any, prompts: Many[Many[int]]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([list(prompt)])).logits[0] for prompt in prompts])


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative, over all values."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).norm() / theirs.norm())


def prompts_below(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in (1, 2, 7, 16, 17, 40, 150)]


# Whole models


@needs_decoder
@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_logits(tmp_path: Path, model_type: str, config: dict[str, Any]) -> None:
    """bfloat16 is as near to float32 as torch's is. int8 adds the error that int8 has in float32, and no more."""
    model = saved_model(tmp_path, model_type, config)
    prompts = prompts_below(config["vocab_size"])
    exact = reference(model, prompts)

    def off(**options: Any) -> float:
        body = loaded(tmp_path, **options)
        assert isinstance(body.stack, ComposedStack if {"dtype", "composed"} & options.keys() else CompiledStack)
        return error(all_logits(body, prompts), exact)

    assert off(quantized=False, dtype="float32") < 1e-5
    rounding, torch_rounding = off(quantized=False), off(quantized=False, composed=True)
    assert rounding < 0.03
    assert rounding < 1.1 * torch_rounding
    levels = off(quantized=True, dtype="float32")
    assert levels < 0.1
    assert off(quantized=True) < 1.15 * math.hypot(levels, rounding)
    assert off(quantized=True, composed=True) < 1.15 * math.hypot(levels, torch_rounding)


@needs_kernels
@both_precisions
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"hidden_size": 48, "head_dim": 16}, id="hidden-48"),
        pytest.param({"intermediate_size": 80}, id="intermediate-80"),
        pytest.param(
            {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}, id="qkv-80"
        ),
        pytest.param({"mlp_bias": True}, id="biases-in-the-mlp"),
        pytest.param({"hidden_size": 60, "intermediate_size": 90, "head_dim": 16}, id="odd"),
    ],
)
def test_widths_that_are_no_whole_panels_go_through_torch(
    tmp_path: Path, config: dict[str, Any], quantized: bool
) -> None:
    model = saved_model(tmp_path, "llama", TINY | config)
    body = loaded(tmp_path, quantized=quantized)
    assert isinstance(body.stack, ComposedStack)
    assert "torch products" in body.description
    prompts = prompts_below(199)
    assert error(all_logits(body, prompts), reference(model, prompts)) < (0.1 if quantized else 0.03)


@needs_kernels
@both_precisions
@pytest.mark.parametrize("composed", [False, True], ids=["own", "torch"])
def test_any_number_of_rows_gives_the_same_bits(tmp_path: Path, quantized: bool, composed: bool) -> None:
    saved_model(tmp_path, "qwen3", TINY | {"head_dim": 32})
    body = loaded(tmp_path, quantized=quantized, composed=composed)
    if (reason := body.why_not_deterministic(64, 64)) is not None:
        pytest.skip(reason)
    any_number_of_rows_gives_the_same_bits(body)


def any_number_of_rows_gives_the_same_bits(body: LlamaBody) -> None:
    """Compare the logits of a model with `vocab_size` 199 for decodes in all companies, and for prompts in pieces."""
    generator = torch.Generator().manual_seed(9)
    lengths = [1 + 5 * index % 37 for index in range(40)]
    several = Prompts([torch.randint(0, 199, (n + 1,), generator=generator).tolist() for n in lengths])
    last = [(index, length, 1) for index, length in enumerate(lengths)]
    with torch.inference_mode():
        for index, length in enumerate(lengths):
            body.forward(several.step([(index, 0, length)]))
        together = body.forward(several.step(last))
        assert together.float().std() > 0.1
        for count in range(1, 40):
            assert torch.equal(body.forward(several.step(last[:count])), together[:count])
            assert torch.equal(body.forward(several.step(last[-count:])), together[-count:])
        # Whole prompts in one step, and token by token.
        for index in (2, 5, 39):
            whole = body.forward(several.step([(index, 0, lengths[index] + 1)]))
            for at in range(lengths[index] + 1):
                assert torch.equal(body.forward(several.step([(index, at, 1)])), whole[at : at + 1])


@needs_decoder
@both_precisions
def test_a_block_that_is_read_in_the_step_that_writes_it(tmp_path: Path, quantized: bool) -> None:
    """Two prompts with one prefix in one step; for some lengths of the second each thread would take one."""
    saved_model(tmp_path, "llama", TINY)
    body = loaded(tmp_path, quantized=quantized)
    generator = torch.Generator().manual_seed(4)
    begun, one, other = (torch.randint(0, 199, (n,), generator=generator).tolist() for n in (96, 30, 126))

    def logits(count: int, steps: list[list[tuple[int, int, int]]]) -> Tensor:
        for cache in body.caches:
            for tensor in (cache.keys, cache.values):
                tensor.view(torch.uint8).fill_(0xFF)  # NaN
        several = Prompts([begun + one, begun + other[:count]])
        several.sequences[1].table.blocks[:6] = several.sequences[0].table.blocks[:6]
        with torch.inference_mode():
            return torch.cat([body.forward(several.step(parts)) for parts in steps])

    for count in range(82, 127, 4):
        first, second = (0, 0, 126), (1, 96, count)
        together = logits(count, [[first, second]])
        assert together.isfinite().all()
        assert torch.equal(together, logits(count, [[first], [second]]))


@needs_decoder
@both_precisions
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("lengths", [(200,), (1, 1, 130, 1), (60, 1, 61, 1, 90), (1, 120, 2, 3)], ids=str)
def test_prompts_that_threads_share(
    tmp_path: Path, quantized: bool, lengths: tuple[int, ...], threads: int, torch_threads: Callable[[int], None]
) -> None:
    """A step of many rows is cut where its cost is shared evenly, within a prompt too; eight rows are not cut."""
    torch_threads(threads)
    saved_model(tmp_path, "llama", TINY)
    body = loaded(tmp_path, quantized=quantized)
    for tensor in (part for cache in body.caches for part in (cache.keys, cache.values)):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN
    generator = torch.Generator().manual_seed(6)
    several = Prompts([torch.randint(0, 199, (n + 9,), generator=generator).tolist() for n in lengths])
    with torch.inference_mode():
        for index in range(len(lengths)):
            body.forward(several.step([(index, 0, 9)]))
        whole = [(index, 9, count) for index, count in enumerate(lengths)]
        pieces = [(i, at, min(8, 9 + n - at)) for i, n in enumerate(lengths) for at in range(9, 9 + n, 8)]
        together = body.forward(several.step(whole))
        alone = torch.cat([body.forward(several.step([piece])) for piece in pieces])
        assert together.isfinite().all()
        assert torch.equal(together, alone)
        # As the engine asks: the last rows alone.
        batch = several.step(whole)
        last = batch.query_starts[1:].long() - 1
        assert torch.equal(body.forward(replace(batch, logit_rows=last)), alone[last])


# Products alone


@needs_decoder
@both_precisions
@settings(max_examples=8, deadline=None)
@given(
    units=st.integers(1, 9),
    vocab=st.integers(1, 200),
    tokens=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40),
    seed=st.integers(0, 99),
)
def test_products(
    tmp_path_factory: pytest.TempPathFactory, quantized: bool, units: int, vocab: int, tokens: list[int], seed: int
) -> None:
    """A layer of zeros between embeddings of ±1, which their norm leaves as they are, and the head: one product."""
    folder, hidden = tmp_path_factory.mktemp("product"), 32 * units
    config = TINY | {"hidden_size": hidden, "head_dim": 32, "vocab_size": vocab, "num_hidden_layers": 1}
    model = tiny_model(folder, "llama", **config | {"rms_norm_eps": 0.0})
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.randint(0, 2, (vocab, hidden)) * 2 - 1)
        model.lm_head.weight.copy_((torch.randn(vocab, hidden) * torch.rand(vocab, 1)).to(BF16))
    model.save_pretrained(folder)
    body = loaded(folder, quantized=quantized)
    assert isinstance(body.stack, CompiledStack)
    rows = [token % vocab for token in tokens]
    with torch.inference_mode():
        found = body.forward(
            Prompts([[token] for token in rows]).step([(at, 0, 1) for at in range(len(rows))])
        ).double()
    signs, weight = model.model.embed_tokens.weight.detach()[rows], model.lm_head.weight.detach()
    if quantized:
        turn = Rotation(hidden).turn
        stream = turn(signs.to(BF16)).float()
        x, row_scales = quantize_rows(stream * stream.pow(2).mean(-1, keepdim=True).rsqrt())
        whole, scales = quantize_rows(turn(weight.float()).to(BF16))
        expected = x.double() @ whole.double().T * row_scales[:, None].double() * scales.double()
        tolerance = 3 * 127 * float(row_scales.max() * scales.max())  # a norm may round three values the other way
    else:
        expected = signs.double() @ weight.double().T
        tolerance = 1e-5 * hidden
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=tolerance)


# Packing


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 4), (64, 96), (1, 8), (33, 12), (199, 64)])
def test_packing_can_be_undone(outputs: int, inputs: int, quantized: bool) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(BF16)
    bias = torch.randn(outputs, generator=generator).to(BF16)
    packed = pack(weight, bias, Arena(0), quantized=quantized)
    assert (packed.inputs, packed.outputs) == (inputs, outputs)
    whole_panels = -(-outputs // PANEL) * PANEL
    columns = packed.panels.transpose(1, 2).reshape(whole_panels, inputs)
    plain, scales = quantize_rows(weight) if quantized else (weight, None)
    assert torch.equal(columns[:outputs], plain)
    assert not columns[outputs:].any()
    assert packed.bias is not None
    assert torch.equal(packed.bias[:outputs], bias.float())
    assert packed.bias.shape == (whole_panels,)
    assert not packed.bias[outputs:].any()
    assert pack(weight, None, Arena(0), quantized=quantized).bias is None
    if not quantized:
        assert packed.scales is packed.sums is None
        return
    assert scales is not None
    assert packed.scales is not None
    assert packed.sums is not None
    assert torch.equal(packed.scales[:outputs], scales)
    assert torch.equal(packed.sums[:outputs], plain.long().sum(1).int() * 128)
    assert packed.scales.shape == packed.sums.shape == (whole_panels,)


def test_gate_and_up_take_turns_of_half_a_panel() -> None:
    gate, up = torch.arange(64.0)[:, None].expand(64, 4), 100 + torch.arange(64.0)[:, None].expand(64, 4)
    mixed = interleaved(gate.contiguous(), up.contiguous())[:, 0].view(-1, PANEL)
    assert torch.equal(mixed[:, : PANEL // 2].flatten(), gate[:, 0])
    assert torch.equal(mixed[:, PANEL // 2 :].flatten(), up[:, 0])


# int8


_VALUES = st.floats(-(2.0**99), 2.0**99, width=32).map(lambda x: 0.0 if abs(x) < 2.0**-99 else x)


@given(rows=st.lists(st.lists(_VALUES, min_size=6, max_size=6), min_size=1, max_size=5))
def test_quantized_rows(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    whole, scales = quantize_rows(x)
    assert whole.dtype is torch.int8
    assert scales.dtype is torch.float32
    assert int(whole.min()) >= -127
    off = (whole.double() * scales.double()[:, None] - x.double()).abs()
    assert bool((off <= 0.50001 * scales.double()[:, None]).all())
    largest = x.abs().argmax(1, keepdim=True)
    used = x.gather(1, largest) != 0
    assert torch.equal(whole.gather(1, largest).int().abs(), torch.where(used, 127, 0).int())
    assert torch.equal(scales == 0, ~used[:, 0])
    # A row is quantized by itself.
    alone = [quantize_rows(x[row : row + 1]) for row in range(len(rows))]
    assert torch.equal(torch.cat([each for each, _ in alone]), whole)
    assert torch.equal(torch.cat([each for _, each in alone]), scales)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_spoils_its_own_product_only(value: float) -> None:
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))
    x[2, 7] = value
    product = make_quantized_linear(torch.randn(40, 24, generator=torch.Generator().manual_seed(2)))
    out = product(x)
    assert out.isfinite().all(1).tolist() == [True, True, False, True]
    assert not out[2].isfinite().any()
    assert torch.equal(out[[0, 1, 3]], product(x[[0, 1, 3]]))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rows", [1, 2, 17, 40])
def test_quantized_linear(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 64, generator=generator).to(dtype) for n in (rows, 50))
    bias = torch.randn(50, generator=generator).to(dtype)
    whole_x, x_scales = quantize_rows(x)
    whole_weight, scales = quantize_rows(weight)
    # Whole numbers, summed exactly.
    products = (whole_x.long()[:, None] * whole_weight.long()[None]).sum(-1)
    expected = products.double() * x_scales.double()[:, None] * scales.double()
    out = make_quantized_linear(weight, bias)(x)
    assert out.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected + bias.double(), rtol=tolerance, atol=tolerance)
    # As far from the product itself as half a level of each factor explains.
    plain = make_quantized_linear(weight)(x.float() if dtype is torch.float32 else x).double()
    exact = x.double() @ weight.double().T
    half_x, half_weight = x_scales.double()[:, None] / 2, scales.double()[None] / 2
    most = half_x * weight.double().abs().sum(1) + half_weight * x.double().abs().sum(1, keepdim=True)
    assert bool(((plain - exact).abs() <= most + 64 * half_x * half_weight + tolerance * (1 + exact.abs())).all())
    zero = make_quantized_linear(weight, bias)(torch.zeros(rows, 64, dtype=dtype))
    assert torch.equal(zero, bias.expand(rows, -1))


@needs_kernels
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("config", "products"),
    [({}, "compiled" if COMPILED else "torch"), ({"hidden_size": 48, "head_dim": 16}, "torch")],
    ids=["own", "torch"],
)
def test_a_request_with_nan_fails_alone(tmp_path: Path, config: dict[str, Any], products: str, value: float) -> None:
    tiny_model(tmp_path, "llama", **TINY | config)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [prompt for prompt in prompts_below(198) if len(prompt) < 100]
    spoilt = [3, 4, *[198], *prompts[3][:5]]
    with Engine(tmp_path, quantization="int8", dtype="bfloat16", kv_memory="1MB", max_batch_tokens=40) as engine:
        assert f"{products} products, int8 weights and activations" in engine.stats.implementation
        before = [only(engine.generate([prompt], params)).token_ids for prompt in prompts]
        engine.core.body._embedding[198] = value  # type: ignore[attr-defined]
        for _ in range(2):  # the same blocks, full of NaN, go to those who come later
            mixed = engine.generate([prompts[0], spoilt, *prompts[1:]], params)
            assert isinstance(mixed.pop(1).error, NonFiniteLogits)
            assert [response.error for response in mixed] == [None] * len(prompts)
            assert [response.token_ids for response in mixed] == before


_ANSWERS = """
import sys
from batchwright import Engine, SamplingParams
with Engine(sys.argv[1], dtype="bfloat16", max_num_seqs=160) as engine:
    prompts = [[2 + number % 90, 5, 7 + number % 11] for number in range(160)]
    kinds = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **kinds[number % 2]) for number in range(160)]
    print([list(answer.token_ids) for answer in engine.generate(prompts, params)])
"""


@needs_decoder
def test_steps_with_fewer_threads_than_asked_for(tmp_path: Path) -> None:
    """Parts of a step have threads of their own, or share one; either way they help each other to their ends."""
    saved_model(tmp_path, "llama", TINY)
    answers = []
    for threads in (
        {"OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "5"},
        {"OMP_NUM_THREADS": "5", "OMP_THREAD_LIMIT": "2"},
    ):
        command = [sys.executable, "-c", _ANSWERS, str(tmp_path)]
        ended = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        answers.append(ended.stdout)
    assert answers[1:] == answers[:1] * 2
