"""Attention as the textbook has it, one sequence at a time: what the fast implementations are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.engine.attention.attention import AttentionShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention, gather, head_rows
from batchwright.engine.step.batch import StepBatch


class ReferenceAttention(PagedAttention):
    """Softmax(q·kᵀ·scale)·v in float32 for each sequence."""

    name = "reference"

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        _, kv_heads, _, head_dim = cache.keys.shape
        out = torch.empty(query.shape[0], shape.heads, head_dim, dtype=query.dtype, device=query.device)
        row = 0
        for index, (count, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
            blocks = head_rows(batch.block_tables[index : index + 1], kv_heads)
            q = query[row : row + count].unflatten(-1, (shape.heads, head_dim)).transpose(0, 1).float()
            k = gather(cache.keys, blocks)[0, :, :context].float()
            v = gather(cache.values, blocks)[0, :, :context].float()
            group = shape.heads // kv_heads
            scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            scores = scores.masked_fill(~visible(count, context, shape.window, query.device), -torch.inf)
            attended = scores.softmax(-1) @ v.repeat_interleave(group, 0)
            out[row : row + count] = attended.transpose(0, 1).to(query.dtype)
            row += count
        return out.flatten(1)


def visible(count: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """[count, context] bool: which keys each of the last `count` positions sees."""
    query = torch.arange(context - count, context, device=device)[:, None]
    key = torch.arange(context, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
