"""Streamed products against torch's: interpreted on the CPU, compiled where there is a CUDA device."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.bodies import load_body, streaming
from batchwright.engine.bodies.composed import ComposedStack
from batchwright.engine.bodies.linear import to_fp8
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.bodies.ops import TorchOps
from batchwright.engine.bodies.weights import LayerWeights, Projection
from batchwright.engine.step.batch import build_batch
from batchwright.engine_config import EngineConfig
from batchwright.scheduling import Chunk, Sequence

from .support import TINY, tiny_model

pytest.importorskip("triton", reason="Triton is not installed")
from batchwright.engine.attention.paged import ReferenceAttention
from batchwright.engine.bodies import triton_products
from batchwright.engine.bodies.triton_products import StreamedProducts, blocks_for
from batchwright.engine.sampling import maxima_are_torchs
from batchwright.engine.triton_maxima import row_maxima

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.float16  # the interpreter does not multiply bfloat16
HIDDEN, WIDE, EPS = 512, 512, 1e-5
SIZES = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": WIDE, "vocab_size": 256}
SMALLER = SIZES | {"hidden_size": HIDDEN // 2, "intermediate_size": WIDE // 2}
"""Too few inputs for the blocks of a single row; interpreted in a quarter of the time."""


SEVERAL = {
    (1, 64, False, False),
    (3, 1, True, False),
    (32, 64, False, True),
    (64, 1, True, True),
    (100, 64, False, False),
    (1, 1, True, True),
}
"""Rows, processors, and whether norms and fp8 are in the products: each of them beside some of the others."""


def random(*size: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return (torch.randn(*size, generator=generator) * scale).to(DEVICE, HALF)


def projection(outputs: int, inputs: int, *, biased: bool = False) -> Projection:
    return Projection(random(outputs, inputs, scale=inputs**-0.5), random(outputs) if biased else None)


def in_fp8(projection: Projection) -> Projection:
    rounded, scales = to_fp8(projection.weight)
    return Projection(rounded, projection.bias, scales)


def layer() -> LayerWeights:
    return LayerWeights(
        input_norm=random(HIDDEN),
        qkv=projection(HIDDEN + 128, HIDDEN, biased=True),
        query_norm=None,
        key_norm=None,
        output=projection(HIDDEN, HIDDEN, biased=True),
        post_norm=random(HIDDEN),
        gate_up=projection(2 * WIDE, HIDDEN),
        down=projection(HIDDEN, WIDE),
        window=None,
    )


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight.double(), EPS)


def linear(x: Tensor, by: Projection) -> Tensor:
    scales = 1.0 if by.scales is None else by.scales.double()[:, None]
    return functional.linear(x, by.weight.double() * scales, None if by.bias is None else by.bias.double())


def assert_near(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype == HALF
    assert float((ours.double() - expected).norm() / expected.norm()) < 2e-3


@pytest.mark.parametrize(
    ("rows", "processors", "norms", "fp8"),
    [
        pytest.param(*case, marks=[] if case in SEVERAL else pytest.mark.long)
        for case in product([1, 3, 32, 64, 100], [1, 64], [True, False], [False, True])
        if case[2] == (case[1] == 1)
    ],
)
def test_the_products_of_a_layer(
    rows: int, processors: int, norms: bool, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # float16 is not normed within a product, since it may overflow: these values do not.
    monkeypatch.setattr(triton_products, "_UNBOUNDED", frozenset({HALF}) if norms else frozenset())
    weights = layer()
    if fp8:
        each: dict[str, Any] = {name: in_fp8(getattr(weights, name)) for name in ("qkv", "output", "gate_up", "down")}
        weights = replace(weights, **each)
    found = blocks_for([weights.qkv, weights.output, weights.gate_up, weights.down])
    assert isinstance(found, list)
    blocks = next(each for each in found if rows <= each.rows)
    products = StreamedProducts(blocks, DEVICE, TorchOps(ReferenceAttention()), processors=processors)
    residual, attended = random(rows, HIDDEN), random(rows, HIDDEN)
    before = residual.clone().double()
    head = projection(256, HIDDEN)

    assert_near(products.qkv(weights, residual, EPS), linear(normed(before, weights.input_norm), weights.qkv))
    assert_near(
        products.logits(head, residual, weights.post_norm, EPS), linear(normed(before, weights.post_norm), head)
    )
    products.finish(weights, residual, attended, EPS)
    after = before + linear(attended.double(), weights.output)
    gate, up = linear(normed(after, weights.post_norm), weights.gate_up).chunk(2, dim=-1)
    assert_near(residual, after + linear(functional.silu(gate) * up, weights.down))
    assert not products._arrived.any()


def test_the_blocks_of_weights() -> None:
    def inputs(*sizes: tuple[int, int]) -> list[tuple[int, int]] | str:
        found = blocks_for([projection(*size) for size in sizes])
        return found if isinstance(found, str) else [(each.rows, each.inputs) for each in found]

    assert inputs((256, 1024), (256, 2048)) == [(1, 1024), (16, 128), (32, 128), (64, 128), (128, 128)]
    assert inputs((256, 512), (256, 1024)) == [(1, 512), (16, 128), (32, 128), (64, 128), (128, 128)]
    assert inputs((256, 768)) == [(16, 128), (32, 128), (64, 128), (128, 128)]
    assert inputs((192, 512)) == [(1, 512)]
    assert inputs((200, 192)) == "blocks of 128 by 128 leave a part of a weight [200, 192] over"
    assert blocks_for([Projection(torch.zeros(256, HIDDEN))]) == "weights are torch.float32"


def forward(folder: Path) -> tuple[ComposedStack, list[Tensor]]:
    """The stack, and its logits for prompts, for decodes and for both."""
    body = load_body(folder, EngineConfig(body="fused", dtype="float16", device=str(DEVICE)))
    body.allocate(20, 16, "triton")
    assert isinstance(body, LlamaBody)
    assert isinstance(body.stack, ComposedStack)
    sequences = [Sequence(list(tokens), len(tokens), 90) for tokens in (range(2, 70), [7], range(5, 20))]
    for first, sequence in zip((1, 7, 13), sequences, strict=True):
        sequence.table.blocks.extend(range(first, first + 6))
    found = []
    for which in (sequences[:2], sequences[:1], sequences[1:]):
        chunks = []
        for sequence in which:
            start = 0 if len(sequence.tokens) in (68, 1, 15) else len(sequence.tokens) - 1
            chunks.append(Chunk(sequence, start, len(sequence.tokens) - start, False, True))
        found.append(body.forward(build_batch(chunks, 16, DEVICE)).clone())
        for sequence in which:
            sequence.tokens.append(9)
    return body.stack, found


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few rows alone are streamed, of which each is interpreted when a model is loaded."""
    monkeypatch.setattr(triton_products, "blocks_for", lambda weights: blocks_for(weights)[:2])


