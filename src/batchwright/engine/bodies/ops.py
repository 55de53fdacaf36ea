"""The operations of a Llama layer between its matrix products, by torch or compiled kernels, and the choice of them.

Triton's kernels are used only after they agreed with torch on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.attention import AttentionBackend, KVShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention, ReferenceAttention
from batchwright.engine.attention.trial import trial_batch
from batchwright.engine.native import NativeKernels
from batchwright.engine.step.batch import StepBatch
from batchwright.engine.tried_kernels import kernels_or


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Numbers and size of the heads of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines of the rotary embedding, [positions, head_dim / 2] float32."""

    cosines: Tensor
    sines: Tensor


class LayerOps(Protocol):
    """The operations between products; each matches Llama in transformers in float32."""

    def add_rms_norm(self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `residual` [T, dim] in place; return the RMS norm of that times `weight` [dim] -> [T, dim]."""
        ...

    def head_rms_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float) -> None:
        """Replace each of the first `heads` heads of `x` [T, ...] by its RMS norm times `weight` [head_dim]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate)·up: [T, 2·dim] → [T, dim]."""
        ...

    def rope_and_store(
        self, qkv: Tensor, cache: LayerCache, rope: RopeTable, shape: HeadShape, batch: StepBatch
    ) -> None:
        """Rotate the queries of `qkv` [T, (heads + 2·kv_heads)·head_dim] in place; store rotated keys, and values."""
        ...


class TorchOps:
    """`LayerOps` in plain torch, on any device."""

    def __init__(self, attention: AttentionBackend) -> None:
        self._attention = attention
        self._turns: _Turns | None = None

    def add_rms_norm(self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            residual += delta
        return _rms_norm(residual, weight, eps)

    def head_rms_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float) -> None:
        part = x[:, : heads * weight.shape[0]]
        part.copy_(_rms_norm(part.unflatten(-1, (heads, -1)), weight, eps).flatten(1))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def rope_and_store(
        self, qkv: Tensor, cache: LayerCache, rope: RopeTable, shape: HeadShape, batch: StepBatch
    ) -> None:
        rotated = shape.heads + shape.kv_heads
        if self._turns is None or self._turns.positions is not batch.positions or self._turns.rope is not rope:
            self._turns = _Turns(batch.positions, rope)
        heads = qkv.view(-1, rotated + shape.kv_heads, shape.head_dim)
        wide = heads[:, :rotated].float()
        halves_swapped = wide.roll(shape.head_dim // 2, -1)
        heads[:, :rotated] = wide.mul_(self._turns.cosines).addcmul_(halves_swapped, self._turns.sines)
        self._attention.store(heads[:, shape.heads : rotated], heads[:, rotated:], cache, batch)


class _Turns:
    """Factors of heads, plain and with their halves swapped, for all layers of a step: [T, 1, head_dim] float32."""

    def __init__(self, positions: Tensor, rope: RopeTable) -> None:
        self.positions, self.rope = positions, rope
        cosines, sines = rope.cosines[positions], rope.sines[positions]
        self.cosines = torch.cat((cosines, cosines), -1)[:, None]
        self.sines = torch.cat((-sines, sines), -1)[:, None]


class NativeOps:
    """`LayerOps` by the compiled kernels, for native attention, whose cache layout they write."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self.add_rms_norm = kernels.add_rms_norm
        self.head_rms_norm = kernels.head_rms_norm
        self.silu_mul = kernels.silu_mul

    def rope_and_store(
        self, qkv: Tensor, cache: LayerCache, rope: RopeTable, shape: HeadShape, batch: StepBatch
    ) -> None:
        self._kernels.rope_and_store(
            qkv, cache.keys, cache.values, rope.cosines, rope.sines, batch, shape.heads, shape.kv_heads, shape.head_dim
        )


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype).mul_(weight)


_EPS = 1e-5


def choose_ops(
    attention: PagedAttention, shape: HeadShape, hidden: int, dtype: torch.dtype, device: torch.device
) -> LayerOps:
    """Return the Triton kernels if they are available and pass their trial; else torch's, and log why."""

    def fused() -> LayerOps:
        from batchwright.engine.bodies.triton_ops import FusedOps

        return FusedOps()

    def disagreement(ops: LayerOps) -> str | None:
        found = difference(ops, shape, hidden, dtype, device)
        agrees = found <= (1e-4 if dtype is torch.float32 else 3e-2)
        return None if agrees else f"they differ from torch's by {found:.2g}"

    plain: LayerOps = TorchOps(attention)
    return kernels_or(plain, "layers are not fused", device, fused, disagreement)


@torch.inference_mode()
def difference(fused: LayerOps, shape: HeadShape, hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the greatest difference of any result from torch's, relative to values of magnitude above 1."""
    plain, ours = (everything(ops, shape, hidden, dtype, device) for ops in (TorchOps(ReferenceAttention()), fused))
    each = [
        ((a.float() - b.float()).abs() / a.float().abs().clamp_min(1.0)).max() for a, b in zip(plain, ours, strict=True)
    ]
    return float(torch.stack(each).max())  # NaN if one is


def everything(ops: LayerOps, shape: HeadShape, hidden: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return all results of `ops` for the same random inputs."""
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
