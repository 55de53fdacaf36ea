"""Matrix products with weights that are packed once for the processor."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.native.weight_panels import quantize_rows
from batchwright.engine.tried_kernels import kernels_or

Linear = Callable[[Tensor], Tensor]
"""[rows, in] → [rows, out]."""

# torch packs weights only through operators that it calls private; inductor uses the same ones.
_TYPICAL_ROWS = 64
"""Number of rows for which oneDNN picks the packed layout; the layout for 64 is good from 1 to 512."""

FP8_CAPABILITY = (8, 9)
"""First compute capability with products in 8-bit floating point."""
FP8_MULTIPLE = 16
"""Sizes of a weight in 8-bit floating point must be divisible by this."""
_FP8_GREATEST = torch.finfo(torch.float8_e4m3fn).max
_ROUNDED_ALIKE = 0.995
_FP8_TOLERANCE = 2e-2
"""Greatest relative norm of a difference from the product of the same rounded values."""

_LEAST_CUDA_ROWS = 32
"""Number of rows to which fewer rows are padded: torch multiplies int8 on CUDA from 17 rows on."""

# torch and oneDNN each cache what they prepare for the shape of a product, about a megabyte per shape, and batches keep
# having new shapes: with the default of 1024 shapes each, a process grows by more than a gigabyte. Both read their
# variable at the first product.
_SHAPES_KEPT = "32"
for _variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, _SHAPES_KEPT)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the function x -> `x · weightᵀ + bias` for `weight` [out, in]; on the CPU it uses a repacked copy."""
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

    return lambda x: functional.linear(x, weight, bias)


def make_quantized_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return `make_linear` in int8: each row of `weight` and each row of the input has a scale, sums are exact."""
    whole, scales = quantize_rows(weight)
    columns = whole.t()

    def quantized_linear(x: Tensor) -> Tensor:
        rows, row_scales = quantize_rows(x)
        if rows.is_cuda and len(x) < _LEAST_CUDA_ROWS:
            rows = functional.pad(rows, (0, 0, 0, _LEAST_CUDA_ROWS - len(x)))
        whole_product = torch._int_mm(rows, columns)[: len(x)]  # noqa: SLF001
        out = whole_product.float() * row_scales[:, None] * scales
        return (out if bias is None else out + bias).to(x.dtype)

    return quantized_linear


def make_fp8_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return `make_linear` in 8-bit floating point: each row of `weight` and each row of the input has a scale.

    Sizes of `weight` must be divisible by `FP8_MULTIPLE`. Results are bfloat16.
    """
    return fp8_linear(*to_fp8(weight), bias)


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of `weight` [out, in] in 8-bit floating point, and their scales [out] float32."""
    return _rounding_on(weight.device, weight.dtype)(weight)


def fp8_linear(weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Linear:
    """Return `make_fp8_linear` of a weight and scales that `to_fp8` returned."""
    rounding = _rounding_on(weight.device, torch.bfloat16)
    columns, column_scales = weight.t(), scales[None, :]

    def linear(x: Tensor) -> Tensor:
        rows, row_scales = rounding(x)
        out: Tensor = torch._scaled_mm(  # noqa: SLF001
            rows,
            columns,
            scale_a=row_scales[:, None],
            scale_b=column_scales,
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out

    return linear


@cache
def fp8_disagreement(device: torch.device) -> str | None:
    """Return why products in 8-bit floating point cannot be trusted on a CUDA device, or None if they are right."""
    generator = torch.Generator(device).manual_seed(0)
    weight, x = (
        torch.empty(rows, 256, dtype=torch.bfloat16, device=device).normal_(generator=generator) for rows in (96, 5)
    )
    try:
        product = make_fp8_linear(weight)(x).float()
    except Exception as error:  # from a library or a driver: whatever it is, the product does not run here
        return f"it fails: {type(error).__name__}: {error}"
    (rows, row_scales), (columns, scales) = round_rows(x), round_rows(weight)
    expected = (rows.float() @ columns.float().t()) * row_scales[:, None] * scales
    difference = float((product - expected).norm() / expected.norm())
    return None if difference < _FP8_TOLERANCE else f"it differs from the reference by {difference:.2g}"


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `x` [rows, dim] -> float8_e4m3fn and scales [rows] float32: x ≈ rounded · scale."""
    wide = x.float()
    scales = wide.abs().amax(1) / _FP8_GREATEST
    inverse = torch.where(scales == 0.0, torch.zeros_like(scales), 1.0 / scales)
    # A product that is rounded up would become NaN.
    return (wide * inverse[:, None]).clamp_(-_FP8_GREATEST, _FP8_GREATEST).to(torch.float8_e4m3fn), scales


Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Computes `round_rows`."""


@cache
def _rounding_on(device: torch.device, dtype: torch.dtype) -> Rounding:
    """Return the Triton kernel if it is available on a CUDA device and passes its trial; else torch's."""
    if device.type != "cuda":
        return round_rows

    def compiled() -> Rounding:
        from batchwright.engine.bodies.triton_ops import round_rows

        return round_rows

    def disagreement(rounding: Rounding) -> str | None:
        return None if rounds_as_torch(rounding, device, dtype) else "it differs from torch's"

    plain: Rounding = round_rows
    return kernels_or(plain, "Triton's rounding is not used", device, compiled, disagreement)


def rounds_as_torch(rounding: Rounding, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `rounding` agrees with `round_rows`, except for a few values half way between two others."""
    x = torch.empty(9, 1000, device=device).normal_(generator=torch.Generator(device).manual_seed(0)).to(dtype)
    x[1:4] *= torch.tensor([[1e-3], [1e3], [0.0]], dtype=dtype, device=device)
    x[4, 7] = torch.nan
    x[5, 7] = 300.0
    (ours, our_scales), (expected, scales) = (each(x) for each in (rounding, round_rows))
    near = torch.allclose(our_scales, scales, rtol=1e-5, atol=0.0, equal_nan=True)
    same = (ours.float() == expected.float()) | (ours.float().isnan() & expected.float().isnan())
    return near and float(same.float().mean()) > _ROUNDED_ALIKE


_single_row_differs: dict[tuple[int, int, torch.dtype], bool] = {}
"""Whether a single row is rounded differently from the same row among others, by weight shape and dtype.

For some shapes oneDNN uses a different kernel for one row. Then the row is computed twice, so that the results of a
sequence alone are bitwise equal to those beside others; this reads no more weights.
"""
_PROBED_VALUES = 150_000
"""Values that are compared: in bfloat16 about one in 5,000 shows that another kernel was used."""


def _differs_alone(linear: Linear, weight: Tensor) -> bool:
    rows = max(8, _PROBED_VALUES // weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
    together = linear(x)
    return any(not torch.equal(linear(x[row : row + 1]), together[row : row + 1]) for row in range(rows))


def rounds_by_company(linear: Linear, inputs: int, dtype: torch.dtype, most: int) -> int | None:
    """Return a number of rows at which `linear` gives a row different bits than among `most` rows; None if not found.

    Products on the CPU pick their kernels by the number of rows; the numbers tried are dense where the kernels change:
    few rows, and around powers of two.
    """
    x = torch.randn(most, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    among_most = linear(x)
    powers = [2**exponent for exponent in range(most.bit_length())]
    counts = {*range(1, 9), *powers, *(count + 1 for count in powers), *(3 * count for count in powers)}
    # The last rows are tried, so that each has a different position than it had among all.
    return next((n for n in sorted(counts) if n < most and not torch.equal(linear(x[-n:]), among_most[-n:])), None)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this processor has packed products of this type."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype is torch.float32
