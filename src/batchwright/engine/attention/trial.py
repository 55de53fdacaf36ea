"""Attention that is believed only after a trial on the device that it will run on.

Kernels that a compiler makes for the device at hand can fail there and nowhere else. A wrong one would not raise: it
would answer fluent nonsense.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.attention.attention import AttentionBackend, AttentionShape, KVShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention
from batchwright.engine.attention.reference import ReferenceAttention
from batchwright.engine.step.batch import StepBatch

_log = logging.getLogger(__name__)

_SHARED, _OWN = 160, 200
"""Keys that two sequences of the trial have in common, and most that one has for itself."""


class TriedAttention(PagedAttention):
    """`candidate` for the kinds of layers that it computes as the reference does; from its first failure, `fallback`.

    Both must lay out their caches as `PagedAttention` does.
    """

    def __init__(self, candidate: PagedAttention, fallback: PagedAttention) -> None:
        self._current, self._fallback = candidate, fallback
        self._passed: set[tuple[AttentionShape, torch.dtype, torch.Size]] = set()
        self.name = candidate.name

    @property
    def current(self) -> PagedAttention:
        """What computes: the candidate or, after a failure, the fallback."""
        return self._current

    def refusal(self, shape: KVShape) -> str | None:
        return self._current.refusal(shape)

    def try_out(self, kv: KVShape, shape: AttentionShape) -> None:
        """Try a kind of layer that has not been tried; when the candidate fails, say so in the log and fall back."""
        if self._current is self._fallback:
            return
        reason = disagreement(self._current, kv, shape)
        if reason is None:
            return
        _log.warning("%s attention is not used on %s: %s", self._current.name, kv.device, reason)
        self.note = f"not {self._current.name}: {reason}"
        self._current = self._fallback
        self.name = self._fallback.name

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        self._current.store(key, value, cache, batch)

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        kind = (shape, cache.keys.dtype, cache.keys.shape)
        if kind not in self._passed:
            blocks, kv_heads, block_size, head_dim = cache.keys.shape
            self.try_out(KVShape(blocks, block_size, kv_heads, head_dim, query.dtype, query.device), shape)
            self._passed.add(kind)
        return self._current.attend(query, cache, shape, batch)


def disagreement(backend: AttentionBackend, kv: KVShape, shape: AttentionShape) -> str | None:
    """Why `backend` cannot be trusted with layers of this kind, or None when it gives what the reference gives."""
    if (refusal := backend.refusal(kv)) is not None:
        return refusal
    try:
        difference = _difference(backend, kv, shape)
    except Exception as error:  # a compiler's, a driver's: whatever it is, the kernel does not run here
        return f"it fails: {type(error).__name__}: {error}"
    tolerance = 1e-3 if kv.dtype is torch.float32 else 3e-2
    if not difference <= tolerance:
        return f"it differs from the reference by {difference:.2g}"
    return None


@torch.inference_mode()
def _difference(backend: AttentionBackend, kv: KVShape, shape: AttentionShape) -> float:
    """The greatest difference from the reference in one step of decodes, some with a shared prefix, and prompts."""
    batch, blocks = trial_batch(kv.block_size, kv.device)
    cache = ReferenceAttention().allocate(replace(kv, num_blocks=blocks))
    generator = torch.Generator(kv.device).manual_seed(0)
    for part in (cache.keys, cache.values):
        part.normal_(generator=generator)
        # Past the end of a sequence, and in blocks of no sequence, there can be anything.
        part[0] = math.nan
        for table, context in zip(batch.tables, batch.contexts, strict=True):
            if used := context % kv.block_size:
                part[table[context // kv.block_size], :, used:] = math.nan
    query = torch.empty(batch.num_tokens, shape.heads * kv.head_dim, dtype=kv.dtype, device=kv.device)
    query.normal_(generator=generator)
    expected = ReferenceAttention().attend(query, cache, shape, batch)
    batch.attention_plan = None
    return float((backend.attend(query, cache, shape, batch).float() - expected.float()).abs().max())


def trial_batch(block_size: int, device: torch.device) -> tuple[StepBatch, int]:
    """Five sequences in a step of their own, and the blocks that they need; block 0 is nobody's."""
    counts = np.array([1, 1, 1, 45, 3])
    contexts = np.array([_SHARED + _OWN, _SHARED + 1, 1, 60, 9])
    shared = _SHARED // block_size
    needed = -(-contexts // block_size)
    order = 1 + np.random.default_rng(0).permutation(int(needed.sum()))
    tables, given = np.zeros((len(counts), int(needed.max())), np.int32), 0
    for index, blocks in enumerate(needed):
        tables[index, :blocks] = order[given : given + blocks]
        given += blocks
    tables[1, :shared] = tables[0, :shared]
    starts = np.concatenate(([0], np.cumsum(counts)))
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - (contexts - counts), counts)
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(device, dtype)

    batch = StepBatch(
        token_ids=tensor(np.zeros_like(positions), torch.int64),
        positions=tensor(positions, torch.int64),
        slots=tensor(slots, torch.int64),
        query_starts=tensor(starts, torch.int32),
        context_lens=tensor(contexts, torch.int32),
        block_tables=tensor(tables, torch.int32),
        logit_rows=tensor(starts[1:] - 1, torch.int64),
        query_lens=counts.tolist(),
        contexts=contexts.tolist(),
        tables=tables,
    )
    return batch, 1 + int(needed.sum())
