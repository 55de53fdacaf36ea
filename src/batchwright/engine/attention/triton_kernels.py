"""The Triton kernels of `TritonAttention`. Importing this needs Triton; Python without a GPU can interpret them.

Exponentials have base 2 throughout, which is what the hardware computes: scores come multiplied by log2(e), and the
log-sum-exp of partial results is a logarithm of base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether these kernels are interpreted, on tensors of the CPU: so TRITON_INTERPRET=1 asks for."""


# Numbers and places that change from step to step: for each kind of them Triton would compile anew.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables", "positions", "tiles", "rows", "partial_starts"],
)
def attend_tiles(
    out,  # [T, heads · HEAD_DIM]
    partial_out,  # [partials, heads, HEAD_DIM] float32
    partial_sums,  # [partials, heads] float32: log-sum-exp
    query,  # [T, heads · HEAD_DIM], rows `query_stride` apart
    keys,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
    values,
    tables,  # [S, ...] int32, rows `table_stride` apart
    positions,  # [T] int64
    tiles,  # [tiles, FIELDS] int32, see tiles.py
    rows,  # int32
    partial_starts,  # [T + 1] int32
    query_stride,
    table_stride,
    scale,  # scores come out times log2(e); CAPPED: they come out as the exponent of 2 that the softcap needs
    softcap,  # times log2(e)
    window,
    kv_heads,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One tile and one KV head. All query heads that share it are rows of one product with its keys."""
    # Neighbouring programs read neighbouring heads, which lie side by side in a block.
    kv_head = tl.program_id(0) % kv_heads
    tile = tiles + (tl.program_id(0) // kv_heads) * FIELDS
    table = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    if count == 0:
        return
    begin = tl.load(tile + 3)
    end = tl.load(tile + 4)
    ordinal = tl.load(tile + 5)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED_DIM)
    wanted = m < count * GROUP
    column = d < HEAD_DIM
    row = tl.load(rows + first + m // GROUP, mask=wanted, other=0)
    head = kv_head * GROUP + m % GROUP
    position = tl.load(positions + row, mask=wanted, other=0).to(tl.int32)
    q = tl.load(
        query + row.to(tl.int64)[:, None] * query_stride + head[:, None] * HEAD_DIM + d[None, :],
        mask=wanted[:, None] & column[None, :],
        other=0.0,
    )
    if WINDOWED:
        lowest = tl.min(tl.where(wanted, position, 2147483647), 0) - window + 1
        begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)

    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # What lies past the end was perhaps never written, and nothing times NaN is NaN: it is not read at all.
        exists = key < end
        block = tl.load(tables + table.to(tl.int64) * table_stride + key // BLOCK_SIZE, mask=exists, other=0)
        at = (block.to(tl.int64) * kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        there = at[:, None] * HEAD_DIM + d[None, :]
        readable = exists[:, None] & column[None, :]
        k = tl.load(keys + there, mask=readable, other=0.0)
        v = tl.load(values + there, mask=readable, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            # tanh(x) = 1 - 2 / (1 + exp(2x)), and `scores` is 2x · log2(e).
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
        seen = exists[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        # Rows that have seen no key yet: -inf minus -inf would be NaN.
        anchor = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores - anchor[:, None])
        faded = tl.exp2(best - anchor)
        total = total * faded + tl.sum(weights, 1)
        acc = acc * faded[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        best = highest

    seen_none = total == 0.0
    total = tl.where(seen_none, 1.0, total)
    acc = acc / total[:, None]
    slot = tl.load(partial_starts + row, mask=wanted, other=0)
    whole = slot == tl.load(partial_starts + row + 1, mask=wanted, other=0)
    result = row.to(tl.int64)[:, None] * (kv_heads * GROUP * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + result, acc.to(out.dtype.element_ty), mask=(wanted & whole)[:, None] & column[None, :])
    partial = (slot + ordinal).to(tl.int64) * (kv_heads * GROUP) + head
    in_part = wanted & (whole == 0)
    tl.store(partial_out + partial[:, None] * HEAD_DIM + d[None, :], acc, mask=in_part[:, None] & column[None, :])
    sums = tl.where(seen_none, -float("inf"), best + tl.log2(total))
    tl.store(partial_sums + partial, sums, mask=in_part)


@triton.jit(do_not_specialize_on_alignment=["partial_starts", "merged"])
def merge_partials(
    out,  # [T, heads · HEAD_DIM]
    partial_out,  # [partials, heads, HEAD_DIM] float32
    partial_sums,  # [partials, heads] float32
    partial_starts,  # [T + 1] int32
    merged,  # rows, int32; -1: nothing to do
    heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One head of one row: its partial results, each weighted by its share of the sum."""
    row = tl.load(merged + tl.program_id(0) // heads)
    head = tl.program_id(0) % heads
    exists = row >= 0
    begin = tl.load(partial_starts + row, mask=exists, other=0)
    end = tl.load(partial_starts + row + 1, mask=exists, other=0)
    d = tl.arange(0, PADDED_DIM)
    column = d < HEAD_DIM
    best = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(begin, end, PARTS):
        part = start + tl.arange(0, PARTS)
        there = part < end
        at = part.to(tl.int64) * heads + head
        sums = tl.load(partial_sums + at, mask=there, other=-float("inf"))
        parts = tl.load(
            partial_out + at[:, None] * HEAD_DIM + d[None, :], mask=there[:, None] & column[None, :], other=0.0
        )
        highest = tl.maximum(best, tl.max(sums, 0))
        anchor = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(sums - anchor)
        faded = tl.exp2(best - anchor)
        total = total * faded + tl.sum(weights, 0)
        acc = acc * faded + tl.sum(weights[:, None] * parts, 0)
        best = highest
    result = row.to(tl.int64) * heads * HEAD_DIM + head * HEAD_DIM + d
    tl.store(
        out + result,
        (acc / tl.where(exists, total, 1.0)).to(out.dtype.element_ty),
        mask=d < tl.where(exists, HEAD_DIM, 0),
    )
