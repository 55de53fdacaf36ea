"""Attention on CUDA by Triton: prompts and decodes of a step in the same launches, without copies of blocks.

A step is cut into tiles on the host (tiles.py), once for all layers. A layer takes at most three launches: tiles of few
queries and tiles of many, side by side, then the merging of partial results.

Exponentials have base 2 throughout, which is what the hardware computes: scores come multiplied by log2(e), and the
log-sum-exp of partial results is a logarithm of base 2. Importing this needs Triton, which can interpret it on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from batchwright.engine.attention.attention import AttentionShape, KVShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention
from batchwright.engine.attention.tiles import FIELDS, TiledPlan, tile_shape_of
from batchwright.engine.early_launch import launches_early
from batchwright.engine.step.batch import StepBatch

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels are interpreted, on CPU tensors, as with TRITON_INTERPRET=1."""


# These numbers and addresses change from step to step: Triton would compile a kernel for each kind of value.
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
    rows,  # [any] int32
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
    MASK_FREE: tl.constexpr,  # whether keys that all queries see have a loop of their own, without masks
    RELEASES_NEXT: tl.constexpr,  # whether the next kernel may be launched before this one has ended
):
    """Attend in one tile for one KV head: all query heads that share the head are rows of one product with its keys."""
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
    seen_by_all = tl.load(tile + 6)

    if RELEASES_NEXT:
        gdc_launch_dependents()

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
    blocks = tables + table.to(tl.int64) * table_stride
    n = tl.arange(0, BLOCK_N)
    # Blocks are looked up one round ahead: keys whose address must be loaded first would not be prefetched.
    next_blocks = tl.load(blocks + (begin + n) // BLOCK_SIZE, mask=begin + n < end, other=0)
    masked_from = begin
    if MASK_FREE:
        masked_from += tl.maximum(tl.minimum(end, seen_by_all) - begin, 0) // BLOCK_N * BLOCK_N
        for start in range(begin, masked_from, BLOCK_N):
            key = start + n
            at = (next_blocks.to(tl.int64) * kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
            next_blocks = tl.load(blocks + (key + BLOCK_N) // BLOCK_SIZE, mask=key + BLOCK_N < end, other=0)
            there = at[:, None] * HEAD_DIM + d[None, :]
            k = tl.load(keys + there, mask=column[None, :], other=0.0)
            v = tl.load(values + there, mask=column[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            best, total, acc = _attend(scores, v, best, total, acc, scale, softcap, CAPPED, False)
    for start in range(masked_from, end, BLOCK_N):
        key = start + n
        # Memory past the end may be uninitialized, and zero times NaN is NaN: it is not read at all.
        exists = key < end
        at = (next_blocks.to(tl.int64) * kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        next_blocks = tl.load(blocks + (key + BLOCK_N) // BLOCK_SIZE, mask=key + BLOCK_N < end, other=0)
        there = at[:, None] * HEAD_DIM + d[None, :]
        readable = exists[:, None] & column[None, :]
        k = tl.load(keys + there, mask=readable, other=0.0)
        v = tl.load(values + there, mask=readable, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = exists[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        best, total, acc = _attend(scores, v, best, total, acc, scale, softcap, CAPPED, True, seen)

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


@triton.jit
def _attend(scores, v, best, total, acc, scale, softcap, CAPPED: tl.constexpr, MASKED: tl.constexpr, seen=None):
    """Add a block of keys to the state of the rows: their greatest score, and sums relative to it."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (1 + exp(2x)), and the scaled scores are 2x · log2(e).
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * scale)))
        scale = 1.0
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    highest = tl.maximum(best, tl.max(scores, 1) * scale)
    # Rows that have seen no key yet: -inf minus -inf would be NaN.
    anchor = tl.where(highest == -float("inf"), 0.0, highest) if MASKED else highest
    weights = tl.exp2(scores * scale - anchor[:, None])
    faded = tl.exp2(best - anchor)
    total = total * faded + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * faded[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit(do_not_specialize_on_alignment=["partial_starts", "merged"])
def merge_partials(
    out,  # [T, heads · HEAD_DIM]
    partial_out,  # [partials, heads, HEAD_DIM] float32
    partial_sums,  # [partials, heads] float32
    partial_starts,  # [T + 1] int32
    merged,  # [any] int32: rows; -1: nothing to do
    heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    WAITS: tl.constexpr,  # whether it may have been launched early, and may launch the next kernel early
):
    """Merge the partial results of one head of one row, each weighted by its share of the sum."""
    row = tl.load(merged + tl.program_id(0) // heads)
    head = tl.program_id(0) % heads
    exists = row >= 0
    begin = tl.load(partial_starts + row, mask=exists, other=0)
    end = tl.load(partial_starts + row + 1, mask=exists, other=0)
    if WAITS:
        gdc_launch_dependents()
        gdc_wait()
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


_FEWEST_ROWS = 16
"""Rows of the smallest product for matrix units."""
_MOST_DIM = 256
_SMALL_KEY = 256
"""Most bytes of one head's key that count as small; most models have no larger ones."""
_PARTS, _PART_VALUES = 32, 4096
"""Most partial results, and most of their values, that a merging program reads at once."""
_LOG2_E = math.log2(math.e)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonAttention(PagedAttention):
    """Attention by tiles of queries over paged keys; keys that sequences share are read once for all of them."""

    name = "triton"

    def __init__(self, *, few: bool | None = None) -> None:
        """`few`: whether programs count as few, whatever their number; by default their number decides."""
        self._few = few
        self._second: torch.cuda.Stream | None = None
        """Stream of wide tiles, which leave room for narrow ones beside them."""

    def variants(self) -> list[PagedAttention]:
        return [TritonAttention(few=few) for few in (True, False)]

    def refusal(self, shape: KVShape) -> str | None:
        if shape.device.type != "cuda" and not INTERPRETED:
            return f"the Triton kernels run on CUDA, not on {shape.device}"
        if shape.dtype not in _DTYPES:
            return f"the Triton kernels compute in float32, bfloat16 and float16, not in {shape.dtype}"
        if shape.quantized:
            return "the Triton kernels read no quantized caches"
        if shape.head_dim > _MOST_DIM:
            return f"the Triton kernels need a head size of at most {_MOST_DIM}, not {shape.head_dim}"
        return None

    def plan(self, batch: StepBatch, block_size: int) -> TiledPlan:
        if not isinstance(batch.attention_plan, TiledPlan):
            batch.attention_plan = TiledPlan(batch, block_size)
        return batch.attention_plan

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        """Attend with `query` [T, heads · head_dim] -> [T, heads · head_dim]."""
        _, kv_heads, block_size, head_dim = cache.keys.shape
        heads, group = shape.heads, shape.heads // kv_heads
        if query.stride(-1) != 1:
            query = query.contiguous()
        tile_shape = tile_shape_of(heads, kv_heads, block_size, query.device)
        tiling = self.plan(batch, block_size).tiling(tile_shape)
        out = query.new_empty(query.shape)
        partial_out = query.new_empty((tiling.num_partials, heads, head_dim), dtype=torch.float32)
        partial_sums = query.new_empty((tiling.num_partials, heads), dtype=torch.float32)

        early = launches_early(query.device)
        both = len(tiling.narrow) > 0 and len(tiling.wide) > 0

        def launch(tiles: Tensor, queries: int, *, narrow: bool) -> None:
            programs = len(tiles) * kv_heads
            few = both or programs <= _FEW * tile_shape.processors if self._few is None else self._few
            attend_tiles[(programs,)](
                out,
                partial_out,
                partial_sums,
                query,
                cache.keys,
                cache.values,
                batch.block_tables,
                batch.positions,
                tiles,
                tiling.rows,
                tiling.partial_starts,
                query.stride(0),
                batch.block_tables.stride(0),
                **_scaling(shape),
                kv_heads=kv_heads,
                FIELDS=FIELDS,
                GROUP=group,
                HEAD_DIM=head_dim,
                PADDED_DIM=_padded(head_dim),
                BLOCK_SIZE=block_size,
                MASK_FREE=not narrow and shape.window is None,
                RELEASES_NEXT=early and not both,
                **_launch_of(queries * group, cache.keys, narrow=narrow, few=few),
            )

        with torch.cuda.device_of(query):
            if both:
                with self._beside(query.device, lambda: launch(tiling.wide, tile_shape.wide, narrow=False)):
                    launch(tiling.narrow, tile_shape.narrow, narrow=True)
            elif len(tiling.wide):
                launch(tiling.wide, tile_shape.wide, narrow=False)
            elif len(tiling.narrow):
                launch(tiling.narrow, tile_shape.narrow, narrow=True)
            if len(tiling.merged):
                merge_partials[(len(tiling.merged) * heads,)](
                    out,
                    partial_out,
                    partial_sums,
                    tiling.partial_starts,
                    tiling.merged,
                    heads,
                    HEAD_DIM=head_dim,
                    PADDED_DIM=_padded(head_dim),
                    PARTS=min(_PARTS, _PART_VALUES // _padded(head_dim)),
                    WAITS=early,
                    num_warps=1,
                    **({"launch_pdl": True} if early and not both else {}),
                )
        return out

    @contextmanager
    def _beside(self, device: torch.device, launch: Callable[[], None]) -> Iterator[None]:
        """Run the kernels of `launch` beside those of the block: after all earlier ones, before all later ones."""
        if device.type != "cuda":
            launch()
            yield
            return
        if self._second is None:
            # Wide tiles take longer: they must not wait for room occupied by narrow ones.
            self._second = torch.cuda.Stream(device, priority=-1)
        first = torch.cuda.current_stream()
        self._second.wait_stream(first)
        try:
            with torch.cuda.stream(self._second):
                launch()
            yield
        finally:
            # Even after a failed launch: memory that is freed on the first stream may still be written to on the
            # second.
            first.wait_stream(self._second)


@dataclass(frozen=True, slots=True)
class _Launch:
    """How a tile's program reads its keys."""

    keys: int
    """Keys of one product."""
    warps: int
    stages: int
    """Products whose keys are read ahead, into the shared memory of a multiprocessor."""
    registers: int | None = None
    """Most registers of a thread, with keys of 16 bits, so that there is room for other programs."""


_NARROW_LAUNCH = _Launch(keys=64, warps=4, stages=2)
_FEW_NARROW_LAUNCH = _Launch(keys=64, warps=4, stages=3)
"""Launch of narrow tiles if a multiprocessor has at most `_FEW` of them, or a wide one beside them: there is room."""
_FEW = 2
"""Most programs per multiprocessor that count as few."""
_WIDE_LAUNCH = _Launch(keys=64, warps=8, stages=3, registers=168)
_LARGE_KEY_NARROW_LAUNCH = _Launch(keys=32, warps=4, stages=2)
_LARGE_KEY_WIDE_LAUNCH = _Launch(keys=32, warps=8, stages=2)


def _launch_of(rows: int, keys: Tensor, *, narrow: bool, few: bool) -> dict[str, int]:
    """Return the launch options of tiles of up to `rows` rows over `keys` [blocks, kv_heads, block_size, head_dim]."""
    if _padded(keys.shape[-1]) * keys.dtype.itemsize <= _SMALL_KEY:
        launch = (_FEW_NARROW_LAUNCH if few else _NARROW_LAUNCH) if narrow else _WIDE_LAUNCH
    else:
        launch = _LARGE_KEY_NARROW_LAUNCH if narrow else _LARGE_KEY_WIDE_LAUNCH
    return {
        "BLOCK_M": max(_FEWEST_ROWS, int(triton.next_power_of_2(rows))),
        "BLOCK_N": launch.keys,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        **({"maxnreg": launch.registers} if launch.registers and keys.dtype.itemsize == 2 else {}),
    }


def _scaling(shape: AttentionShape) -> dict[str, float | int | bool]:
    """Return the arguments of `attend_tiles` that define how scores are scaled, capped and masked."""
    cap, window = shape.softcap, shape.window
    return {
        "scale": shape.scale * _LOG2_E if cap is None else 2 * shape.scale * _LOG2_E / cap,
        "softcap": 0.0 if cap is None else cap * _LOG2_E,
        "window": 0 if window is None else window,
        "CAPPED": cap is not None,
        "WINDOWED": window is not None,
    }


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))
