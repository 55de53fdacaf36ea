"""Which attention implementation runs."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from batchwright.engine.attention.interface import AttentionBackend, KVShape
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.attention.reference import ReferenceAttention
from batchwright.engine.attention.sdpa import SdpaAttention
from batchwright.engine.native import load_kernels
from batchwright.errors import UnsupportedModel

AttentionName: TypeAlias = Literal["auto", "native", "sdpa", "reference"]


def choose_attention(name: str, shape: KVShape) -> AttentionBackend:
    """The implementation called `name`; for "auto" the fastest that works with `shape`.

    Raises ValueError for an unknown name, `UnsupportedModel` when the one asked for cannot work here.
    """
    if name not in get_args(AttentionName):
        raise ValueError(f"attention={name!r}: must be one of {', '.join(get_args(AttentionName))}")
    if name == "reference":
        return ReferenceAttention()
    if name == "sdpa":
        return SdpaAttention()
    kernels = load_kernels(shape.dtype) if shape.device.type == "cpu" else "the compiled kernels run on the CPU"
    reason: str | None
    if isinstance(kernels, str):
        reason = kernels
    else:
        native = NativeAttention(kernels)
        reason = native.refusal(shape)
        if reason is None:
            return native
    if name == "native":
        raise UnsupportedModel(f"attention='native' is not possible: {reason}. Use attention='auto'.")
    chosen = SdpaAttention()
    if shape.device.type == "cpu":
        chosen.note = f"no compiled kernels: {reason}"
    return chosen
