"""The choice of the attention implementation."""

from __future__ import annotations

import logging
from typing import get_args

from batchwright.engine.attention.attention import AttentionBackend, AttentionShape, KVShape
from batchwright.engine.attention.fa3 import FlashOrTiles, is_hopper, load_flash
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.attention.paged import PagedAttention, ReferenceAttention
from batchwright.engine.attention.sdpa import SdpaAttention
from batchwright.engine.attention.trial import TriedAttention
from batchwright.engine.native import load_kernels
from batchwright.engine_config import AttentionName
from batchwright.errors import UnsupportedModel

_log = logging.getLogger(__name__)

PLANNED = frozenset({"fa3", "triton"})
"""Names of implementations whose plans are `TiledPlan`: they need no torch kernels around them, and can be replayed."""

_TRIED_GROUP = 4
"""Query heads per KV head in the trial at the start, as in most models. Other layers are tried when first used."""


def choose_attention(name: str, shape: KVShape) -> AttentionBackend:
    """Return the implementation called `name`, or for "auto" the fastest one that works with `shape`.

    Raises ValueError for an unknown name, `UnsupportedModel` if the named implementation cannot work here.
    """
    if name not in get_args(AttentionName):
        raise ValueError(f"attention={name!r}: must be one of {', '.join(get_args(AttentionName))}")
    if name in ("reference", "sdpa"):
        return ReferenceAttention() if name == "reference" else SdpaAttention()
    if name != "auto":
        made = {"native": _native, "triton": _triton, "fa3": load_flash}[name](shape)
        if isinstance(made, str):
            raise UnsupportedModel(f"attention={name!r} is not possible: {made}. Use attention='auto'.")
        return made
    if shape.device.type == "cuda":
        return _on_cuda(shape)
    made = _native(shape)
    if isinstance(made, AttentionBackend):
        return made
    chosen = SdpaAttention()
    if shape.device.type == "cpu":
        chosen.note = f"no compiled kernels: {made}"
    return chosen


def _on_cuda(shape: KVShape) -> AttentionBackend:
    """Return FlashAttention 3, the Triton kernels, or both, if they pass their trials; else torch's attention."""
    fallback = SdpaAttention()
    made = _triton(shape)
    if isinstance(made, str):
        _log.warning("triton attention is not used on %s: %s", shape.device, made)
        fallback.note = f"not triton: {made}"
    kind = AttentionShape(_TRIED_GROUP * shape.kv_heads, shape.head_dim**-0.5)
    flash = load_flash(shape)
    if isinstance(flash, str):
        _log.info("fa3 attention is not used on %s: %s", shape.device, flash)
        if isinstance(made, str):
            return fallback
        tried = TriedAttention(made, fallback)
        if is_hopper(shape.device):
            tried.note = f"not fa3: {flash}"
        tried.try_out(shape, kind)
        return tried
    tiles = TriedAttention(fallback if isinstance(made, str) else made, fallback)
    both = FlashOrTiles(TriedAttention(flash, tiles), tiles)
    both.try_out(shape, kind)
    return both


def _native(shape: KVShape) -> AttentionBackend | str:
    """Return the compiled kernels, or why they are not available."""
    if shape.device.type != "cpu":
        return "the compiled kernels run on the CPU"
    kernels = load_kernels(shape.dtype)
    if isinstance(kernels, str):
        return kernels
    native = NativeAttention(kernels)
    return native.refusal(shape) or native


def _triton(shape: KVShape) -> PagedAttention | str:
    """Return the Triton kernels, or why they are not available."""
    try:
        from batchwright.engine.attention.tiled import TritonAttention
    except Exception as error:  # not installed, or made for another Python, driver or torch
        return f"Triton cannot be imported: {type(error).__name__}: {error}"
    made = TritonAttention()
    return made.refusal(shape) or made
