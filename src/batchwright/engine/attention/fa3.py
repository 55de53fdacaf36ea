"""Attention on Hopper GPUs by FlashAttention 3, with Triton's tiles for the steps at which it is slower.

The package (`tokenspeed-fa3`, or another build of the module `flash_attn_interface`) reads our caches in place: viewed
as [blocks, block_size, kv_heads, head_dim] they are its pages, of any size. It reads keys that sequences share once for
each sequence, and takes longer to start than a tile.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.attention.attention import AttentionShape, KVShape, LayerCache
from batchwright.engine.attention.paged import PagedAttention
from batchwright.engine.attention.tiles import TiledPlan, TileShape, tile_shape_of, worthy_spans
from batchwright.engine.attention.trial import TriedAttention
from batchwright.engine.step.batch import StepBatch
from batchwright.errors import UnsupportedModel

_MODULE = "flash_attn_interface"
_CAPABILITY = 9
_HEAD_DIMS = (64, 96, 128, 192, 256)
_DTYPES = (torch.bfloat16, torch.float16)

_SPLITS = (1, 4, 32)
"""Numbers of parts that the keys of a sequence may be cut into. The kernel cuts each as finely as is worthwhile, within
this limit; the list is short because each number needs its own CUDA graphs."""
_EVEN = 1.25
"""Greatest length of a sequence that is not cut, as a multiple of a processor's even share of the step."""
_MOST_PARTS = 4096
"""Greatest product of the rows of a step and the splits: bounds the memory of partial results."""
_MOST_SEQUENCES = 992
"""Most sequences for which the kernel chooses how finely to cut each one; if there are more, it cuts all alike."""
_FEW_DECODES = 2
"""Most sequences of a decode step that FlashAttention 3 computes faster than tiles, if they are long."""
_LEAST_KEYS = 64 * 1024
"""Fewest keys of a decode step, counted for each KV head, that are worth the longer start."""


@dataclass(frozen=True, slots=True)
class FlashRule:
    """The choice between FlashAttention 3 and tiles, based on numbers that the host knows."""

    always: bool = False
    """Whether there are no tiles to choose."""

    def splits(
        self,
        tables: np.ndarray,
        counts: np.ndarray,
        contexts: np.ndarray,
        shape: TileShape,
        sharing: int | None = None,
    ) -> int:
        """Return the most parts into which to cut the keys of sequences, or 0 to leave the step to tiles.

        The arguments are those of `tile`.
        """
        splits = _splits(counts, contexts, shape)
        if self.always:
            return max(1, splits)
        if len(counts) > _MOST_SEQUENCES:
            return 0
        prompts = counts > shape.narrow
        keys = int(contexts.sum())
        if not prompts.any():
            few = len(counts) <= _FEW_DECODES and keys * shape.kv_heads >= _LEAST_KEYS
            return splits if few and not worthy_spans(tables, counts, contexts, shape, sharing) else 0
        # One product for each query of a wide tile takes about as long as reading one key. FlashAttention 3 is twice as
        # fast as tiles on prompts.
        pairs = float((counts * (contexts - counts / 2))[prompts].sum())
        spans = worthy_spans(tables, counts, contexts, shape, sharing)
        saved = sum((len(span.sequences) - 1) * (span.end - span.begin) for span in spans) * shape.block_size
        return 0 if saved > pairs / shape.wide else max(1, splits)


