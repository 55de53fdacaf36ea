"""Checkpoints of AWQ, GPTQ and compressed-tensors: packed here as their libraries do, and read as they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchwright.engine.bodies import load_body
from batchwright.engine.bodies.compiled import CompiledStack, _products
from batchwright.engine.bodies.composed import ComposedStack
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.bodies.packed_checkpoints import PackedFormat
from batchwright.engine.bodies.weights import Part, Weights
from batchwright.engine_config import EngineConfig
from batchwright.errors import UnsupportedModel

from .support import TINY, needs_decoder
from .test_decoder import all_logits, error, prompts_below, reference, saved_model

_SIZES = TINY | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


class Numbers:
    """A weight [outputs, inputs] as numbers, scales and zeros [outputs, groups]."""

    def __init__(self, weight: Tensor, bits: int, group_size: int, *, symmetric: bool) -> None:
        outputs, inputs = weight.shape
        self.bits, self.size = bits, inputs if group_size == -1 else group_size
        groups = weight.float().view(outputs, -1, self.size)
        most = 2**bits - 1
        if symmetric:
            self.scales = (groups.abs().amax(2) / (most // 2)).half().float()
            self.zeros = torch.full_like(self.scales, 2.0 ** (bits - 1))
        else:
            self.scales = ((groups.amax(2) - groups.amin(2)) / most).half().float()
            self.zeros = (-groups.amin(2) / self.scales).round().clamp(0, most)
        numbers = (groups / self.scales[..., None] + self.zeros[..., None]).round().clamp(0, most)
        self.numbers = numbers.view(outputs, inputs).int()
        self.values = ((numbers - self.zeros[..., None]) * self.scales[..., None]).view(outputs, inputs)


def packed(values: Tensor, bits: int) -> Tensor:
    """Numbers [rows, n] in words, the first in the lowest bits."""
    per = 32 // bits
    words = values.long().view(values.shape[0], -1, per)
    shifts = torch.arange(per) * bits
    return (words << shifts).sum(2).to(torch.int32)


def awq(weight: Numbers) -> dict[str, Tensor]:
    order = [0, 2, 4, 6, 1, 3, 5, 7] if weight.bits == 4 else [0, 2, 1, 3]

    def in_order(values: Tensor) -> Tensor:
        return packed(values.reshape(-1, len(order))[:, order].reshape(values.shape), weight.bits)

    return {
        "qweight": in_order(weight.numbers.t()),
        "qzeros": in_order(weight.zeros.t().int()),
        "scales": weight.scales.t().half().contiguous(),
    }


def gptq(weight: Numbers, *, first_format: bool = True, order: Tensor | None = None) -> dict[str, Tensor]:
    inputs = weight.numbers.shape[1]
    # The first format takes one from whole words, so a zero point of 0 takes from its neighbour.
    ones = packed(torch.ones(1, 32 // weight.bits), weight.bits) if first_format else torch.zeros(1, dtype=torch.int32)
    return {
        "qweight": packed(weight.numbers, weight.bits).t().contiguous(),
        "qzeros": packed(weight.zeros.t().int(), weight.bits) - ones,
        "scales": weight.scales.t().half().contiguous(),
        "g_idx": (torch.arange(inputs) // weight.size).int() if order is None else order.int(),
    }


def compressed(weight: Numbers, *, symmetric: bool) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": packed(weight.numbers, weight.bits),
        "weight_scale": weight.scales.half(),
        "weight_shape": torch.tensor(weight.numbers.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(weight.zeros.t().int(), weight.bits).t().contiguous()
    return tensors


def compressed_fields(bits: int, group_size: int, *, symmetric: bool) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def checkpoint(
    folder: Path, fields: dict[str, Any], *, left_out: str = "none", kind: str = "llama", **config: Any
) -> Any:
    """Replace the weights of layers in `folder` by packed ones; return the model with the values they stand for.

    Those whose names hold `left_out` stay as they are.
    """
    model = saved_model(folder, kind, _SIZES)
    method = fields["quant_method"]
    if method == "compressed-tensors":
        scheme = fields["config_groups"]["group_0"]["weights"]
        bits, size, symmetric = scheme["num_bits"], scheme.get("group_size", -1), scheme["symmetric"]
    else:
        bits, size, symmetric = fields["bits"], fields["group_size"], fields.get("sym", False)
    tensors = load_file(folder / "model.safetensors")
    found = dict(tensors)
    parameters = dict(model.named_parameters())
    for name, weight in tensors.items():
        if "_proj.weight" not in name or left_out in name:
            continue
        numbers = Numbers(weight, bits, size, symmetric=symmetric)
        base = name.removesuffix("weight")
        if method == "awq":
            parts = awq(numbers)
        elif method == "gptq":
            parts = gptq(numbers, first_format=fields.get("checkpoint_format") != "gptq_v2")
        else:
            parts = compressed(numbers, symmetric=symmetric)
        del found[name]
        found |= {base + suffix: part for suffix, part in parts.items()}
        if method == "gptq":
            found.setdefault(base + "bias", torch.zeros(len(weight)))  # as AutoGPTQ writes them
        with torch.no_grad():
            parameters[name].copy_(numbers.values)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": fields}))
    return model


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
FORMATS = [
    pytest.param(AWQ, id="awq"),
    pytest.param(AWQ | {"group_size": 32}, id="awq-32"),
    pytest.param(GPTQ, id="gptq"),
    pytest.param(GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, id="gptq-v2"),
    pytest.param(GPTQ | {"bits": 8, "group_size": -1}, id="gptq-8"),
    pytest.param(GPTQ | {"bits": 8, "sym": False}, id="gptq-8-zeros"),
    pytest.param(GPTQ | {"group_size": 16}, id="gptq-16"),
    pytest.param(compressed_fields(4, 128, symmetric=True), id="compressed"),
    pytest.param(compressed_fields(4, 32, symmetric=False), id="compressed-zeros"),
    pytest.param(compressed_fields(8, -1, symmetric=True), id="compressed-8"),
]


@needs_decoder
@pytest.mark.parametrize("fields", FORMATS)
def test_logits_are_those_of_the_values(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = checkpoint(tmp_path, fields)
    prompts = prompts_below(199)
    exact = reference(model, prompts)
    body = load_body(tmp_path, EngineConfig(device="cpu"))
    assert isinstance(body, LlamaBody)
    body.allocate(400, 16, "auto")
    assert isinstance(body.stack, CompiledStack)
    assert error(all_logits(body, prompts), exact) < 1.15 * math.hypot(0.02, 0.05)


@needs_decoder
@pytest.mark.parametrize("left_out", ["v_proj", "down_proj", "mlp."])
def test_what_was_left_as_it_was_has_8_bits(tmp_path: Path, left_out: str) -> None:
    model = checkpoint(tmp_path, AWQ, left_out=left_out, kind="qwen2")
    prompts = prompts_below(199)
    body = load_body(tmp_path, EngineConfig(device="cpu", quantization="int4"))
    assert isinstance(body, LlamaBody)
    body.allocate(400, 16, "auto")
    assert isinstance(body.stack, CompiledStack)
    assert {each.bits for each in _products(body.stack._decoder._kept)} == {4, 8}
    assert error(all_logits(body, prompts), reference(model, prompts)) < 1.15 * math.hypot(0.02, 0.05)


@pytest.mark.parametrize("fields", [AWQ, GPTQ | {"sym": False}, compressed_fields(4, 32, symmetric=False)])
def test_without_compiled_layers_values_are_multiplied(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = checkpoint(tmp_path, fields)
    prompts = prompts_below(199)
    body = load_body(tmp_path, EngineConfig(device="cpu", dtype="float32"))
    assert isinstance(body, LlamaBody)
    body.allocate(400, 16, "auto")
    assert isinstance(body.stack, ComposedStack)
    assert error(all_logits(body, prompts), reference(model, prompts)) < 1e-4


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"bits": 3}, "with 3 bits"),
        (AWQ | {"bits": 4.0}, "with 4.0 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*lm.*": {}, "+:.*down.*": {"bits": 8}}}, "gives '+:.*down.*' 8 bits"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "format 'int-quantized'"),
        (compressed_fields(4, 32, symmetric=True) | {"transform_config": {"R1": {}}}, "transform_config"),
        (compressed_fields(4, 32, symmetric=True) | {"config_groups": {"group_0": None}}, "says nothing of weights"),
        (["awq"], "not an object"),
    ],
)
def test_other_formats_say_what_is_read(fields: object, reason: str) -> None:
    found = PackedFormat.of(fields)
    assert isinstance(found, str)
    assert reason in found


def test_inputs_in_another_order_are_read_by_their_values() -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(256, generator=torch.Generator().manual_seed(4))
    sorted_numbers = Numbers(weight[:, order], 4, 64, symmetric=True)
    back = order.argsort()
    numbers = Numbers(weight, 4, 64, symmetric=True)
    numbers.numbers, numbers.values = sorted_numbers.numbers[:, back], sorted_numbers.values[:, back]
    numbers.scales, numbers.zeros = sorted_numbers.scales, sorted_numbers.zeros
    tensors = gptq(numbers, order=back // 64)
    form = PackedFormat("gptq", 4, zeros_less_one=True)
    found = form.read(tensors.get)
    assert found.bits == 8
    assert error(found.values, numbers.values) < 0.01
    assert torch.allclose(form.values(tensors.get), numbers.values)


def test_numbers_of_4_bits_take_half_a_byte(tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ)
    packed = PackedFormat.of(AWQ)
    assert isinstance(packed, PackedFormat)
    weights = Weights(tmp_path, torch.bfloat16, torch.device("cpu"), packed)
    shape = (_SIZES["hidden_size"], _SIZES["intermediate_size"])
    numbers = weights.numbers("model.layers.0.mlp.down_proj.weight", shape)
    assert numbers is not None
    assert numbers.shape == shape
    assert numbers.numbers.untyped_storage().nbytes() == shape[0] * shape[1] // 2


def test_parts_of_a_packed_weight_keep_no_more_of_it(tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ)
    packed = PackedFormat.of(AWQ)
    assert isinstance(packed, PackedFormat)
    weights = Weights(tmp_path, torch.float32, torch.device("cpu"), packed)
    name = "model.layers.0.mlp.down_proj.weight"
    for taken in (weights.take(name, rows=Part(16, 32)), weights.take(name, columns=Part(0, 64))):
        assert taken.untyped_storage().nbytes() == taken.nbytes


@pytest.mark.parametrize("first_format", [True, False])
def test_a_zero_point_of_zero_takes_from_its_neighbour(first_format: bool) -> None:
    numbers = Numbers(torch.rand(16, 64, generator=torch.Generator().manual_seed(3)), 4, 32, symmetric=False)
    assert 0 in numbers.zeros
    numbers.zeros[3:5] = torch.tensor([15.0, 7.0])
    expected = (numbers.numbers.view(16, 2, 32) - numbers.zeros[..., None]) * numbers.scales[..., None]
    found = PackedFormat("gptq", 4, zeros_less_one=first_format)
    assert torch.allclose(found.values(gptq(numbers, first_format=first_format).get), expected.view(16, 64))


@pytest.mark.parametrize("symmetric", [False, True])
def test_zero_points_that_are_not_packed(symmetric: bool) -> None:
    """As compressed-tensors wrote them once: as they are, and none where all are 0."""
    numbers = Numbers(torch.rand(16, 64, generator=torch.Generator().manual_seed(3)), 4, 32, symmetric=symmetric)
    tensors = compressed(numbers, symmetric=True)
    if not symmetric:
        tensors["weight_zero_point"] = (numbers.zeros - 8).to(torch.int8)
    assert torch.allclose(PackedFormat("compressed-tensors", 4).values(tensors.get), numbers.values)


def test_words_that_are_filled_up_are_cut() -> None:
    numbers = Numbers(torch.randn(8, 100, generator=torch.Generator().manual_seed(3)), 4, -1, symmetric=True)
    shape, values = torch.tensor(numbers.numbers.shape), numbers.values
    numbers.numbers = torch.nn.functional.pad(numbers.numbers, (0, 4), value=8)
    tensors = compressed(numbers, symmetric=True) | {"weight_shape": shape}
    form = PackedFormat("compressed-tensors", 4, symmetric=True)
    assert torch.allclose(form.values(tensors.get), values)
    with pytest.raises(ValueError, match="100 inputs, not divisible by 32"):
        form.read(tensors.get)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"scales": torch.ones(3, 32)}, r"scales of the shape \[32, 3\]"),
        ({"scales": torch.ones(32)}, "no matrix"),
        ({"qweight": torch.zeros(32, 32, dtype=torch.int64)}, "qweight holds torch.int64"),
        ({"qzeros": torch.zeros(1, 4, dtype=torch.int32)}, "zero points"),
        ({"g_idx": torch.full((256,), 9, dtype=torch.int32)}, "g_idx"),
        ({"g_idx": torch.full((256,), -1, dtype=torch.int32)}, "g_idx"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changed: dict[str, Tensor], reason: str) -> None:
    numbers = Numbers(torch.randn(32, 256, generator=torch.Generator().manual_seed(3)), 4, 64, symmetric=True)
    with pytest.raises(ValueError, match=reason):
        PackedFormat("gptq", 4).read((gptq(numbers) | changed).get)


def test_another_quantization_than_the_checkpoint_has_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ)
    with pytest.raises(UnsupportedModel, match=r"quantization='int8': the checkpoint's weights have 4 bits already"):
        load_body(tmp_path, EngineConfig(device="cpu", quantization="int8"))
    with pytest.raises(UnsupportedModel, match=r"quantization='int4' cannot be used: dtype is float32.*Leave it out"):
        load_body(tmp_path, EngineConfig(device="cpu", quantization="int4", dtype="float32"))


def test_a_damaged_weight_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.qzeros"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"1.mlp.up_proj.weight' that cannot be read: .*'qzeros'"):
        load_body(tmp_path, EngineConfig(device="cpu"))
