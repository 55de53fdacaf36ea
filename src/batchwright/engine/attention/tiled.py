"""Attention on CUDA through Triton: prompts and decodes of a step in the same launches, blocks read where they lie.

A step is cut into tiles on the host (tiles.py), once for all layers. A layer is at most three launches: tiles of few
queries, tiles of many, and the merging of partial results.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from batchwright.engine.attention.attention import AttentionShape, KVShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention
from batchwright.engine.attention.tiled_plan import DeviceTiling, TiledPlan
from batchwright.engine.attention.tiles import FIELDS, TileShape
from batchwright.engine.attention.triton_kernels import INTERPRETED, attend_tiles, merge_partials
from batchwright.engine.step.batch import StepBatch

_NARROW_ROWS = 16
"""Rows of a narrow tile's product (queries times the heads that share a KV head): the fewest that matrix units take."""
_WIDE_ROWS = 128
_MOST_DIM = 256
_SMALL_KEY = 256
"""Bytes of one head's key of a size that most models have, or less."""
_PARTS = 8
"""Partial results that a merging program reads at once."""
_INTERPRETED_PROCESSORS = 1
_LOG2_E = math.log2(math.e)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonAttention(PagedAttention):
    """Tiles of queries over paged keys; what sequences have in common is read once for all of them."""

    name = "triton"

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
        _, kv_heads, block_size, head_dim = cache.keys.shape
        if query.stride(-1) != 1:
            query = query.contiguous()
        tile_shape = tile_shape_of(shape.heads, kv_heads, block_size, query.device)
        tiling = self.plan(batch, block_size).tiling(tile_shape)
        outputs = _Outputs(
            query.new_empty(query.shape),
            query.new_empty((tiling.num_partials, shape.heads, head_dim), dtype=torch.float32),
            query.new_empty((tiling.num_partials, shape.heads), dtype=torch.float32),
        )
        with torch.cuda.device_of(query):
            for tiles, queries in ((tiling.narrow, tile_shape.narrow), (tiling.wide, tile_shape.wide)):
                if len(tiles):
                    _attend(tiles, queries, query, cache, shape, batch, tiling, outputs)
            if len(tiling.merged):
                _merge(tiling, outputs)
        return outputs.whole


class _Outputs(NamedTuple):
    whole: Tensor
    """[T, heads · head_dim]."""
    partial: Tensor
    """[partials, heads, head_dim] float32."""
    sums: Tensor
    """[partials, heads] float32: log-sum-exp of each partial result."""


def _attend(
    tiles: Tensor,
    queries: int,
    query: Tensor,
    cache: LayerCache,
    shape: AttentionShape,
    batch: StepBatch,
    tiling: DeviceTiling,
    outputs: _Outputs,
) -> None:
    """Compute `tiles`, of at most so many `queries` each."""
    _, kv_heads, block_size, head_dim = cache.keys.shape
    group = shape.heads // kv_heads
    attend_tiles[(len(tiles) * kv_heads,)](
        *outputs,
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
        **_launch_of(queries * group, cache.keys),
    )


def _merge(tiling: DeviceTiling, outputs: _Outputs) -> None:
    _, heads, head_dim = outputs.partial.shape
    merge_partials[(len(tiling.merged) * heads,)](
        *outputs,
        tiling.partial_starts,
        tiling.merged,
        heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=_padded(head_dim),
        PARTS=_PARTS,
    )


def tile_shape_of(heads: int, kv_heads: int, block_size: int, device: torch.device) -> TileShape:
    """How a step is cut for layers of `heads` query heads."""
    group = heads // kv_heads
    narrow = max(1, _NARROW_ROWS // group)
    return TileShape(
        kv_heads=kv_heads,
        narrow=narrow,
        wide=max(narrow + 1, _WIDE_ROWS // group),
        block_size=block_size,
        processors=_processors(device),
    )


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch_of(rows: int, keys: Tensor) -> dict[str, int]:
    """How tiles of up to `rows` rows are computed.

    More stages have more keys under way, which narrow tiles wait for; all must fit a processor's shared memory.
    """
    small = _padded(keys.shape[-1]) * keys.dtype.itemsize <= _SMALL_KEY
    wide = rows > _NARROW_ROWS
    return {
        "BLOCK_M": max(_NARROW_ROWS, _power_of_two(rows)),
        "BLOCK_N": 64 if small else 32,
        "num_warps": 8 if wide else 4,
        "num_stages": (3 if wide else 5) if small else 2,
    }


def _scaling(shape: AttentionShape) -> dict[str, float | int | bool]:
    """Arguments of `attend_tiles`: what becomes of a score."""
    cap, window = shape.softcap, shape.window
    return {
        "scale": shape.scale * _LOG2_E if cap is None else 2 * shape.scale * _LOG2_E / cap,
        "softcap": 0.0 if cap is None else cap * _LOG2_E,
        "window": 0 if window is None else window,
        "CAPPED": cap is not None,
        "WINDOWED": window is not None,
    }


def _padded(head_dim: int) -> int:
    return max(16, _power_of_two(head_dim))


def _power_of_two(number: int) -> int:
    """The least power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()
