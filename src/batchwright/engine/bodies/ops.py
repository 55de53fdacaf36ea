"""What a Llama layer does between its matrix products, through torch or through the compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.attention import AttentionBackend, LayerCache
from batchwright.engine.native import NativeKernels
from batchwright.engine.step.batch import StepBatch


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines [positions, head_dim / 2], float32."""

    cosines: Tensor
    sines: Tensor


class LayerOps(Protocol):
    """The pieces between products; each matches the transformers Llama in float32."""

    def add_rms_norm(self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += delta` in place; returns its RMS norm times `weight`. All [T, dim]."""
        ...

    def head_rms_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float) -> None:
        """RMS norm of each of the first `heads` heads of `x` [T, ...], in place."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate)·up: [T, 2·dim] → [T, dim]."""
        ...

    def rope_and_store(
        self, qkv: Tensor, cache: LayerCache, rope: RopeTable, shape: HeadShape, batch: StepBatch
    ) -> None:
        """Rotate the queries in `qkv` in place; store rotated keys, and values."""
        ...


class TorchOps:
    """Plain torch, on any device."""

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
            self._turns = _Turns.of(batch.positions, rope)
        heads = qkv.view(-1, rotated + shape.kv_heads, shape.head_dim)
        wide = heads[:, :rotated].float()
        halves_swapped = wide.roll(shape.head_dim // 2, -1)
        heads[:, :rotated] = wide.mul_(self._turns.cosines).addcmul_(halves_swapped, self._turns.sines)
        self._attention.store(heads[:, shape.heads : rotated], heads[:, rotated:], cache, batch)


@dataclass(frozen=True, slots=True)
class _Turns:
    """What heads, and heads with their halves swapped, are multiplied by: [T, 1, head_dim] float32, for all layers."""

    positions: Tensor
    rope: RopeTable
    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, positions: Tensor, rope: RopeTable) -> _Turns:
        cosines, sines = rope.cosines[positions], rope.sines[positions]
        return cls(positions, rope, torch.cat((cosines, cosines), -1)[:, None], torch.cat((-sines, sines), -1)[:, None])


class NativeOps:
    """The compiled kernels; the attention must be the native one, whose cache layout they write."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self.add_rms_norm = kernels.add_rms_norm
        self.head_rms_norm = kernels.head_rms_norm
        self.silu_mul = kernels.silu_mul

    def rope_and_store(
        self, qkv: Tensor, cache: LayerCache, rope: RopeTable, shape: HeadShape, batch: StepBatch
    ) -> None:
        self._kernels.rope_and_store(
            qkv,
            cache.keys,
            cache.values,
            rope.cosines,
            rope.sines,
            batch,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
        )


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype).mul_(weight)
