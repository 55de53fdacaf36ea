"""Matrix products with weights packed once for the processor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor], Tensor]
"""[rows, in] → [rows, out]."""

# torch packs weights only through operators that it names as private; inductor uses the same ones.
_TYPICAL_ROWS = 64
"""oneDNN picks the packed layout for a number of rows; the layout it picks for 64 is good from 1 to 512."""


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`x · weightᵀ + bias` for `weight` [out, in]. The CPU works on a repacked copy of it."""
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)  # noqa: SLF001
        product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

        def packed_linear(x: Tensor) -> Tensor:
            # A single row goes through another kernel, which rounds differently: twice the row keeps what a sequence
            # computes alone bitwise equal to what it computes in company, at the cost of reading no more weights.
            single = x.shape[0] == 1
            out: Tensor = product(x.expand(2, -1).contiguous() if single else x, packed, bias, "none", [], "")
            return out[:1] if single else out

        return packed_linear

    def plain_linear(x: Tensor) -> Tensor:
        return functional.linear(x, weight, bias)

    return plain_linear


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype is torch.float32
