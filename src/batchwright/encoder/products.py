"""The matrix products of an encoder layer, each with what follows it in the same pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.bodies.linear import can_pack

_TYPICAL_ROWS = 512
"""oneDNN picks the packed layout for a number of rows; an encoder's batches have hundreds."""

_ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_new": ("gelu", "tanh"), "gelu_pytorch_tanh": ("gelu", "tanh")}
_PLAIN = ("none", "")

ACTIVATIONS = frozenset(_ACTIVATIONS)
"""Names, as in a transformers config, of those that a `Product` can apply."""


class Product:
    """`x · weightᵀ + bias` for `weight` [out, in], followed by an activation. The CPU works on a repacked copy."""

    # torch packs weights and fuses what follows only through operators that it names as private; inductor, its
    # compiler, uses the same ones.

    def __init__(self, weight: Tensor, bias: Tensor, activation: str | None = None) -> None:
        self._kind, self._algorithm = _PLAIN if activation is None else _ACTIVATIONS[activation]
        self._bias = bias
        self._packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
        self._weight = reorder(weight, _TYPICAL_ROWS) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out]"""
        if self._packed:
            fused = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
            out: Tensor = fused(x, self._weight, self._bias, self._kind, [], self._algorithm)
            return out
        out = functional.linear(x, self._weight, self._bias)
        return functional.gelu(out, approximate=self._algorithm) if self._kind == "gelu" else out

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, without the activation, plus `other` [rows, out]."""
        if self._packed:
            fused = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001
            out: Tensor = fused(x, other, self._weight, self._bias, "add")
            return out
        return functional.linear(x, self._weight, self._bias) + other
