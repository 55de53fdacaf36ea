"""Attention of an encoder over flat rows of cells: each token sees its own sequence, no other, and no padding."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.encoder.native import NativeBidirectional, load_bidirectional
from batchwright.encoder.native.encoder_kernel import LANES


class Attention(Protocol):
    """Which implementation computes softmax(q·kᵀ/√head_dim)·v."""

    name: str

    def attend(self, qkv: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """[cells, 3·heads·head_dim] → [cells, heads·head_dim], 0 at padding.

        `starts` and `lengths` [sequences] int32 on the CPU: where each sequence lies.
        """
        ...


def choose_attention(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Attention:
    """The compiled kernel where it can run, else torch."""
    kernel = load_bidirectional(dtype) if device.type == "cpu" and head_dim % LANES == 0 else "not for this shape"
    return TorchAttention(heads) if isinstance(kernel, str) else NativeBidirectionalAttention(heads, head_dim, kernel)


class NativeBidirectionalAttention:
    """The compiled kernel, parallel over sequences and heads."""

    name = "native"

    def __init__(self, heads: int, head_dim: int, kernel: NativeBidirectional) -> None:
        self._heads, self._scale, self._kernel = heads, head_dim**-0.5, kernel

    def attend(self, qkv: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        out = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
        self._kernel.attend(qkv, starts, lengths, out, heads=self._heads, scale=self._scale)
        return out


class TorchAttention:
    """torch's own, one call for each run of sequences that have the same length and lie at equal distances."""

    name = "torch"

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def attend(self, qkv: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        cells, width = qkv.shape[0], qkv.shape[1] // 3
        out = qkv.new_zeros(cells, width)
        heads = (self._heads, width // self._heads)
        for start, count, length, stride in _runs(starts.tolist(), lengths.tolist()):
            shape, strides = (count, length, 3, *heads), (stride * qkv.stride(0), qkv.stride(0), width, heads[1], 1)
            query, key, value = qkv.as_strided(shape, strides, start * qkv.stride(0)).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
            place = out.as_strided((count, length, *heads), (stride * width, width, heads[1], 1), start * width)
            place.copy_(attended)
        return out


def _runs(starts: list[int], lengths: list[int]) -> list[tuple[int, int, int, int]]:
    """`(first cell, sequences, length, cells from one sequence to the next)`."""
    steps = [after - start for start, after in pairwise(starts)]
    steps.append(steps[-1] if len(steps) and lengths[-1] == lengths[-2] else lengths[-1])
    runs = []
    for (length, step), members in groupby(range(len(starts)), key=lambda index: (lengths[index], steps[index])):
        first, *rest = members
        runs.append((starts[first], 1 + len(rest), length, step))
    return runs
