"""Matrix products with weights packed once for the processor."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.native.weight_panels import quantize_rows

Linear = Callable[[Tensor], Tensor]
"""[rows, in] → [rows, out]."""

# torch packs weights only through operators that it names as private; inductor uses the same ones.
_TYPICAL_ROWS = 64
"""oneDNN picks the packed layout for a number of rows; the layout it picks for 64 is good from 1 to 512."""

# torch and oneDNN each keep what they prepared for a product of a certain shape, about a megabyte for each, and batches
# have ever new ones: with the 1024 of either that are usual, a process grows by more than a gigabyte. Both read their
# variable at the first product, unless it was set already.
_SHAPES_KEPT = "32"
for _variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, _SHAPES_KEPT)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`x · weightᵀ + bias` for `weight` [out, in]. The CPU works on a repacked copy of it."""
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)  # noqa: SLF001
        product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

        def packed_linear(x: Tensor) -> Tensor:
            out: Tensor = product(x, packed, bias, "none", [], "")
            return out

        def never_single(x: Tensor) -> Tensor:
            if x.shape[0] != 1:
                return packed_linear(x)
            return packed_linear(x.expand(2, -1).contiguous())[:1]

        shape = (*weight.shape, weight.dtype)
        if shape not in _single_row_differs:
            _single_row_differs[shape] = _differs_alone(packed_linear, weight)
        return never_single if _single_row_differs[shape] else packed_linear

    def plain_linear(x: Tensor) -> Tensor:
        return functional.linear(x, weight, bias)

    return plain_linear


def make_quantized_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`make_linear` in int8: each row of `weight` and each row of the input has a scale, sums are exact."""
    whole, scales = quantize_rows(weight)
    columns = whole.t()

    def quantized_linear(x: Tensor) -> Tensor:
        rows, row_scales = quantize_rows(x)
        out = _whole_product(rows, columns).float() * row_scales[:, None] * scales
        return (out if bias is None else out + bias).to(x.dtype)

    return quantized_linear


_LEAST_CUDA_ROWS = 32
"""torch multiplies int8 on CUDA from 17 rows on."""


def _whole_product(rows: Tensor, columns: Tensor) -> Tensor:
    count = rows.shape[0]
    if rows.is_cuda and count < _LEAST_CUDA_ROWS:
        rows = functional.pad(rows, (0, 0, 0, _LEAST_CUDA_ROWS - count))
    return torch._int_mm(rows, columns)[:count]  # noqa: SLF001


_single_row_differs: dict[tuple[int, int, torch.dtype], bool] = {}
"""By weight shape and dtype, whether a single row is rounded differently from the same row in company.

oneDNN takes another kernel for one row of some shapes. There twice the row is computed, which keeps what a sequence
computes alone bitwise equal to what it computes beside others, and reads no more weights.
"""
_PROBED_VALUES = 150_000
"""In bfloat16 about one value in 5,000 shows that another kernel was at work."""


def _differs_alone(linear: Linear, weight: Tensor) -> bool:
    rows = max(8, _PROBED_VALUES // weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
    together = linear(x)
    return any(not torch.equal(linear(x[row : row + 1]), together[row : row + 1]) for row in range(rows))


def rounds_by_company(linear: Linear, inputs: int, dtype: torch.dtype, most: int) -> int | None:
    """A number of rows at which `linear` gives a row other bits than among `most`; None when none was found.

    Products on the CPU pick their kernels by the number of rows; those up to `most` that are tried are dense where the
    kernels change: few rows, and around powers of two.
    """
    x = torch.randn(most, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    among_most = linear(x)
    powers = [2**exponent for exponent in range(most.bit_length())]
    counts = {*range(1, 9), *powers, *(count + 1 for count in powers), *(3 * count for count in powers)}
    # The last rows: each stands elsewhere than it did among all.
    return next((n for n in sorted(counts) if n < most and not torch.equal(linear(x[-n:]), among_most[-n:])), None)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor has packed products of this type."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype is torch.float32
