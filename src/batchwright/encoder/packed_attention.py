"""Attention of an encoder over flat rows of cells: each token sees its own sequence, no other, and no padding.

It computes softmax(q·kᵀ/√head_dim)·v by a compiled kernel, built beside the engine's, or by torch.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int64, c_void_p
from itertools import groupby, pairwise
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.native.build import load_library

SOURCE = Path(__file__).parent / "native" / "bidirectional.cpp"
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_LANES = 16
"""Values of a vector register: the kernel needs head sizes that are multiples of it."""
_MOST_HEAD_BYTES = 1024
"""Bytes of a head's query for which the kernel has room (`kMostUnits` of four bytes)."""


@functools.cache
def load_bidirectional(dtype: torch.dtype) -> ctypes.CDLL | str:
    """Return the library of the kernel if it supports `dtype`, or why not. `BATCHWRIGHT_NATIVE=0` disables it."""
    return load_library("bidirectional", (SOURCE,)) if dtype in _SUFFIX else f"no kernel for {dtype}"


class NativeBidirectionalAttention:
    """Attention by the compiled kernel, float32 or bfloat16 on the CPU, parallel over sequences and heads."""

    name = "native"

    def __init__(self, heads: int, head_dim: int, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._heads, self._head_dim = heads, head_dim
        self._attend = getattr(library, f"bw_attend_bidirectional_{_SUFFIX[dtype]}")
        self._attend.argtypes = [c_void_p] * 4 + [c_int64] * 3 + [c_float]
        self._attend.restype = None

    def attend(self, qkv: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """Attend with contiguous `qkv` [cells, 3·heads·head_dim] -> [cells, heads·head_dim], 0 at padding.

        `starts` and `lengths` [sequences] int32 on the CPU are the first cell and the cells of each sequence.
        """
        out = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
        pointers = map(Tensor.data_ptr, (qkv, out, starts, lengths))
        self._attend(*pointers, len(starts), self._heads, self._head_dim, self._head_dim**-0.5)
        return out


class TorchAttention:
    """Attention by torch, one call for each run of sequences of the same length at equal distances."""

    name = "torch"

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def attend(self, qkv: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """Attend as `NativeBidirectionalAttention` does: [cells, 3·heads·head_dim] -> [cells, heads·head_dim]."""
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


Attention: TypeAlias = NativeBidirectionalAttention | TorchAttention


def choose_attention(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Attention:
    """Return the compiled kernel if it can run, else torch's attention."""
    if device.type == "cpu" and head_dim % _LANES == 0 and head_dim * dtype.itemsize <= _MOST_HEAD_BYTES:
        library = load_bidirectional(dtype)
        if not isinstance(library, str):
            return NativeBidirectionalAttention(heads, head_dim, library, dtype)
    return TorchAttention(heads)


def _runs(starts: list[int], lengths: list[int]) -> list[tuple[int, int, int, int]]:
    """Return runs as `(first cell, sequences, length, cells from one sequence to the next)`."""
    steps = [after - start for start, after in pairwise(starts)]
    steps.append(steps[-1] if len(steps) and lengths[-1] == lengths[-2] else lengths[-1])
    runs = []
    for (length, step), members in groupby(range(len(starts)), key=lambda index: (lengths[index], steps[index])):
        first, *rest = members
        runs.append((starts[first], 1 + len(rest), length, step))
    return runs