@torch.inference_mode()
def test_a_model_computes_the_same_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path, "qwen2", **TINY | SIZES)
    stack, ours = forward(tmp_path)
    assert [each.rows for each in stack._streamed] == [1, 16, 32, 64, 128] or DEVICE.type == "cuda"
    monkeypatch.setattr(triton_products, "blocks_for", lambda weights: "not here")
    stack, expected = forward(tmp_path)
    assert stack.products == "torch products"
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("few_blocks")
@torch.inference_mode()
def test_the_logits_may_be_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path, "qwen2", **TINY | SMALLER)
    _, ours = forward(tmp_path)
    monkeypatch.setattr(streaming, "_is_faster", lambda *given: given[-1] != 0)
    left, expected = forward(tmp_path)
    assert [each.takes_head for each in left._streamed] == [False] * len(left._streamed)
    assert left._streamed
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("few_blocks")
@torch.inference_mode()
def test_a_step_whose_logits_nobody_wants(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama", **TINY | SMALLER)
    body = load_body(tmp_path, EngineConfig(body="fused", dtype="float16", device=str(DEVICE)))
    body.allocate(20, 16, "triton")
    sequence = Sequence(list(range(2, 102)), 100, 200)
    sequence.table.blocks.extend(range(1, 13))
    assert body.forward(build_batch([Chunk(sequence, 0, 10, False, False)], 16, DEVICE)).shape == (0, 256)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("change", [float("nan"), 0.1])
def test_what_differs_from_torch_is_not_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: float
) -> None:
    own = StreamedProducts.qkv
    monkeypatch.setattr(StreamedProducts, "qkv", lambda *given: own(*given) + change)
    tiny_model(tmp_path, "llama", **TINY | SMALLER)
    with caplog.at_level(logging.WARNING):
        body = load_body(tmp_path, EngineConfig(body="fused", dtype="float16", device=str(DEVICE)))
        body.allocate(20, 16, "triton")
    assert isinstance(body, LlamaBody)
    assert isinstance(body.stack, ComposedStack)
    assert body.stack._streamed == []
    assert "products are not streamed on" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_maxima(dtype: torch.dtype) -> None:
    assert maxima_are_torchs(row_maxima, DEVICE, dtype)
    assert not maxima_are_torchs(lambda x: torch.max(x.nan_to_num(), -1), DEVICE, dtype)
    strided = torch.arange(24.0, dtype=dtype, device=DEVICE).view(4, 6)[:, 1:4]
    best, where = row_maxima(strided)
    assert torch.equal(best, strided[:, 2])
    assert where.tolist() == [2] * 4
