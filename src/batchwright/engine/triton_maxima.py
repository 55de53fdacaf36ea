"""Triton kernels for the greatest value of each row, with many programs per row. Importing this needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def span_maxima(best, where, x, row_stride, dim, spans, SPAN: tl.constexpr):
    """Find the greatest value of a span of one row of `x`, NaN if it holds one, and its first index."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    column = (tl.program_id(0) % spans) * SPAN + tl.arange(0, SPAN)
    value = tl.load(x + row * row_stride + column, mask=column < dim, other=-float("inf")).to(tl.float32)
    greatest, first = _maximum(value, column)
    tl.store(best + tl.program_id(0), greatest)
    tl.store(where + tl.program_id(0), first)


@triton.jit
def row_maxima_of_spans(out, index, best, where, spans, PADDED: tl.constexpr):
    """Find the same for a whole row, from the results of `span_maxima` for its `spans`."""
    row = tl.program_id(0)
    span = tl.arange(0, PADDED)
    at = row * spans + span
    value = tl.load(best + at, mask=span < spans, other=-float("inf"))
    # Positions past the end come after everything, even -inf.
    column = tl.load(where + at, mask=span < spans, other=2147483647)
    greatest, first = _maximum(value, column)
    tl.store(out + row, greatest.to(out.dtype.element_ty))
    tl.store(index + row, first.to(tl.int64))


@triton.jit
def _maximum(value, column):
    """Return the greatest of `value`, NaN if it holds one, and the least `column` among the equal greatest ones."""
    is_nan = value != value
    any_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    greatest = tl.max(tl.where(is_nan, -float("inf"), value), 0)
    is_greatest = tl.where(any_nan, is_nan, value == greatest)
    first = tl.min(tl.where(is_greatest, column, 2147483647), 0)
    return tl.where(any_nan, float("nan"), greatest), first


_SPAN = 4096


def row_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest value of each row of `x` [rows, dim], NaN if it holds one, and its first index."""
    rows, dim = x.shape
    spans = triton.cdiv(dim, _SPAN)
    best = x.new_empty(rows * spans, dtype=torch.float32)
    where = x.new_empty(rows * spans, dtype=torch.int32)
    out, index = x.new_empty(rows), x.new_empty(rows, dtype=torch.int64)
    with torch.cuda.device_of(x):
        span_maxima[(rows * spans,)](best, where, x, x.stride(0), dim, spans, SPAN=_SPAN, num_warps=8)
        row_maxima_of_spans[(rows,)](out, index, best, where, spans, PADDED=triton.next_power_of_2(spans), num_warps=1)
    return out, index
