"""What a Llama layer does between its products, as one Triton kernel for each piece. Importing this needs Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from batchwright.engine.attention import LayerCache
from batchwright.engine.bodies import triton_op_kernels
from batchwright.engine.bodies.ops import HeadShape, RopeTable
from batchwright.engine.step.batch import StepBatch

_SPAN = 1024
"""Values of one program of `silu_mul`."""


class FusedOps:
    """`LayerOps` for caches laid out as `PagedAttention` does. All tensors of a call are on one CUDA device."""

    def add_rms_norm(self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, dim = residual.shape
        out = torch.empty_like(residual)
        padded = triton.next_power_of_2(dim)
        with torch.cuda.device_of(residual):
            triton_op_kernels.add_rms_norm[(rows,)](
                out,
                residual if delta is None else delta,
                residual,
                weight,
                eps,
                DIM=dim,
                PADDED=padded,
                ADDS=delta is not None,
                num_warps=max(1, min(16, padded // 512)),
            )
        return out

    def head_rms_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float) -> None:
        dim = weight.shape[0]
        with torch.cuda.device_of(x):
            triton_op_kernels.head_rms_norm[(x.shape[0] * heads,)](
                x, weight, x.stride(0), heads, eps, DIM=dim, PADDED=triton.next_power_of_2(dim), num_warps=1
            )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, both = gate_up.shape
        out = gate_up.new_empty((rows, both // 2))
        spans = triton.cdiv(both // 2, _SPAN)
        with torch.cuda.device_of(gate_up):
            triton_op_kernels.silu_mul[(rows * spans,)](out, gate_up, both // 2, spans, SPAN=_SPAN, num_warps=4)
        return out

    def rope_and_store(
        self, qkv: Tensor, cache: LayerCache, rope: RopeTable, shape: HeadShape, batch: StepBatch
    ) -> None:
        half = shape.head_dim // 2
        with torch.cuda.device_of(qkv):
            triton_op_kernels.rope_and_store[(qkv.shape[0] * (shape.heads + 2 * shape.kv_heads),)](
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
                num_warps=1,
            )
