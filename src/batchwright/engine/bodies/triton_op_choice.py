"""Whether a layer's pieces run as Triton kernels: only after they gave on the device what torch gives."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from batchwright.engine.attention import KVShape
from batchwright.engine.attention.paged import PagedAttention
from batchwright.engine.attention.reference import ReferenceAttention
from batchwright.engine.attention.trial import trial_batch
from batchwright.engine.bodies.ops import HeadShape, LayerOps, RopeTable, TorchOps

_log = logging.getLogger(__name__)

_EPS = 1e-5


def choose_ops(
    attention: PagedAttention, shape: HeadShape, hidden: int, dtype: torch.dtype, device: torch.device
) -> LayerOps:
    """Triton's kernels where they can be had and pass their trial; else torch, and the log says why."""
    plain = TorchOps(attention)
    try:
        from batchwright.engine.bodies.triton_ops import FusedOps

        fused = FusedOps()
        found = difference(fused, shape, hidden, dtype, device)
    except Exception as error:  # not installed, or a compiler's or a driver's: whatever it is, torch computes the same
        _log.warning("layers are not fused on %s: %s: %s", device, type(error).__name__, error)
        return plain
    if not found <= (1e-4 if dtype is torch.float32 else 3e-2):
        _log.warning("layers are not fused on %s: they differ from torch's by %.2g", device, found)
        return plain
    return fused


@torch.inference_mode()
def difference(fused: LayerOps, shape: HeadShape, hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """The greatest difference from torch in anything that the pieces give, relative where it is more than one."""
    plain, ours = (everything(ops, shape, hidden, dtype, device) for ops in (TorchOps(ReferenceAttention()), fused))
    each = [
        ((a.float() - b.float()).abs() / a.float().abs().clamp_min(1.0)).max() for a, b in zip(plain, ours, strict=True)
    ]
    return float(torch.stack(each).max())  # NaN if one is


def everything(ops: LayerOps, shape: HeadShape, hidden: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """What `ops` makes of the same random inputs."""
    batch, blocks = trial_batch(16, device)
    generator = torch.Generator(device).manual_seed(0)
    rows, dim = batch.num_tokens, shape.head_dim

    def random(*size: int) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device).normal_(generator=generator)

    residual, delta, weight, head_weight = random(rows, hidden), random(rows, hidden), random(hidden), random(dim)
    qkv = random(rows, (shape.heads + 2 * shape.kv_heads) * dim)
    gate_up = random(rows, 2 * hidden)
    angles = torch.empty(int(batch.positions.max()) + 1, dim // 2, device=device).normal_(generator=generator)
    cache = ReferenceAttention().allocate(KVShape(blocks, 16, shape.kv_heads, dim, dtype, device))
    for part in (cache.keys, cache.values):
        part.zero_()
    first = ops.add_rms_norm(None, residual, weight, _EPS)
    normed = ops.add_rms_norm(delta, residual, weight, _EPS)
    ops.head_rms_norm(qkv[:, shape.heads * dim :], head_weight, shape.kv_heads, _EPS)
    ops.rope_and_store(qkv, cache, RopeTable(angles.cos(), angles.sin()), shape, batch)
    queries = qkv[:, : shape.heads * dim]
    return [first, residual, normed, queries, cache.keys, cache.values, ops.silu_mul(gate_up)]
