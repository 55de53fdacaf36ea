"""Checkpoints whose weights are numbers of 4 or 8 bits: of AWQ, GPTQ, compressed-tensors (packed), and GGUF files.

The first three mean `weight ≈ (number - zero point) · scale`, with a scale and a zero point for each output and some
consecutive inputs. They differ in how the numbers are arranged in words of 32 bits. In groups the numbers are used
unchanged, with a scale for each 32 inputs; if that is impossible, since inputs are in another order (`desc_act`) or
groups are smaller, values are rounded to 8 bits. Numbers of GGUF files were put in groups when the files were converted
(models/gguf_numbers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from batchwright.engine.native.weight_groups import GROUP, GroupedWeight, round_to_groups

_WORD = 32
_AWQ_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""For each number in a word, from the lowest bits on, which of the word's outputs it belongs to."""
_BITS = (4, 8)
_ONES = {4: 0x11111111, 8: 0x01010101}
_SUFFIXES = {"compressed-tensors": "weight_packed", "batchwright": "weight_numbers"}
Method = Literal["awq", "gptq", "compressed-tensors", "batchwright"]
Take = Callable[[str], Tensor | None]


@dataclass(frozen=True, slots=True)
class _Parts:
    """A weight as it was quantized."""

    numbers: Tensor
    """[outputs, inputs] uint8."""
    scales: Tensor
    """[outputs, groups] float32, as are `zeros`."""
    zeros: Tensor
    group_of: Tensor
    """Group of each input: [inputs] int64."""

    @property
    def values(self) -> Tensor:
        """[outputs, inputs] float32."""
        return (self.numbers.float() - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a checkpoint stores its weights."""

    method: Method
    bits: int
    symmetric: bool = False
    """Whether no zero points are stored, since they are half of the range."""
    zeros_less_one: bool = False
    """Whether stored zero points are one too low, as in the first format of GPTQ."""

    @classmethod
    def of(cls, fields: object) -> PackedFormat | str:
        """Return the format that the `quantization_config` of a model's config names, or why it is not supported."""
        if not isinstance(fields, Mapping):
            return f"quantization_config is {fields!r}, not an object"
        method = fields.get("quant_method")
        if method == "awq":
            version = fields.get("version") or "gemm"
            if str(version).lower() != "gemm":
                return f"AWQ in the version {version!r}; only gemm is read"
            return cls._checked("awq", fields.get("bits", fields.get("w_bit")))
        if method == "gptq":
            form = fields.get("checkpoint_format") or "gptq"
            if form not in ("gptq", "gptq_v2"):
                return f"GPTQ in the checkpoint_format {form!r}; only gptq and gptq_v2 are read"
            overrides, bits = fields.get("dynamic"), fields.get("bits")
            for module, changed in overrides.items() if isinstance(overrides, Mapping) else ():
                if isinstance(changed, Mapping) and changed.get("bits", bits) != bits:
                    return f"GPTQ whose dynamic gives {module!r} {changed['bits']!r} bits; all must have as many"
            found = cls._checked("gptq", bits)
            return found if isinstance(found, str) else replace(found, zeros_less_one=form == "gptq")
        if method == "compressed-tensors":
            return cls._compressed(fields)
        if method == "batchwright":
            return cls._checked("batchwright", fields.get("bits"))
        return f"quant_method {method!r}; read are awq, gptq, and compressed-tensors in the format pack-quantized"

    @classmethod
    def _checked(cls, method: Method, bits: object) -> PackedFormat | str:
        if type(bits) is not int or bits not in _BITS:
            return f"{method} with {bits!r} bits; read are 4 and 8"
        return cls(method, bits)

    @classmethod
    def _compressed(cls, fields: Mapping[str, Any]) -> PackedFormat | str:
        for name in ("transform_config", "sparsity_config"):
            if fields.get(name):
                return f"compressed-tensors with {name}"
        groups, form = fields.get("config_groups"), fields.get("format")
        if form != "pack-quantized" or not isinstance(groups, Mapping) or len(groups) != 1:
            return f"compressed-tensors in the format {form!r}; only pack-quantized with one group of layers is read"
        scheme = next(iter(groups.values()))
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
        if not isinstance(weights, Mapping):
            return f"compressed-tensors whose group of layers says nothing of weights: {scheme!r}"
        if scheme.get("input_activations") or str(weights.get("type") or "int").lower() != "int":
            return "compressed-tensors with quantized activations or weights that are not integers"
        if str(strategy := weights.get("strategy")).lower() not in ("channel", "group"):
            return f"compressed-tensors with the strategy {strategy!r}; read are channel and group"
        if (order := weights.get("actorder")) and str(order).lower() not in ("weight", "static"):
            return f"compressed-tensors with actorder={order!r}"
        found = cls._checked("compressed-tensors", weights.get("num_bits"))
        return found if isinstance(found, str) else replace(found, symmetric=bool(weights.get("symmetric", True)))

    @property
    def suffix(self) -> str:
        """The suffix of a layer's name in the name of the tensor with its numbers."""
        return _SUFFIXES.get(self.method, "qweight")

    def read(self, take: Take) -> GroupedWeight:
        """Return the weight of a layer in groups; `take` returns its stored tensors by suffix.

        Raises ValueError for tensors that do not match, or a number of inputs that is not divisible by 32.
        """
        if self.method == "batchwright":
            return _groups(take)
        parts = self._parts(take)
        inputs, size = parts.numbers.shape[1], parts.numbers.shape[1] // parts.scales.shape[1]
        if inputs % GROUP:
            raise ValueError(f"it has {inputs} inputs, not divisible by {GROUP}")
        in_order = torch.equal(parts.group_of, torch.arange(inputs) // size)
        if not in_order or size % GROUP or (self.bits == 8 and bool((parts.zeros != _middle(8)).any())):
            return round_to_groups(parts.values, 8)
        each = size // GROUP
        scales = parts.scales.repeat_interleave(each, 1).half()
        offsets = (-parts.zeros * parts.scales).repeat_interleave(each, 1).half()
        return GroupedWeight.of(parts.numbers, scales, offsets if self.bits == 4 else None)

    def values(self, take: Take) -> Tensor:
        """Return the weight of a layer as it was quantized -> [outputs, inputs] float32. Raises as `read` does."""
        return _groups(take).values if self.method == "batchwright" else self._parts(take).values

    def _parts(self, take: Take) -> _Parts:
        numbers = self._numbers(_words(take, self.suffix))
        if self.method == "compressed-tensors":
            scales = _matrix(take, "weight_scale").float()
            if (shape := take("weight_shape")) is not None:
                numbers = numbers[: int(shape[0]), : int(shape[1])]  # words at the end of a row may be padded
        else:
            scales = _matrix(take, "scales").float().t()
        (outputs, inputs), groups = numbers.shape, scales.shape[1]
        if scales.shape[0] != outputs or not groups or inputs % groups:
            raise ValueError(f"scales of the shape {list(scales.shape)} for a weight of {[outputs, inputs]}")
        zeros = self._zeros(take, scales.shape)
        if zeros.shape != scales.shape:
            raise ValueError(f"zero points of the shape {list(zeros.shape)} for scales of {list(scales.shape)}")
        order = take("g_idx") if self.method == "gptq" else None
        group_of = torch.arange(inputs) // (inputs // groups) if order is None else order.long()
        if group_of.shape != (inputs,) or int(group_of.min()) < 0 or int(group_of.max()) >= groups:
            raise ValueError(f"g_idx does not name one of {groups} groups for each of {inputs} inputs")
        return _Parts(numbers, scales, zeros, group_of)

    def _numbers(self, packed: Tensor) -> Tensor:
        """Return the numbers of a weight -> [outputs, inputs] uint8."""
        if self.method == "awq":
            return self._awq(packed).t().contiguous()
        if self.method == "gptq":
            return _unpacked(packed.t().contiguous(), self.bits)
        return _unpacked(packed, self.bits)

    def _zeros(self, take: Take, shape: torch.Size) -> Tensor:
        """Return the zero points -> [outputs, groups] float32."""
        if self.symmetric:
            return torch.full(shape, float(_middle(self.bits)))
        if self.method == "compressed-tensors":
            found = take("weight_zero_point")
            if found is None or found.dtype == torch.int8:  # older versions did not pack them, and omitted zeros
                return (torch.zeros(shape) if found is None else found.float()) + _middle(self.bits)
            packed = _words(take, "weight_zero_point")
            # Zero points are packed along the outputs.
            return _unpacked(packed.t().contiguous(), self.bits).t()[: shape[0]].float()
        packed = _words(take, "qzeros")
        if self.method == "awq":
            return self._awq(packed).t().float()
        # One was subtracted from whole words, carries included.
        words = packed + _ONES[self.bits] if self.zeros_less_one else packed
        return _unpacked(words, self.bits).t().float()

    def _awq(self, packed: Tensor) -> Tensor:
        """Return numbers that are packed along the outputs, in AWQ's order -> [rows, outputs] uint8."""
        numbers = _unpacked(packed, self.bits).view(packed.shape[0], -1, _WORD // self.bits)
        order = torch.tensor(_AWQ_ORDER[self.bits])
        return numbers[:, :, order.argsort()].reshape(packed.shape[0], -1)


def _groups(take: Take) -> GroupedWeight:
    """Return a weight of a GGUF file."""
    numbers, scales, offsets = _matrix(take, "weight_numbers"), _matrix(take, "weight_scales"), take("weight_offsets")
    if offsets is not None:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=2).flatten(1)
    if numbers.shape != (scales.shape[0], scales.shape[1] * GROUP) or (
        offsets is not None and offsets.shape != scales.shape
    ):
        raise ValueError(f"scales of the shape {list(scales.shape)} for a weight of {list(numbers.shape)}")
    return GroupedWeight.of(numbers, scales, offsets)


def _middle(bits: int) -> int:
    return 1 << (bits - 1)


def _matrix(take: Take, suffix: str) -> Tensor:
    found = take(suffix)
    if found is None:
        raise ValueError(f"there is no tensor {suffix!r}")
    if found.dim() != 2:
        raise ValueError(f"{suffix} has the shape {list(found.shape)}, which is no matrix")
    return found


def _words(take: Take, suffix: str) -> Tensor:
    found = _matrix(take, suffix)
    if found.dtype != torch.int32:
        raise ValueError(f"{suffix} holds {found.dtype}, not words of torch.int32")
    return found


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in int32 `words` [rows, n], from the lowest bits on -> [rows, n · 32 / bits] uint8."""
    mask = (1 << bits) - 1
    parts = [(words >> shift & mask).to(torch.uint8) for shift in range(0, _WORD, bits)]
    return torch.stack(parts, dim=2).reshape(words.shape[0], -1)
