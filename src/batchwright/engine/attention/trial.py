"""Attention that is used only after a trial on the device on which it will run.

Kernels that are compiled for the device at hand may fail only there. A wrong one would not raise: the model would
answer fluent nonsense.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.attention.attention import AttentionBackend, AttentionShape, KVShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention, ReferenceAttention
from batchwright.engine.step.batch import StepBatch, batch_of

_log = logging.getLogger(__name__)

_SHARED, _OWN = 160, 200
"""Keys that two sequences of the trial share, and the most keys that one has of its own."""


class TriedAttention(PagedAttention):
    """Attention by `candidate` while every kind of layer passes its trial, and by `fallback` after the first failure.

    Both must have the cache layout of `PagedAttention`.
    """

    def __init__(self, candidate: PagedAttention, fallback: PagedAttention) -> None:
        self.current, self._fallback = candidate, fallback
        """The implementation in use: the candidate or, after a failure, the fallback."""
        self._passed: set[tuple[AttentionShape, torch.dtype, torch.Size]] = set()
        self.name = candidate.name

    @property
    def trusted(self) -> bool:
        """Whether the candidate has passed every trial so far."""
        return self.current is not self._fallback

    def refusal(self, shape: KVShape) -> str | None:
        return self.current.refusal(shape)

    def try_out(self, kv: KVShape, shape: AttentionShape) -> None:
        """Try layers of a new kind; if the candidate fails, log the reason and fall back."""
        if not self.trusted:
            return
        for variant in self.current.variants():
            if (reason := disagreement(variant, kv, shape)) is not None:
                break
        else:
            return
        _log.warning("%s attention is not used on %s: %s", self.current.name, kv.device, reason)
        self.note = f"not {self.current.name}: {reason}"
        self.current, self.name = self._fallback, self._fallback.name

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        """Write `key` and `value` [T, kv_heads, head_dim] to the slots of `batch`."""
        self.current.store(key, value, cache, batch)

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        """Attend with `query` [T, heads · head_dim] -> [T, heads · head_dim]."""
        self.try_layer(query, cache, shape)
        return self.current.attend(query, cache, shape, batch)

    def try_layer(self, query: Tensor, cache: LayerCache, shape: AttentionShape) -> None:
        """Try the kind of layer that attends with `query` to `cache`, unless that was done before."""
        kind = (shape, cache.keys.dtype, cache.keys.shape)
        if kind not in self._passed:
            blocks, kv_heads, block_size, head_dim = cache.keys.shape
            self.try_out(KVShape(blocks, block_size, kv_heads, head_dim, query.dtype, query.device), shape)
            self._passed.add(kind)


def disagreement(backend: AttentionBackend, kv: KVShape, shape: AttentionShape) -> str | None:
    """Return why `backend` cannot be trusted with layers of this kind, or None if it agrees with the reference."""
    if (refusal := backend.refusal(kv)) is not None:
        return refusal
    try:
        differences = [_difference(backend, kv, shape, decodes=decodes) for decodes in (False, True)]
    except Exception as error:  # from a compiler or a driver: whatever it is, the kernel does not run here
        return f"it fails: {type(error).__name__}: {error}"
    tolerance = 1e-3 if kv.dtype is torch.float32 else 3e-2
    for difference in differences:
        if not difference <= tolerance:
            return f"it differs from the reference by {difference:.2g}"
    return None


@torch.inference_mode()
def _difference(backend: AttentionBackend, kv: KVShape, shape: AttentionShape, *, decodes: bool) -> float:
    """Return the greatest difference from the reference in a step of sequences of which some share a prefix."""
    batch, blocks = trial_batch(kv.block_size, kv.device, decodes=decodes)
    cache = ReferenceAttention().allocate(replace(kv, num_blocks=blocks))
    generator = torch.Generator(kv.device).manual_seed(0)
    for part in (cache.keys, cache.values):
        part.normal_(generator=generator)
        # Memory past the end of a sequence, and in blocks of no sequence, can hold anything.
        part[0] = math.nan
        for table, context in zip(batch.tables, batch.contexts, strict=True):
            if used := context % kv.block_size:
                part[table[context // kv.block_size], :, used:] = math.nan
    query = torch.empty(batch.num_tokens, shape.heads * kv.head_dim, dtype=kv.dtype, device=kv.device)
    query.normal_(generator=generator)
    expected = ReferenceAttention().attend(query, cache, shape, batch)
    batch.attention_plan = None
    return float((backend.attend(query, cache, shape, batch).float() - expected.float()).abs().max())


def trial_batch(block_size: int, device: torch.device, *, decodes: bool = False) -> tuple[StepBatch, int]:
    """Return a step of five sequences, and the number of blocks that it needs; no sequence has block 0.

    They are prompts and decodes, or only `decodes`, which some kernels compute differently.
    """
    counts = np.array([1, 1, 1, 1, 1] if decodes else [1, 1, 1, 45, 3], np.int32)
    contexts = np.array([_SHARED + _OWN, _SHARED + 1, 1, _OWN, 9], np.int32)
    shared = _SHARED // block_size
    needed = -(-contexts // block_size)
    order = 1 + np.random.default_rng(0).permutation(int(needed.sum()))
    tables, given = np.zeros((len(counts), int(needed.max())), np.int32), 0
    for index, blocks in enumerate(needed):
        tables[index, :blocks] = order[given : given + blocks]
        given += blocks
    tables[1, :shared] = tables[0, :shared]
    token_ids = np.zeros(int(counts.sum()), np.int64)
    last_rows = np.cumsum(counts) - 1
    batch = batch_of(token_ids, counts, contexts - counts, tables, last_rows, block_size, device)
    return batch, 1 + int(needed.sum())
