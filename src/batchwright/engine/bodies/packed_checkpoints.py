"""Checkpoints whose weights are numbers of 4 or 8 bits: AWQ, GPTQ, and those that compressed-tensors packs.

All three say `weight ≈ (number - zero) · scale`, with a scale and a zero for each output and some inputs in a row. They
differ in how the numbers lie in words of 32 bits. They are taken as they are, with a scale for each 32 inputs; where
that cannot be, since inputs are in another order (`desc_act`) or groups are smaller, values are rounded to 8 bits.
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
"""Which output of a word's each number in it is of, from the lowest bits on."""
_BITS = (4, 8)
Method = Literal["awq", "gptq", "compressed-tensors"]


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a checkpoint holds its weights."""

    method: Method
    bits: int
    group_size: int
    """Inputs with one scale; -1: all."""
    symmetric: bool = False
    """Whether no zeros are stored: it is half of the numbers."""
    zeros_less_one: bool = False
    """Whether stored zeros are one less than they should be, as in the first format of GPTQ."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> PackedFormat | str:
        """Return the format that the `quantization_config` of a model's config says, or why it is not read."""
        method = fields.get("quant_method")
        if method == "awq":
            if (version := str(fields.get("version", "gemm")).lower()) != "gemm":
                return f"AWQ in the version {version!r}; only gemm is read"
            return cls._checked("awq", fields.get("bits", fields.get("w_bit")), fields.get("group_size", 128))
        if method == "gptq":
            plain = fields.get("checkpoint_format", "gptq")
            if plain not in ("gptq", "gptq_v2"):
                return f"GPTQ in the checkpoint_format {plain!r}; only gptq and gptq_v2 are read"
            found = cls._checked("gptq", fields.get("bits"), fields.get("group_size", 128))
            return found if isinstance(found, str) else replace(found, zeros_less_one=plain == "gptq")
        if method == "compressed-tensors":
            return cls._compressed(fields)
        return f"quant_method {method!r}; read are awq, gptq, and compressed-tensors in the format pack-quantized"

    @classmethod
    def _checked(cls, method: Method, bits: Any, group_size: Any) -> PackedFormat | str:
        if bits not in _BITS or type(group_size) is not int or group_size == 0 or group_size < -1:
            return f"{method} with bits={bits!r} and group_size={group_size!r}; read are 4 and 8 bits"
        return cls(method, bits, group_size)

    @classmethod
    def _compressed(cls, fields: Mapping[str, Any]) -> PackedFormat | str:
        groups = fields.get("config_groups")
        kind = fields.get("format")
        if kind != "pack-quantized" or not isinstance(groups, Mapping) or len(groups) != 1:
            return f"compressed-tensors in the format {kind!r}; only pack-quantized with one group of layers is read"
        scheme = next(iter(groups.values()))
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
        if not isinstance(weights, Mapping):
            return f"compressed-tensors whose group of layers says nothing of weights: {scheme!r}"
        if scheme.get("input_activations") or weights.get("type", "int") != "int":
            return "compressed-tensors with quantized activations or other numbers than whole ones"
        size = -1 if weights.get("strategy") == "channel" else weights.get("group_size")
        found = cls._checked("compressed-tensors", weights.get("num_bits"), size)
        if isinstance(found, str):
            return found
        if weights.get("actorder") not in (None, "weight", "static"):
            return f"compressed-tensors with actorder={weights.get('actorder')!r}"
        return replace(found, symmetric=bool(weights.get("symmetric", True)))

    @property
    def suffix(self) -> str:
        """What follows the name of a layer in the name of the tensor with its numbers."""
        return "weight_packed" if self.method == "compressed-tensors" else "qweight"

    def read(self, take: Callable[[str], Tensor | None]) -> GroupedWeight:
        """Return the weight of a layer, of which `take` returns tensors as they are stored, or None, by their suffixes.

        Raises ValueError for tensors that do not fit each other.
        """
        numbers = self._numbers(_required(take, self.suffix))
        scales = _required(take, "weight_scale" if self.method == "compressed-tensors" else "scales").float()
        if self.method != "compressed-tensors":
            scales = scales.t()
        outputs, inputs = numbers.shape
        if scales.shape[0] != outputs or inputs % scales.shape[1]:
            raise ValueError(f"scales of the shape {list(scales.shape)} for a weight of {[outputs, inputs]}")
        zeros = self._zeros(take, scales.shape)
        size = inputs // scales.shape[1]
        order = take("g_idx") if self.method == "gptq" else None
        in_order = order is None or torch.equal(order.long(), torch.arange(inputs) // size)
        if not in_order or size % GROUP or (self.bits == 8 and bool((zeros != _middle(8)).any())):
            of_input = torch.arange(inputs) // size if order is None else order.long()
            return round_to_groups((numbers.float() - zeros[:, of_input]) * scales[:, of_input], 8)
        each = size // GROUP
        repeated, offsets = (
            scales.repeat_interleave(each, 1).half(),
            (-zeros * scales).repeat_interleave(each, 1).half(),
        )
        return GroupedWeight(numbers, repeated, offsets if self.bits == 4 else None)

    def _numbers(self, packed: Tensor) -> Tensor:
        """Return the numbers of a weight -> [outputs, inputs] uint8."""
        if self.method == "awq":
            return self._awq(packed).t().contiguous()
        if self.method == "gptq":
            return _unpacked(packed.t().contiguous(), self.bits)
        return _unpacked(packed, self.bits)

    def _zeros(self, take: Callable[[str], Tensor | None], shape: torch.Size) -> Tensor:
        """Return the numbers that stand for 0 -> [outputs, groups] float32."""
        if self.symmetric:
            return torch.full(shape, float(_middle(self.bits)))
        if self.method == "compressed-tensors":
            packed = _required(take, "weight_zero_point")
            # They are packed along the outputs.
            return _unpacked(packed.t().contiguous(), self.bits).t()[: shape[0]].float()
        packed = _required(take, "qzeros")
        if self.method == "awq":
            return self._awq(packed).t().float()
        found = _unpacked(packed, self.bits).t().float()
        return (found + 1) % 2**self.bits if self.zeros_less_one else found

    def _awq(self, packed: Tensor) -> Tensor:
        """Return numbers that are packed along the outputs, in AWQ's order -> [rows, outputs] uint8."""
        numbers = _unpacked(packed, self.bits).view(packed.shape[0], -1, _WORD // self.bits)
        order = torch.tensor(_AWQ_ORDER[self.bits])
        return numbers[:, :, order.argsort()].reshape(packed.shape[0], -1)


def _middle(bits: int) -> int:
    return 1 << (bits - 1)


def _required(take: Callable[[str], Tensor | None], suffix: str) -> Tensor:
    found = take(suffix)
    if found is None:
        raise ValueError(f"there is no tensor {suffix!r}")
    return found


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in int32 `words` [rows, n], from the lowest bits on -> [rows, n · 32 / bits] uint8."""
    mask = (1 << bits) - 1
    parts = [(words >> shift & mask).to(torch.uint8) for shift in range(0, _WORD, bits)]
    return torch.stack(parts, dim=2).reshape(words.shape[0], -1)
