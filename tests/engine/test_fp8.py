"""Products in 8-bit floating point, which only GPUs compute fast: their arithmetic on the CPU, and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchwright.engine.bodies import load_body
from batchwright.engine.bodies.body import ModelBody
from batchwright.engine.bodies.composed import ComposedStack
from batchwright.engine.bodies.linear import make_fp8_linear, round_rows
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.step.batch import build_batch
from batchwright.engine_config import EngineConfig
from batchwright.errors import UnsupportedModel
from batchwright.scheduling import Chunk, Sequence

from .support import TINY, tiny_model

CPU = torch.device("cpu")


def _multiplies() -> bool:
    try:
        make_fp8_linear(torch.ones(16, 16).bfloat16())(torch.ones(2, 16).bfloat16())
    except RuntimeError:
        return False
    return True


multiplies = pytest.mark.skipif(not _multiplies(), reason="this torch has no scaled products by row on the CPU")


def restored(x: Tensor) -> Tensor:
    rounded, scales = round_rows(x)
    return rounded.double() * scales.double()[:, None]


def test_rounding_keeps_each_value_to_a_sixteenth() -> None:
    x = torch.randn(20, 300) * torch.logspace(-3, 3, 20)[:, None]
    x[3] = 0.0
    difference = (restored(x) - x).abs()
    # Of values that are far below the greatest of their row, steps are of one size.
    assert bool((difference <= x.abs() / 16 + x.abs().amax(1, keepdim=True) * 2**-18).all())
    assert not difference[3].any()


@multiplies
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_rounded_rows(biased: bool) -> None:
    x, weight = (torch.randn(size, 64).bfloat16() for size in (5, 32))
    bias = torch.randn(32).bfloat16() if biased else None
    expected = restored(x) @ restored(weight).t() + (0.0 if bias is None else bias.double())
    ours = make_fp8_linear(weight, bias)(x)
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours.double(), expected, rtol=1e-2, atol=2e-2)


@multiplies
@torch.inference_mode()
def test_a_model_is_near_to_itself_in_bfloat16(tmp_path: Path) -> None:
    tiny_model(tmp_path, "qwen2", **TINY)
    found = []
    for fp8 in (False, True):
        body = load_body(tmp_path, EngineConfig(body="fused", dtype="bfloat16", device="cpu"))
        assert isinstance(body, LlamaBody)
        ModelBody.allocate(body, 10, 16, "sdpa")
        body.stack = ComposedStack(body._weights, body.caches, body.attention, quantized=False, fp8=fp8)
        sequence = Sequence(list(range(2, 40)), 38, 40)
        sequence.table.blocks.extend(range(1, 4))
        found.append(body.forward(build_batch([Chunk(sequence, 0, 38, False, True)], 16, CPU)).float())
    plain, ours = found
    assert 1e-4 < float((ours - plain).norm() / plain.norm()) < 0.2


def load(folder: Path, **options: Any) -> None:
    load_body(folder, EngineConfig(quantization="fp8", **options))


def test_who_cannot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    with pytest.raises(ValueError, match=r"quantization='fp8' on cpu: needs CUDA.*use quantization='int8'"):
        load(tmp_path, device="cpu")
    with pytest.raises(UnsupportedModel, match=r"quantization='fp8' needs the fused body"):
        load(tmp_path, device="cpu", body="transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"needs compute capability 8.9 or higher, not 8.6; use"):
        load(tmp_path, device="cuda", dtype="bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match=r"dtype='float16' with quantization='fp8': .*use dtype='bfloat16'"):
        load(tmp_path, device="cuda", dtype="float16")
    tiny_model(tmp_path, "llama", **TINY | {"intermediate_size": 100})
    with pytest.raises(UnsupportedModel, match=r"sizes divisible by 16, but intermediate_size is 100; use"):
        load(tmp_path, device="cuda", dtype="bfloat16")
