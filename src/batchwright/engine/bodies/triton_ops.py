"""The operations of a Llama layer between its products, one Triton kernel for each. Importing this needs Triton.

Each rounds where `TorchOps` rounds, so that results differ only by the order of sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from batchwright.engine.attention import LayerCache
from batchwright.engine.bodies.ops import HeadShape, RopeTable
from batchwright.engine.early_launch import early_launch, launches_early
from batchwright.engine.step.batch import StepBatch


@triton.jit
def add_rms_norm(
    out,
    delta,
    residual,
    weight,
    eps,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add and normalize one row; all tensors are contiguous."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
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
def head_rms_norm(x, weight, row_stride, heads, eps, DIM: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr):
    """Normalize one head of one row, in place."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    d = tl.arange(0, PADDED)
    column = d < DIM
    at = (tl.program_id(0) // heads).to(tl.int64) * row_stride + (tl.program_id(0) % heads) * DIM + d
    value = tl.load(x + at, mask=column, other=0.0).to(tl.float32)
    normed = (value * tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + d, mask=column, other=0.0).to(tl.float32)
    tl.store(x + at, scaled.to(x.dtype.element_ty), mask=column)


@triton.jit
def silu_mul(out, gate_up, dim, spans, SPAN: tl.constexpr, EARLY: tl.constexpr):
    """Compute a span of one row of `out` [T, dim] from `gate_up` [T, 2 · dim]."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) // spans).to(tl.int64)
    column = (tl.program_id(0) % spans) * SPAN + tl.arange(0, SPAN)
    inside = column < dim
    gate = tl.load(gate_up + row * 2 * dim + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * dim + dim + column, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + column, (active * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def round_row(
    out,
    scales,
    x,
    row_stride,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    GREATEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Round one row of `x` to 8-bit floating point, with its greatest magnitude mapped to GREATEST."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    column = d < DIM
    value = tl.load(x + row * row_stride + d, mask=column, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(value), 0) / GREATEST
    # The device's maximum ignores NaN: a row that contains one must not look finite.
    scale = tl.where(tl.max((value != value).to(tl.int32), 0) > 0, float("nan"), scale)
    inverse = tl.where(scale == 0.0, 0.0, 1.0 / scale)
    scaled = value * inverse
    scaled = tl.where(scaled > GREATEST, GREATEST, tl.where(scaled < -GREATEST, -GREATEST, scaled))
    tl.store(out + row * DIM + d, scaled.to(out.dtype.element_ty), mask=column)
    tl.store(scales + row, scale)


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
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rotate GROUP heads of one row, queries in place, keys into the cache; values are only copied to the cache."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) // GROUPS
    head = tl.program_id(0) % GROUPS * GROUP + tl.arange(0, GROUP)[:, None]
    d = tl.arange(0, PADDED_HALF)[None, :]
    inside = d < HALF
    exists = inside & (head < HEADS + 2 * KV_HEADS)
    turns = head < HEADS + KV_HEADS
    here = qkv + row.to(tl.int64) * row_stride + head * (2 * HALF) + d
    low = tl.load(here, mask=exists, other=0.0)
    high = tl.load(here + HALF, mask=exists, other=0.0)
    slot = tl.load(slots + row)
    turn = tl.load(positions + row) * HALF + d
    cosine = tl.load(cosines + turn, mask=inside, other=0.0)
    sine = tl.load(sines + turn, mask=inside, other=0.0)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    low = tl.where(turns, (wide_low * cosine - wide_high * sine).to(low.dtype), low)
    high = tl.where(turns, (wide_high * cosine + wide_low * sine).to(high.dtype), high)
    is_query = exists & (head < HEADS)
    tl.store(here, low, mask=is_query)
    tl.store(here + HALF, high, mask=is_query)
    kv_head = (head - HEADS) % KV_HEADS
    at = ((slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * (2 * HALF) + d
    is_key = exists & turns & (head >= HEADS)
    tl.store(keys + at, low, mask=is_key)
    tl.store(keys + at + HALF, high, mask=is_key)
    is_value = exists & (head >= HEADS + KV_HEADS)
    tl.store(values + at, low, mask=is_value)
    tl.store(values + at + HALF, high, mask=is_value)


_SPAN = 1024
"""Values that one program of `silu_mul` computes."""
_GROUP = 8
"""Heads that one program of `rope_and_store` rotates."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `linear.round_rows`."""
    rows, dim = x.shape
    out = x.new_empty((rows, dim), dtype=torch.float8_e4m3fn)
    scales = x.new_empty(rows, dtype=torch.float32)
    padded = triton.next_power_of_2(dim)
    with torch.cuda.device_of(x):
        round_row[(rows,)](
            out,
            scales,
            x,
            x.stride(0),
            DIM=dim,
            PADDED=padded,
            GREATEST=torch.finfo(out.dtype).max,
            num_warps=max(1, min(16, padded // 512)),
            **early_launch(launches_early(x.device)),
        )
    return out, scales


class FusedOps:
    """`LayerOps` for caches in the layout of `PagedAttention`. All tensors of a call are on one CUDA device."""

    def add_rms_norm(self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, dim = residual.shape
        out = torch.empty_like(residual)
        padded = triton.next_power_of_2(dim)
        with torch.cuda.device_of(residual):
            add_rms_norm[(rows,)](
                out,
                residual if delta is None else delta,
                residual,
                weight,
                eps,
                DIM=dim,
                PADDED=padded,
                ADDS=delta is not None,
                num_warps=max(1, min(16, padded // 512)),
                **early_launch(launches_early(residual.device)),
            )
        return out

    def head_rms_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float) -> None:
        dim = weight.shape[0]
        with torch.cuda.device_of(x):
            head_rms_norm[(x.shape[0] * heads,)](
                x,
                weight,
                x.stride(0),
                heads,
                eps,
                DIM=dim,
                PADDED=triton.next_power_of_2(dim),
                num_warps=1,
                **early_launch(launches_early(x.device)),
            )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, both = gate_up.shape
        out = gate_up.new_empty((rows, both // 2))
        spans = triton.cdiv(both // 2, _SPAN)
        with torch.cuda.device_of(gate_up):
            silu_mul[(rows * spans,)](
                out, gate_up, both // 2, spans, SPAN=_SPAN, num_warps=4, **early_launch(launches_early(out.device))
            )
        return out

    def rope_and_store(
        self, qkv: Tensor, cache: LayerCache, rope: RopeTable, shape: HeadShape, batch: StepBatch
    ) -> None:
        half = shape.head_dim // 2
        groups = triton.cdiv(shape.heads + 2 * shape.kv_heads, _GROUP)
        with torch.cuda.device_of(qkv):
            rope_and_store[(qkv.shape[0] * groups,)](
                qkv,
                cache.keys,
                cache.values,
                rope.cosines,
                rope.sines,
                batch.positions,
                batch.slots,
                qkv.stride(0),
                HEADS=shape.heads,
                KV_HEADS=shape.kv_heads,
                BLOCK_SIZE=cache.keys.shape[2],
                HALF=half,
                PADDED_HALF=triton.next_power_of_2(half),
                GROUP=_GROUP,
                GROUPS=groups,
                num_warps=2,
                **early_launch(launches_early(qkv.device)),
            )
