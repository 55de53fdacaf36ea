"""Attention through torch alone, on any device: decodes of like length together, prompts one by one.

Gathering the paged keys of similar sequences into one padded tensor costs a copy, and lets one call run parallel over
(sequence, head). Sequences whose lengths differ by more than a quarter go into different calls, so little is padded.

Prompts go through `scaled_dot_product_attention`, and so do decodes on CUDA. On the CPU its tiles are made for many
queries; a decode has one for each head, so there two batched products with a softmax between them are faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.attention.interface import AttentionShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention, gather
from batchwright.engine.attention.plans import Decodes, GroupedPlan, Prefill
from batchwright.engine.batch import StepBatch


class SdpaAttention(PagedAttention):
    """Batched products or `scaled_dot_product_attention` over gathered keys."""

    name = "sdpa"

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        plan = self.plan(batch, cache.keys.shape[2])
        query = query.unflatten(-1, (shape.heads, -1))
        if plan.in_order:
            return self._decode(query, cache, shape, plan.decodes[0]).view(query.shape[0], -1)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in plan.decodes:
            attended = self._decode(query.index_select(0, group.rows), cache, shape, group)
            out.index_copy_(0, group.rows, attended.view(-1, *query.shape[1:]))
        for item in plan.prefills:
            rows = slice(item.row, item.row + item.count)
            out[rows] = _prefill(query[rows], cache, shape, item)
        return out.flatten(1)

    def plan(self, batch: StepBatch, block_size: int) -> GroupedPlan:
        if not isinstance(batch.attention_plan, GroupedPlan):
            batch.attention_plan = GroupedPlan(batch, block_size)
        return batch.attention_plan

    def _decode(self, query: Tensor, cache: LayerCache, shape: AttentionShape, group: Decodes) -> Tensor:
        """Attention of `query` [n, heads, dim], contiguous."""
        _, kv_heads, _, head_dim = cache.keys.shape
        blocks, padding, hidden = group.blocks(kv_heads), group.padding(kv_heads), group.hidden(shape.window)
        on_cpu = query.device.type == "cpu"
        keys_out, values_out = self._copies(cache, blocks) if on_cpu else (None, None)
        k, v = gather(cache.keys, blocks, keys_out), gather(cache.values, blocks, values_out)
        # A padded key may be another sequence's: masking its score hides its NaN, but not the NaN of its value.
        v.view(-1, head_dim).index_fill_(0, padding, 0)
        # The heads that share a key head become query rows of it: their mask is the same.
        if on_cpu:
            return _products(query.reshape(-1, shape.heads // kv_heads, head_dim), k, v, hidden, shape)
        k.view(-1, head_dim).index_fill_(0, padding, 0)
        return _fused(query.unflatten(1, (kv_heads, -1)), k, v, ~hidden, shape).contiguous()

    def _copies(self, cache: LayerCache, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the gathered keys and values. It is kept: the system takes long to hand out fresh pages."""
        size = blocks.numel() * cache.keys[0, 0].numel()
        dtype = cache.keys.dtype
        if dtype not in self._scratch or self._scratch[dtype].shape[1] < size:
            self._scratch[dtype] = torch.empty(2, size, dtype=dtype)
        keys, values = self._scratch[dtype][:, :size].view(2, blocks.numel(), -1)
        return keys, values


def _products(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, shape: AttentionShape) -> Tensor:
    """q [n · kv_heads, rows, dim] over k, v [n, kv_heads, keys, dim], `hidden` [n, 1, 1, keys]: the shape of q."""
    ignored = q.new_empty(1, 1, 1)
    scores = torch.baddbmm(ignored, q, k.flatten(0, 1).transpose(1, 2), beta=0, alpha=shape.scale)
    if shape.softcap is not None:
        scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
    scores.view(*k.shape[:2], *scores.shape[1:]).masked_fill_(hidden, -torch.inf)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1))


def _prefill(q: Tensor, cache: LayerCache, shape: AttentionShape, item: Prefill) -> Tensor:
    """Attention of q [count, heads, dim]."""
    blocks = item.blocks(cache.keys.shape[1])
    k, v = (gather(each, blocks)[:, :, : item.context] for each in (cache.keys, cache.values))
    return _fused(q.transpose(0, 1)[None], k, v, item.visible(shape.window), shape)[0].transpose(0, 1)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shape: AttentionShape) -> Tensor:
    """q [n, heads, rows, dim] over k, v [n, kv_heads, keys, dim]; `mask`, of what is seen, broadcasts to the scores."""
    if shape.softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=shape.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)).float() * shape.scale
    scores = shape.softcap * torch.tanh(scores / shape.softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v
