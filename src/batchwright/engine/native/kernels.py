"""Binding of the compiled kernels to torch tensors."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchwright.engine.native.build import load_library
from batchwright.engine.step.batch import StepBatch
from batchwright.request import SamplingParams

BLOCK_SIZE = 16
"""Keys of a KV block for which the kernels are written."""
LANES = 16
"""Values of a vector register: head sizes are multiples of it."""

ProductKind: TypeAlias = Literal["bf16", "int8", "groups"]
"""What the compiled layers multiply: bfloat16, 8 bits with a scale per row, or weights of 4 or 8 bits with a scale per
group of inputs, by rows in 8 bits."""

_TINY = torch.finfo(torch.float32).tiny
_address = Tensor.data_ptr
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
ARGUMENTS: dict[str, list[Any]] = {
    "attend": [c_void_p] * 7 + [c_int64] * 7 + [c_float] * 2,
    "rope_and_store": [c_void_p] + [c_int64] * 4 + [c_void_p] * 6,
    "store_rows": [c_void_p] * 2 + [c_int64] * 5 + [c_void_p] * 3,
    "add_rms_norm": [c_void_p] * 4 + [c_int64] * 2 + [c_float],
    "head_rms_norm": [c_void_p] * 2 + [c_int64] * 4 + [c_float],
    "silu_mul": [c_void_p] * 2 + [c_int64] * 2,
    "choose_rows": [c_void_p] + [c_int64] * 3 + [c_void_p] * 8,
    "mask_rows": [c_void_p] + [c_int64] * 2 + [c_void_p, c_int64, c_void_p, c_int64],
}
"""Types of the arguments of each kernel."""


class NativeKernels:
    """The kernels for one dtype (float32 or bfloat16). Tensors are on the CPU; row strides as each method says."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.library, self._dtype = library, dtype
        self._bound = SimpleNamespace()
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, f"bw_{name}_{_SUFFIX[dtype]}")
            function.argtypes = arguments
            function.restype = None
            setattr(self._bound, name, function)

    @property
    def has_decoder(self) -> bool:
        """Whether whole layers were compiled for this dtype and processor."""
        return self._dtype is torch.bfloat16 and self.product_rows("bf16") > 0

    def product_rows(self, kind: ProductKind) -> int:
        """Rows that the compiled layers multiply at a time; 0 if there are no such layers for this processor."""
        rows: int = getattr(self.library, f"bw_product_rows_{kind}")()
        return rows

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: StepBatch,
        heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attend with `query` [T, at least heads·head_dim], rows strided, to a cache -> [T, heads·head_dim]."""
        _, kv_heads, units, _ = keys.shape
        head_dim = units * (4 // keys.element_size())
        out = query.new_empty(query.shape[0], heads * head_dim)
        pointers = (query, keys, values, out, batch.block_tables, batch.query_starts, batch.context_lens)
        strides = (query.stride(0), batch.block_tables.stride(0))
        sizes = (batch.num_sequences, *strides, heads, kv_heads, head_dim, window or 0)
        self._bound.attend(*map(_address, pointers), *sizes, scale, softcap or 0.0)
        return out

    def rope_and_store(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        cosines: Tensor,
        sines: Tensor,
        batch: StepBatch,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> None:
        """Rotate the queries of `qkv` [T, (heads + 2·kv_heads)·head_dim] in place; rotated keys go to the cache.

        `cosines` and `sines` are [positions, head_dim / 2] float32.
        """
        pointers = (cosines, sines, batch.positions, batch.slots, keys, values)
        self._bound.rope_and_store(_address(qkv), qkv.shape[0], heads, kv_heads, head_dim, *map(_address, pointers))

    def store_rows(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Copy `key` and `value` [T, kv_heads, head_dim], heads dense within a row, into the cache at `slots` [T]."""
        rows, kv_heads, head_dim = key.shape
        sizes = (rows, key.stride(0), value.stride(0), kv_heads, head_dim)
        self._bound.store_rows(_address(key), _address(value), *sizes, *map(_address, (slots, keys, values)))

    def add_rms_norm(self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `residual` in place; return the RMS norm of that. All contiguous [T, dim]."""
        out = torch.empty_like(residual)
        added = None if delta is None else _address(delta)
        self._bound.add_rms_norm(added, *map(_address, (residual, weight, out)), *residual.shape, eps)
        return out

    def head_rms_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float) -> None:
        """Replace the first `heads` heads of each row of `x` [T, ...], rows strided, by their RMS norms."""
        self._bound.head_rms_norm(_address(x), _address(weight), x.shape[0], x.stride(0), heads, weight.shape[0], eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate)·up for contiguous `gate_up` [rows, 2·dim] -> [rows, dim]."""
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._bound.silu_mul(_address(gate_up), _address(out), rows, width // 2)
        return out

    def row_maxima(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greatest value of each row of `x` [rows, dim], NaN if it holds one, and its first index.

        They are [rows] float32 and [rows] int64.
        """
        best, where = torch.empty(len(x)), torch.empty(len(x), dtype=torch.int64)
        self._bound.choose_rows(_address(x), *_sizes(x), *[None] * 6, _address(best), _address(where))
        return best, where

    def choose_rows(
        self, logits: Tensor, rows: list[int], params: Sequence[SamplingParams], uniforms: Sequence[float]
    ) -> tuple[list[float], list[int]]:
        """Return the greatest value of each row of `logits` [any, vocab], NaN if it holds one, and each row's token.

        The token of each of `rows` whose greatest logit is finite is drawn by its params and its uniform number; every
        other row gets its likeliest token.
        """
        places = np.full(len(logits), -1, np.int32)
        places[rows] = np.arange(len(rows))
        greatest, tokens = np.empty(len(logits), np.float32), np.empty(len(logits), np.int64)
        arrays = (places, *draw_arrays(params).values(), np.array(uniforms, np.float64), greatest, tokens)
        self._bound.choose_rows(_address(logits), *_sizes(logits), *(each.ctypes.data for each in arrays))
        return greatest.tolist(), tokens.tolist()

    def mask_rows(self, logits: Tensor, rows: list[int], masks: Tensor) -> None:
        """Set the logits [any, vocab] of `rows` to -inf where their bits in `masks` [rows, words] int32 are 0."""
        which = torch.tensor(rows)
        sizes = (logits.stride(0), logits.shape[1])
        self._bound.mask_rows(_address(logits), *sizes, _address(which), len(rows), _address(masks), masks.shape[1])


def draw_arrays(params: Sequence[SamplingParams]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the parameters of the draws, in the form that `choose_rows` of the kernels takes: [rows] each."""
    # NumPy arrays take less time to create than tensors.
    return {
        # A temperature too small for float32 would divide by 0.
        "temperatures": np.array([max(each.temperature, _TINY) for each in params], np.float32),
        "min_p": np.array([each.min_p for each in params], np.float32),
        "top_k": np.array([each.top_k for each in params], np.int64),
        "top_p": np.array([each.top_p for each in params], np.float64),
    }


def places_of_draws(greedy: Sequence[bool]) -> npt.NDArray[np.int32]:
    """Return the index of each row among those that draw, -1 for those that are `greedy`."""
    drawn = ~np.array(greedy, np.bool_)
    return np.where(drawn, np.cumsum(drawn) - 1, -1).astype(np.int32)


def _sizes(rows: Tensor) -> tuple[int, int, int]:
    """Return the number of rows, the distance from one to the next, and their width."""
    return len(rows), rows.stride(0), rows.shape[1]


@functools.cache
def load_kernels(dtype: torch.dtype) -> NativeKernels | str:
    """Return the kernels for `dtype`, or why there are none. `BATCHWRIGHT_NATIVE=0` disables them."""
    if dtype not in _SUFFIX:
        return f"no kernels for {dtype}"
    library = load_library()
    return library if isinstance(library, str) else NativeKernels(library, dtype)
