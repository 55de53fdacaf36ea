"""A layer's pieces as Triton kernels, against torch: interpreted on the CPU, compiled where there is a CUDA device."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from batchwright.engine.attention.paged import ReferenceAttention
from batchwright.engine.bodies import linear, load_body
from batchwright.engine.bodies.composed import ComposedStack
from batchwright.engine.bodies.linear import rounds_as_torch
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.bodies.ops import HeadShape, TorchOps, choose_ops, difference
from batchwright.engine.step.batch import build_batch
from batchwright.engine_config import EngineConfig
from batchwright.scheduling import Chunk, Sequence

from .support import TINY, tiny_model

pytest.importorskip("triton", reason="Triton is not installed")
from batchwright.engine.bodies.triton_ops import FusedOps, round_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
"""The interpreter cuts bfloat16 off where it should round."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [HeadShape(3, 1, 32), HeadShape(2, 2, 24)])
def test_the_same_as_torch(dtype: torch.dtype, shape: HeadShape) -> None:
    assert difference(FusedOps(), shape, 48, dtype, DEVICE) < _TOLERANCES[dtype]


@torch.inference_mode()
def test_a_model_computes_the_same_with_them(tmp_path: Path) -> None:
    tiny_model(tmp_path, "qwen3", **TINY | {"head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1})
    tokens = [list(range(2, 40)), [7]]
    found = []
    for fused in (False, True):
        body = load_body(tmp_path, EngineConfig(body="fused", dtype="float32", device=str(DEVICE)))
        body.allocate(20, 16, "sdpa")
        assert isinstance(body, LlamaBody)
        assert isinstance(body.stack, ComposedStack)
        body.stack._ops = FusedOps() if fused else TorchOps(body.attention)
        sequences = [Sequence(list(each), len(each), len(each) + 1) for each in tokens]
        for first, sequence in zip((3, 9), sequences, strict=True):
            sequence.table.blocks.extend(range(first, first + 3))
        prompts = [Chunk(sequence, 0, len(sequence.tokens), False, True) for sequence in sequences]
        body.forward(build_batch(prompts, 16, DEVICE))
        for sequence in sequences:
            sequence.tokens.append(5)
        decodes = [Chunk(sequence, len(sequence.tokens) - 1, 1, False, True) for sequence in sequences]
        found.append(body.forward(build_batch(decodes, 16, DEVICE)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("delta", [float("nan"), 1.0])
def test_nan_is_a_difference(monkeypatch: pytest.MonkeyPatch, delta: float) -> None:
    own = FusedOps.silu_mul
    monkeypatch.setattr(FusedOps, "silu_mul", lambda self, gate_up: own(self, gate_up) + delta)
    assert not difference(FusedOps(), HeadShape(2, 1, 16), 32, torch.float32, DEVICE) < 0.1


def test_what_passes_its_trial_is_taken() -> None:
    assert isinstance(choose_ops(ReferenceAttention(), HeadShape(2, 1, 16), 32, torch.float32, DEVICE), FusedOps)


def test_what_differs_from_torch_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FusedOps, "silu_mul", lambda self, gate_up: gate_up.chunk(2, dim=-1)[0].clone())
    with caplog.at_level(logging.WARNING):
        chosen = choose_ops(ReferenceAttention(), HeadShape(2, 1, 16), 32, torch.float32, DEVICE)
    assert isinstance(chosen, TorchOps)
    assert "layers are not fused on" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_8_bits_is_torchs(dtype: torch.dtype) -> None:
    assert rounds_as_torch(linear.round_rows, DEVICE, dtype)
    assert not rounds_as_torch(lambda x: linear.round_rows(x.nan_to_num()), DEVICE, dtype)
    assert not rounds_as_torch(lambda x: linear.round_rows(x * 0.98), DEVICE, dtype)
    assert not rounds_as_torch(lambda x: (-linear.round_rows(x)[0].float(), linear.round_rows(x)[1]), DEVICE, dtype)
    if DEVICE.type == "cuda":
        assert rounds_as_torch(round_rows, DEVICE, dtype)
    x = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x[2], x[3, 5] = 0.0, 300.0
    (ours, our_scales), (expected, scales) = round_rows(x), linear.round_rows(x)
    torch.testing.assert_close(our_scales, scales, rtol=1e-5, atol=0.0)
    # The interpreter rounds values just below a power of two down by half.
    assert float((ours.float() == expected.float()).float().mean()) > 0.95
    x[4, 9] = torch.nan
    assert round_rows(x)[1].isnan().tolist() == [False] * 4 + [True, False]
