"""Weights of 4 and 8 bits with a scale for each group of inputs, against torch with the values that they stand for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchwright import Engine, SamplingParams
from batchwright.engine.bodies import load_body
from batchwright.engine.bodies.compiled import CompiledStack
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.native.large_pages import Arena
from batchwright.engine.native.weight_groups import GROUP, GroupedWeight, grouped_bytes, pack_groups, round_to_groups
from batchwright.engine_config import DtypeName, EngineConfig, QuantizationName
from batchwright.errors import NonFiniteLogits, UnsupportedModel

from .support import TINY, needs_decoder, only, tiny_model
from .test_decoder import (
    CASES,
    all_logits,
    any_number_of_rows_gives_the_same_bits,
    error,
    prompts_below,
    reference,
    saved_model,
)

both_widths = pytest.mark.parametrize("quantization", ["int8-group", "int4"])
BITS = {"int8-group": 8, "int4": 4}


def weight_of(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


def loaded(folder: Path, quantization: QuantizationName | None, dtype: DtypeName = "auto") -> LlamaBody:
    body = load_body(folder, EngineConfig(body="fused", dtype=dtype, device="cpu", quantization=quantization))
    assert isinstance(body, LlamaBody)
    body.allocate(400, 16, "native")
    return body


@pytest.mark.parametrize("bits", [4, 8])
@given(st.integers(0, 2**31), st.sampled_from([1e-6, 1e-3, 1.0, 100.0]), st.floats(-3.0, 3.0))
def test_numbers_are_the_nearest_of_their_group(bits: int, seed: int, size: float, shift: float) -> None:
    weight = size * (torch.randn(5, 96, generator=torch.Generator().manual_seed(seed)) + shift)
    weight[2, :GROUP] = 0.0
    rounded = round_to_groups(weight, bits)
    scales = rounded.scales.float().repeat_interleave(GROUP, 1)
    # A scale is rounded to 11 bits, which moves the farthest number by as much; below 6e-8 there is none.
    slack = scales / 2 + weight.abs() * 2.0**-10 + 6e-8 * 2**bits
    assert bool(((rounded.values - weight).abs() <= slack).all())
    assert int(rounded.unpacked.max()) < 2**bits
    assert torch.equal(rounded.values[2, :GROUP], torch.zeros(GROUP))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (64, 96), (1, 64), (199, 160)])
def test_packing_can_be_undone(outputs: int, inputs: int, bits: int) -> None:
    rounded = round_to_groups(weight_of(outputs, inputs), bits)
    arena = Arena(grouped_bytes(torch.Size((outputs, inputs)), bits) + 4096)
    packed = pack_groups(torch.Size((outputs, inputs)), bits, lambda: rounded, torch.arange(float(outputs)), arena)
    groups = inputs // GROUP
    assert packed.panels.numel() == grouped_bytes(torch.Size((outputs, inputs)), bits)
    assert packed.bias is not None
    assert packed.bias[:outputs].tolist() == list(range(outputs))
    lanes = packed.panels.view(-1, packed.panels.shape[-1])
    for output in range(outputs):
        of_lanes, lane = lanes[output // 16], output % 16
        of_groups = of_lanes.view(groups, -1)
        size = GROUP * 16 * bits // 8
        numbers = of_groups[:, :size].reshape(groups, -1, 16, 4)[:, :, lane]
        if bits == 4:
            numbers = torch.cat((numbers & 15, numbers >> 4), dim=1)
        assert torch.equal(numbers.reshape(inputs), rounded.unpacked[output])
        halves = of_groups[:, size:].contiguous().view(torch.float16).view(groups, -1, 16)[:, :, lane].T
        assert torch.equal(halves[0], rounded.scales[output])
        if rounded.offsets is not None:
            assert torch.equal(halves[1], rounded.offsets[output])


def with_rounded(model: Any, bits: int) -> Any:
    """The same model with the values that its rounded weights stand for."""
    with torch.no_grad():
        for name, each in model.named_modules():
            if isinstance(each, torch.nn.Linear):
                of_head = name == "lm_head"
                # A tied head is rounded, the embedding is not.
                each.weight = torch.nn.Parameter(round_to_groups(each.weight, 8 if of_head else bits).values)
    return model


def assert_logits_of_rounded_weights(
    folder: Path, model_type: str, config: dict[str, Any], quantization: QuantizationName
) -> None:
    """The logits are those of the rounded weights, but for what bfloat16 and rows in 8 bits add."""
    model = saved_model(folder, model_type, config)
    prompts = prompts_below(config["vocab_size"])
    plain = load_body(folder, EngineConfig(body="fused", dtype="bfloat16", device="cpu"))
    assert isinstance(plain, LlamaBody)
    plain.allocate(400, 16, "native")
    rounding = error(all_logits(plain, prompts), reference(model, prompts))
    body = loaded(folder, quantization)
    assert isinstance(body.stack, CompiledStack)
    assert f"{quantization.removesuffix('-group')} weights" in body.description
    exact = reference(with_rounded(model, BITS[quantization]), prompts)
    assert error(all_logits(body, prompts), exact) < 1.15 * math.hypot(rounding, 0.05)


@needs_decoder
@both_widths
@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_logits(tmp_path: Path, model_type: str, config: dict[str, Any], quantization: QuantizationName) -> None:
    assert_logits_of_rounded_weights(tmp_path, model_type, config, quantization)


@needs_decoder
@both_widths
def test_any_number_of_rows_gives_the_same_bits(tmp_path: Path, quantization: QuantizationName) -> None:
    saved_model(tmp_path, "qwen3", TINY | {"head_dim": 32})
    body = loaded(tmp_path, quantization)
    assert body.why_not_deterministic(64, 64) is None
    any_number_of_rows_gives_the_same_bits(body)


@needs_decoder
@both_widths
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_request_with_nan_fails_alone(tmp_path: Path, quantization: QuantizationName, value: float) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [prompt for prompt in prompts_below(198) if len(prompt) < 100]
    spoilt = [3, 4, *[198], *prompts[3][:5]]
    with Engine(tmp_path, quantization=quantization, kv_memory="1MB", max_batch_tokens=40) as engine:
        before = [only(engine.generate([prompt], params)).token_ids for prompt in prompts]
        engine.core.body._embedding[198] = value  # type: ignore[attr-defined]
        mixed = engine.generate([prompts[0], spoilt, *prompts[1:]], params)
        assert isinstance(mixed.pop(1).error, NonFiniteLogits)
        assert [response.token_ids for response in mixed] == before


@needs_decoder
def test_what_cannot_be_multiplied_in_groups_is_refused(tmp_path: Path) -> None:
    saved_model(tmp_path / "odd", "llama", TINY | {"intermediate_size": 80})
    with pytest.raises(UnsupportedModel, match=r"'int4' cannot be used: intermediate_size is 80, not divisible by 32"):
        loaded(tmp_path / "odd", "int4")
    saved_model(tmp_path / "even", "llama", TINY)
    with pytest.raises(UnsupportedModel, match=r"attention is 'sdpa', not native"):
        load_body(tmp_path / "even", EngineConfig(device="cpu", quantization="int4", attention="sdpa"))
    with pytest.raises(UnsupportedModel, match=r"'int8-group' cannot be used: dtype is float32, not bfloat16"):
        loaded(tmp_path / "even", "int8-group", "float32")


def test_a_weight_with_offsets_stands_for_its_numbers() -> None:
    weight = GroupedWeight.of(
        torch.arange(16, dtype=torch.uint8).repeat(2)[None], torch.tensor([[0.5]]).half(), torch.tensor([[-4.0]]).half()
    )
    assert weight.values[0, :16].tolist() == [number / 2 - 4 for number in range(16)]
