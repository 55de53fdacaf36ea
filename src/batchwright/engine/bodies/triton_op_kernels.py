"""The Triton kernels of `FusedOps`. Importing this needs Triton.

Each rounds where `TorchOps` rounds, so that results differ by the order of sums alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rms_norm(out, delta, residual, weight, eps, DIM: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr):
    """One row; all are contiguous."""
    d = tl.arange(0, PADDED)
    column = d < DIM
    at = tl.program_id(0).to(tl.int64) * DIM + d
    x = tl.load(residual + at, mask=column, other=0.0).to(tl.float32)
    if ADDS:
        total = x + tl.load(delta + at, mask=column, other=0.0).to(tl.float32)
        rounded = total.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=column)
        x = rounded.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)).to(out.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + d, mask=column, other=0.0).to(tl.float32)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=column)


@triton.jit
def head_rms_norm(x, weight, row_stride, heads, eps, DIM: tl.constexpr, PADDED: tl.constexpr):
    """One head of one row, in place."""
    d = tl.arange(0, PADDED)
    column = d < DIM
    at = (tl.program_id(0) // heads).to(tl.int64) * row_stride + (tl.program_id(0) % heads) * DIM + d
    value = tl.load(x + at, mask=column, other=0.0).to(tl.float32)
    normed = (value * tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + d, mask=column, other=0.0).to(tl.float32)
    tl.store(x + at, scaled.to(x.dtype.element_ty), mask=column)


@triton.jit
def silu_mul(out, gate_up, dim, spans, SPAN: tl.constexpr):
    """A span of one row of `out` [T, dim], from `gate_up` [T, 2 · dim]."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    column = (tl.program_id(0) % spans) * SPAN + tl.arange(0, SPAN)
    inside = column < dim
    gate = tl.load(gate_up + row * 2 * dim + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * dim + dim + column, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + column, (active * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_and_store(
    qkv,  # [T, (HEADS + 2 · KV_HEADS) · 2 · HALF], rows `row_stride` apart
    keys,  # [blocks, KV_HEADS, BLOCK_SIZE, 2 · HALF]
    values,
    cosines,  # [positions, HALF] float32
    sines,
    positions,  # [T] int64
    slots,  # [T] int64
    row_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """One head of one row: a query is rotated where it is, a key on its way to the cache; a value just goes there."""
    row = tl.program_id(0) // (HEADS + 2 * KV_HEADS)
    head = tl.program_id(0) % (HEADS + 2 * KV_HEADS)
    d = tl.arange(0, PADDED_HALF)
    inside = d < HALF
    here = qkv + row.to(tl.int64) * row_stride + head * 2 * HALF + d
    low = tl.load(here, mask=inside, other=0.0)
    high = tl.load(here + HALF, mask=inside, other=0.0)
    slot = tl.load(slots + row)
    if head < HEADS + KV_HEADS:
        turn = tl.load(positions + row) * HALF + d
        cosine = tl.load(cosines + turn, mask=inside, other=0.0)
        sine = tl.load(sines + turn, mask=inside, other=0.0)
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        low = (wide_low * cosine - wide_high * sine).to(low.dtype)
        high = (wide_high * cosine + wide_low * sine).to(high.dtype)
    if head < HEADS:
        tl.store(here, low, mask=inside)
        tl.store(here + HALF, high, mask=inside)
    else:
        kv_head = (head - HEADS) % KV_HEADS
        at = ((slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * 2 * HALF + d
        if head < HEADS + KV_HEADS:
            tl.store(keys + at, low, mask=inside)
            tl.store(keys + at + HALF, high, mask=inside)
        else:
            tl.store(values + at, low, mask=inside)
            tl.store(values + at + HALF, high, mask=inside)
