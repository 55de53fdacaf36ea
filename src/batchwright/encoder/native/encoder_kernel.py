"""The compiled attention of an encoder as a function of torch tensors, built beside the engine's kernels."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from batchwright.engine.native.build import BuildError, library_path

_SOURCE = Path(__file__).with_name("bidirectional.cpp")
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_ARGUMENTS = [c_void_p] * 4 + [c_int64] * 3 + [c_float]
LANES = 16


class NativeBidirectional:
    """Attention among all tokens of each sequence, float32 or bfloat16 on the CPU."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._attend = getattr(library, f"bw_attend_bidirectional_{_SUFFIX[dtype]}")
        self._attend.argtypes = _ARGUMENTS
        self._attend.restype = None

    def attend(self, qkv: Tensor, starts: Tensor, lengths: Tensor, out: Tensor, *, heads: int, scale: float) -> None:
        """Attention of `qkv` [cells, 3·heads·head_dim] into `out` [cells, heads·head_dim], both contiguous.

        `starts` and `lengths` [sequences] int32 say which cells are a sequence; other cells of `out` stay as they are.
        `head_dim` is a multiple of `LANES`.
        """
        self._attend(
            qkv.data_ptr(),
            out.data_ptr(),
            starts.data_ptr(),
            lengths.data_ptr(),
            len(starts),
            heads,
            out.shape[1] // heads,
            scale,
        )


@functools.cache
def load_bidirectional(dtype: torch.dtype) -> NativeBidirectional | str:
    """The kernel for `dtype`, or why there is none. `BATCHWRIGHT_NATIVE=0` turns it off."""
    if os.environ.get("BATCHWRIGHT_NATIVE") == "0":
        return "turned off by BATCHWRIGHT_NATIVE=0"
    if dtype not in _SUFFIX:
        return f"no kernel for {dtype}"
    try:
        # torch has loaded its OpenMP runtime by now; the library shares it, and with it its threads.
        return NativeBidirectional(ctypes.CDLL(str(library_path("bidirectional", (_SOURCE,)))), dtype)
    except (BuildError, OSError) as error:
        return str(error)
