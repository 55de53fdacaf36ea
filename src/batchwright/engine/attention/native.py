"""Attention by the compiled CPU kernels: parallel over (sequences, KV head, tile of queries), without copies.

Caches without quantization are keys [blocks, kv_heads, head_dim / unit, block_size · unit] and values [blocks,
kv_heads, block_size / unit, head_dim · unit], where a unit is the 1 or 2 values of 4 bytes. Quantized ones are bytes,
[blocks, kv_heads, bytes of a head in a block].
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.engine.attention.attention import AttentionBackend, AttentionShape, KVShape, LayerCache
from batchwright.engine.native import NativeKernels
from batchwright.engine.native.kernels import BLOCK_SIZE, LANES
from batchwright.engine.native.large_pages import prefer_huge_pages
from batchwright.engine.step.batch import StepBatch


class NativeAttention(AttentionBackend):
    """Attention with keys transposed within a block: one vector holds one dimension of all its keys (see attention.h).

    Only the compiled layers read and write quantized caches (bodies/compiled.py).
    """

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        self.kernels = kernels

    def refusal(self, shape: KVShape) -> str | None:
        if shape.device.type != "cpu":
            return f"the compiled kernels run on the CPU, not on {shape.device}"
        if shape.block_size != BLOCK_SIZE:
            return f"the compiled kernels need block_size={BLOCK_SIZE}, not {shape.block_size}"
        if shape.head_dim % LANES:
            return f"the compiled kernels need a head size divisible by {LANES}, not {shape.head_dim}"
        return None

    def allocate(self, shape: KVShape) -> LayerCache:
        heads, per_unit = (shape.num_blocks, shape.kv_heads), 4 // shape.dtype.itemsize
        if shape.quantized:
            keys, values = (torch.empty(*heads, shape.bytes_per_head, dtype=torch.uint8) for _ in range(2))
        else:
            keys = torch.empty(*heads, shape.head_dim // per_unit, BLOCK_SIZE * per_unit, dtype=shape.dtype)
            values = torch.empty(*heads, BLOCK_SIZE // per_unit, shape.head_dim * per_unit, dtype=shape.dtype)
        prefer_huge_pages(keys)
        prefer_huge_pages(values)
        return LayerCache(keys, values)

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        """Write `key` and `value` [T, kv_heads, head_dim] to the slots of `batch`."""
        self.kernels.store_rows(_dense_rows(key), _dense_rows(value), cache.keys, cache.values, batch.slots)

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        """Attend with `query` [T, heads · head_dim] -> [T, heads · head_dim]."""
        if query.stride(-1) != 1:
            query = query.contiguous()
        return self.kernels.attend(
            query, cache.keys, cache.values, batch, shape.heads, shape.scale, shape.window, shape.softcap
        )


def _dense_rows(x: Tensor) -> Tensor:
    """Return `x` [T, kv_heads, head_dim] with the heads of a row side by side -> [T, kv_heads, head_dim]."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()
