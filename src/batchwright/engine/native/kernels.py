"""The compiled kernels as functions of torch tensors."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from batchwright.engine.native.build import BuildError, library_path
from batchwright.engine.native.decoder import DecoderModel, NativeDecoder
from batchwright.engine.step.batch import StepBatch
from batchwright.request import SamplingParams

BLOCK_SIZE = 16
"""Keys in a KV block: the kernels are written for it."""
LANES = 16

_TINY = torch.finfo(torch.float32).tiny
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_ARGUMENTS: dict[str, list[Any]] = {
    "attend": [c_void_p] * 7 + [c_int64] * 7 + [c_float] * 2,
    "rope_and_store": [c_void_p] + [c_int64] * 4 + [c_void_p] * 6,
    "store_rows": [c_void_p] * 2 + [c_int64] * 5 + [c_void_p] * 3,
    "add_rms_norm": [c_void_p] * 4 + [c_int64] * 2 + [c_float],
    "head_rms_norm": [c_void_p] * 2 + [c_int64] * 4 + [c_float],
    "silu_mul": [c_void_p] * 2 + [c_int64] * 2,
    "row_maxima": [c_void_p] * 3 + [c_int64] * 3,
    "draw_rows": [c_void_p] + [c_int64] * 2 + [c_void_p, c_int64] + [c_void_p] * 7,
}


class NativeKernels:
    """The kernels for one dtype (float32 or bfloat16). Tensors are on the CPU; row strides as each method says."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        suffix = _SUFFIX[dtype]
        self._library, self._dtype = library, dtype
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, f"bw_{name}_{suffix}")
            function.argtypes = arguments
            function.restype = None
        self._attend = getattr(library, f"bw_attend_{suffix}")
        self._rope_and_store = getattr(library, f"bw_rope_and_store_{suffix}")
        self._store_rows = getattr(library, f"bw_store_rows_{suffix}")
        self._add_rms_norm = getattr(library, f"bw_add_rms_norm_{suffix}")
        self._head_rms_norm = getattr(library, f"bw_head_rms_norm_{suffix}")
        self._silu_mul = getattr(library, f"bw_silu_mul_{suffix}")
        self._row_maxima = getattr(library, f"bw_row_maxima_{suffix}")
        self._draw_rows = getattr(library, f"bw_draw_rows_{suffix}")

    @property
    def has_decoder(self) -> bool:
        """Whether whole layers were compiled for this dtype and processor."""
        return self._dtype is torch.bfloat16 and self.product_rows(quantized=False) > 0

    def product_rows(self, *, quantized: bool) -> int:
        """Rows that the compiled layers multiply at a time; 0 where there are none for this processor."""
        rows: int = self._library.bw_product_rows_int8() if quantized else self._library.bw_product_rows_bf16()
        return rows

    def decoder(self, model: DecoderModel) -> NativeDecoder:
        """`model` as one call for each step; `has_decoder` must hold."""
        return NativeDecoder(self._library, model)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: StepBatch,
        *,
        heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of `query` [rows, ≥ heads·head_dim], rows strided, over the cache; gives [rows, heads·head_dim]."""
        _, kv_heads, units, _ = keys.shape
        head_dim = units * (4 // keys.element_size())
        out = query.new_empty(query.shape[0], heads * head_dim)
        self._attend(
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.num_sequences,
            query.stride(0),
            batch.block_tables.stride(0),
            heads,
            kv_heads,
            head_dim,
            window or 0,
            scale,
            softcap or 0.0,
        )
        return out

    def rope_and_store(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        cosines: Tensor,
        sines: Tensor,
        batch: StepBatch,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> None:
        """Rotate the queries of `qkv` [rows, (heads + 2·kv_heads)·head_dim] in place; rotated keys go to the cache."""
        self._rope_and_store(
            qkv.data_ptr(),
            qkv.shape[0],
            heads,
            kv_heads,
            head_dim,
            cosines.data_ptr(),
            sines.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
        )

    def store_rows(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Copy `key` and `value` [rows, kv_heads, head_dim], heads dense within a row, into the cache at `slots`."""
        rows, kv_heads, head_dim = key.shape
        self._store_rows(
            key.data_ptr(),
            value.data_ptr(),
            rows,
            key.stride(0),
            value.stride(0),
            kv_heads,
            head_dim,
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
        )

    def add_rms_norm(self, delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += delta` in place, then its RMS norm. All contiguous [rows, dim]."""
        out = torch.empty_like(residual)
        rows, dim = residual.shape
        self._add_rms_norm(
            None if delta is None else delta.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            dim,
            eps,
        )
        return out

    def head_rms_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float) -> None:
        """RMS norm of each of the first `heads` heads of every row of `x`, in place; rows may be strided."""
        self._head_rms_norm(x.data_ptr(), weight.data_ptr(), x.shape[0], x.stride(0), heads, weight.shape[0], eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate)·up for contiguous [rows, 2·dim]; gives [rows, dim]."""
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def row_maxima(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Greatest value [rows] float32 of each row of `x` [rows, dim], NaN if it holds one, and its first index."""
        rows, dim = x.shape
        best, where = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self._row_maxima(x.data_ptr(), best.data_ptr(), where.data_ptr(), rows, x.stride(0), dim)
        return best, where

    def draw_rows(
        self,
        logits: Tensor,
        rows: list[int],
        best: Tensor,
        params: Sequence[SamplingParams],
        uniforms: Sequence[float],
    ) -> list[int]:
        """A token for each of `rows` of `logits` [any, vocab]; `best` [any] float32 holds the greatest of each."""
        which = torch.tensor(rows)
        greatest = best[which]
        # A temperature too small for float32 would divide by 0.
        temperatures = torch.tensor([each.temperature for each in params]).clamp(min=_TINY)
        min_p = torch.tensor([each.min_p for each in params])
        top_k = torch.tensor([each.top_k for each in params])
        top_p = torch.tensor([each.top_p for each in params], dtype=torch.float64)
        numbers = torch.tensor(uniforms, dtype=torch.float64)
        tokens = torch.empty(len(rows), dtype=torch.int64)
        self._draw_rows(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            which.data_ptr(),
            len(rows),
            greatest.data_ptr(),
            temperatures.data_ptr(),
            min_p.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            numbers.data_ptr(),
            tokens.data_ptr(),
        )
        drawn: list[int] = tokens.tolist()
        return drawn


@functools.cache
def load_kernels(dtype: torch.dtype) -> NativeKernels | str:
    """The kernels for `dtype`, or why there are none. `BATCHWRIGHT_NATIVE=0` turns them off."""
    if os.environ.get("BATCHWRIGHT_NATIVE") == "0":
        return "turned off by BATCHWRIGHT_NATIVE=0"
    if dtype not in _SUFFIX:
        return f"no kernels for {dtype}"
    try:
        # torch has loaded its OpenMP runtime by now; the library shares it, and with it its threads.
        return NativeKernels(ctypes.CDLL(str(library_path())), dtype)
    except (BuildError, OSError) as error:
        return str(error)