def _splits(counts: np.ndarray, contexts: np.ndarray, shape: TileShape) -> int:
    """Return the number of parts that keeps all processors busy; 0 if that would need too much memory."""
    # Queries of one sequence share a program up to the number of queries of a wide tile.
    programs = -(-counts // shape.wide)
    share = float((programs * contexts).sum()) * shape.kv_heads / shape.processors
    wanted = float(contexts.max()) / share
    if wanted <= _EVEN:
        return 1
    splits = next((each for each in _SPLITS if each >= wanted), _SPLITS[-1])
    return splits if splits * int(counts.sum()) <= _MOST_PARTS else 0


class FlashPlan(TiledPlan):
    """What FlashAttention 3 needs for a step in every layer, beside the tiles of the layers that use tiles."""

    def __init__(self, batch: StepBatch, block_size: int, rule: FlashRule) -> None:
        super().__init__(batch, block_size)
        self.rule = rule
        self.splits: dict[TileShape, int] = {}
        """Numbers that `rule` returned."""
        self._metadata: dict[tuple[AttentionShape, tuple[int, ...], torch.dtype, int], Any] = {}

    @property
    def shapes(self) -> tuple[TileShape, ...]:
        return tuple(dict.fromkeys([*self.splits, *self.tilings]))

    def splits_of(self, shape: TileShape) -> int:
        """Return into how many parts at most to cut the keys of sequences, or 0 to leave the step to tiles."""
        if shape not in self.splits:
            batch = self._batch
            counts, contexts = np.array(batch.query_lens), np.array(batch.contexts)
            self.splits[shape] = self.rule.splits(batch.tables, counts, contexts, shape)
        return self.splits[shape]

    def metadata(
        self, layer: AttentionShape, cache: LayerCache, dtype: torch.dtype, splits: int, make: Callable[[], Any]
    ) -> Any:
        """Return the schedule for a kind of layer, computed once."""
        kind = (layer, tuple(cache.keys.shape[1:]), dtype, splits)
        if kind not in self._metadata:
            self._metadata[kind] = make()
        return self._metadata[kind]


class FlashAttention3(PagedAttention):
    """Attention of all steps by FlashAttention 3, with `splits`, or as many splits as a step needs."""

    name = "fa3"

    def __init__(self, kernels: Any, splits: int | None = None) -> None:
        self._kernels, self._splits = kernels, splits

    def variants(self) -> list[PagedAttention]:
        return [FlashAttention3(self._kernels, splits) for splits in _SPLITS[:2]]

    def refusal(self, shape: KVShape) -> str | None:
        return flash_refusal(shape)

    def plan(self, batch: StepBatch, block_size: int) -> FlashPlan:
        if not isinstance(batch.attention_plan, FlashPlan):
            batch.attention_plan = FlashPlan(batch, block_size, FlashRule(always=True))
        return batch.attention_plan

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        """Attend with `query` [T, heads · head_dim] -> [T, heads · head_dim]."""
        if shape.softcap is not None:
            raise UnsupportedModel(
                "attention='fa3' is not possible: FlashAttention 3 is built without softcaps. Use attention='auto'."
            )
        _, kv_heads, block_size, head_dim = cache.keys.shape
        if query.stride(-1) != 1:
            query = query.contiguous()
        plan = self.plan(batch, block_size)
        splits = self._splits or plan.splits_of(tile_shape_of(shape.heads, kv_heads, block_size, query.device))
        # The schedule and the kernel must be given the same numbers.
        longest_query = max(batch.query_lens)
        window = (-1, -1) if shape.window is None else (shape.window - 1, 0)
        with torch.cuda.device_of(query):
            metadata = plan.metadata(
                shape,
                cache,
                query.dtype,
                splits,
                lambda: self._kernels.get_scheduler_metadata(
                    batch.num_sequences,
                    longest_query,
                    batch.block_tables.shape[1] * block_size,
                    shape.heads,
                    kv_heads,
                    head_dim,
                    batch.context_lens,
                    qkv_dtype=query.dtype,
                    cu_seqlens_q=batch.query_starts,
                    page_size=block_size,
                    causal=True,
                    window_size=window,
                    num_splits=splits,
                ),
            )
            out: Tensor = self._kernels.flash_attn_with_kvcache(
                query.unflatten(-1, (shape.heads, head_dim)),
                cache.keys.transpose(1, 2),
                cache.values.transpose(1, 2),
                cache_seqlens=batch.context_lens,
                page_table=batch.block_tables,
                cu_seqlens_q=batch.query_starts,
                max_seqlen_q=longest_query,
                softmax_scale=shape.scale,
                causal=True,
                window_size=window,
                scheduler_metadata=metadata,
                num_splits=splits,
            )
        return out.flatten(1)


class FlashOrTiles(PagedAttention):
    """Attention of each step by `flash` or by `tiles`, whichever is faster.

    Both are tried with every kind of layer before either computes one: a recorded step is planned with numbers that
    only one implementation can use.
    """

    def __init__(self, flash: TriedAttention, tiles: TriedAttention) -> None:
        """`flash` must fall back on `tiles`."""
        self._flash, self._tiles = flash, tiles
        self._describe()

    def refusal(self, shape: KVShape) -> str | None:
        return self._flash.refusal(shape)

    def try_out(self, kv: KVShape, shape: AttentionShape) -> None:
        """Try layers of a new kind; an implementation that fails is not used any more."""
        self._tiles.try_out(kv, shape)
        self._flash.try_out(kv, shape)
        self._describe()

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        """Write `key` and `value` [T, kv_heads, head_dim] to the slots of `batch`."""
        self._tiles.store(key, value, cache, batch)

    def plan(self, batch: StepBatch, block_size: int) -> FlashPlan:
        rule = FlashRule(always=not self._tiles.trusted)
        plan = batch.attention_plan
        if not isinstance(plan, FlashPlan) or plan.rule != rule:
            plan = batch.attention_plan = FlashPlan(batch, block_size, rule)
        return plan

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        """Attend with `query` [T, heads · head_dim] -> [T, heads · head_dim]."""
        self._tiles.try_layer(query, cache, shape)
        self._flash.try_layer(query, cache, shape)
        self._describe()
        if not self._flash.trusted:
            return self._tiles.attend(query, cache, shape, batch)
        _, kv_heads, block_size, _ = cache.keys.shape
        kind = tile_shape_of(shape.heads, kv_heads, block_size, query.device)
        chosen = self._flash if self.plan(batch, block_size).splits_of(kind) else self._tiles
        return chosen.attend(query, cache, shape, batch)

    def _describe(self) -> None:
        self.name, self.note = self._flash.name, self._flash.note
        if not self._flash.trusted:
            self.name = self._tiles.name
            self.note = "; ".join(note for note in (self._flash.note, self._tiles.note) if note)


def load_flash(shape: KVShape) -> FlashAttention3 | str:
    """Return FlashAttention 3 for caches of `shape`, or why it is not available."""
    if (reason := flash_refusal(shape)) is not None:
        return reason
    try:
        return FlashAttention3(importlib.import_module(_MODULE))
    except Exception as error:  # not installed, or made for another Python, driver or torch
        return (
            f"FlashAttention 3 cannot be imported: {type(error).__name__}: {error}; it is in the extra 'cuda': "
            "pip install 'batchwright[cuda]'"
        )


def flash_refusal(shape: KVShape) -> str | None:
    """Return why FlashAttention 3 cannot work with a cache of `shape`, or None if it can."""
    if not is_hopper(shape.device):
        return f"FlashAttention 3 runs on GPUs of compute capability {_CAPABILITY}, which {shape.device} is not"
    if shape.dtype not in _DTYPES:
        return f"FlashAttention 3 computes in bfloat16 and float16, not in {shape.dtype}"
    if shape.quantized:
        return "FlashAttention 3 reads no quantized caches of ours"
    if shape.head_dim not in _HEAD_DIMS:
        return f"FlashAttention 3 needs a head size of {', '.join(map(str, _HEAD_DIMS))}, not {shape.head_dim}"
    return None


def is_hopper(device: torch.device) -> bool:
    """Return whether FlashAttention 3 has kernels for `device`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device)[0] == _CAPABILITY
