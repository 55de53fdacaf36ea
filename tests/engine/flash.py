"""The module `flash_attn_interface` by the textbook, on any device: each call must agree with its schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from batchwright.engine.attention import fa3


class FakeFlash:
    """Kernels of FlashAttention 3 that are given their arguments by name, as ours give them."""

    def __init__(self, launch: Callable[[Callable[[], object]], None] = lambda kernel: (kernel(), None)[1]) -> None:
        """Kernels that `launch` carries out."""
        self._launch = launch
        self.schedules = 0
        self.splits: list[int] = []
        """Splits of each attention."""
        self._scheduled: dict[int, tuple[Any, Tensor]] = {}

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        assert cache_seqlens.dtype == torch.int32
        assert kwargs["cu_seqlens_q"].shape == (batch_size + 1,)
        self.schedules += 1
        made = torch.empty(4, dtype=torch.int32)
        shape = (max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim)
        told = (*shape, kwargs["qkv_dtype"], kwargs["page_size"], kwargs["causal"], kwargs["window_size"])
        self._scheduled[id(made)] = (*told, kwargs["num_splits"]), made
        return made

    def flash_attn_with_kvcache(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, **kwargs: Any) -> Tensor:
        _, page, kv_heads, head_dim = k_cache.shape
        tables, lengths, starts = kwargs["page_table"], kwargs["cache_seqlens"], kwargs["cu_seqlens_q"]
        assert {tables.dtype, lengths.dtype, starts.dtype} == {torch.int32}
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        shape = (kwargs["max_seqlen_q"], tables.shape[1] * page, q.shape[1], kv_heads, head_dim)
        told = (*shape, q.dtype, page, kwargs["causal"], kwargs["window_size"], kwargs["num_splits"])
        assert self._scheduled[id(kwargs["scheduler_metadata"])][0] == told
        self.splits.append(kwargs["num_splits"])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._launch(lambda: _attend(out, q, k_cache, v_cache, kwargs))
        return out


def _attend(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, kwargs: dict[str, Any]) -> None:
    starts, page, group = kwargs["cu_seqlens_q"].tolist(), k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    left = kwargs["window_size"][0]
    for index, context in enumerate(kwargs["cache_seqlens"].tolist()):
        blocks = kwargs["page_table"][index, : -(-context // page)].long()
        k, v = (cache[blocks].flatten(0, 1)[:context].float() for cache in (k_cache, v_cache))
        rows = slice(starts[index], starts[index + 1])
        count = rows.stop - rows.start
        at = torch.arange(context - count, context)[:, None]
        key = torch.arange(context)[None, :]
        hidden = (key > at) | ((key < at - left) if left >= 0 else torch.tensor(False))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k.repeat_interleave(group, 1)) * kwargs["softmax_scale"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).to(out.dtype)


def install(monkeypatch: pytest.MonkeyPatch, fake: object) -> None:
    """Make `fake` the module, and every device and head size one that it can do."""
    monkeypatch.setitem(sys.modules, fa3._MODULE, cast(ModuleType, fake))
    monkeypatch.setattr(fa3, "is_hopper", lambda device: True)
    monkeypatch.setattr(fa3, "_DTYPES", (torch.float32, torch.bfloat16, torch.float16))
    monkeypatch.setattr(fa3, "_HEAD_DIMS", (16, 32, 64))
