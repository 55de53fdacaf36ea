"""Replay of decode steps from CUDA graphs, so that the host does not launch hundreds of kernels one by one.

A graph repeats the same launches on the same memory. So a step is padded to one of a few numbers of sequences, copied
to the graph's inputs, and replayed. Prompts, and steps that do not fit, are computed without graphs.

The first replays of a graph, on other inputs than it was recorded with, are compared with the same steps computed
without it. If one differs, or recording fails, that is logged and graphs are not used any more; if only the memory for
one is missing, steps of its kind are computed without a graph.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.attention import LayerCache
from batchwright.engine.attention.fa3 import FlashPlan, FlashRule
from batchwright.engine.attention.tiles import TiledPlan, TileShape, Tiling, TilingRoom, capacity, tile
from batchwright.engine.step.batch import StepBatch, batch_of, on_device
from batchwright.out_of_memory import ran_out_of_memory

_log = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Numbers of sequences of the graphs: dense enough to pad little, few because each graph keeps its logits."""
_PROOFS = 2
"""Number of first replays of a graph that are compared. The second has other inputs than the recording."""
_TOLERANCE = 1e-2
_PREPARED_KEYS = 1000
"""Keys per sequence for which graphs are prepared, besides one: enough to cut the tiles of a few sequences."""

Compute = Callable[[StepBatch], Tensor]
"""Computes the logits of a step."""


class Recording(Protocol):
    """A computation that can be repeated on the current contents of its inputs' memory."""

    output: Tensor
    """Result of the last `replay`; undefined before the first one."""

    def replay(self) -> None:
        """Compute `output` again."""
        ...


Recorder = Callable[[Callable[[], Tensor]], Recording]
"""Records a computation without executing it."""


class CudaRecorder:
    """Recorder of CUDA graphs that share the memory of their intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            # A recording that fails leaves its own stream in place; this restores the old one.
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            # Meanwhile other threads may use the device, which must not end the recording.
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            output = compute()
        return _CudaRecording(graph, output)


@dataclass(slots=True)
class _CudaRecording:
    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        self.graph.replay()


class WrongReplay(RuntimeError):
    """A replay gave other logits than the same step computed without it."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the launches of a graph depend on."""

    size: int
    """Number of sequences."""
    splits: tuple[int, ...]
    """For each kind of layer, the splits of FlashAttention 3, or 0 if tiles are computed."""
    wide: bool
    """Whether there is room for wide tiles. Empty room costs time, as does room for partial results."""
    merged: bool
    """Whether there is room for partial results."""


@dataclass(slots=True)
class _Graph:
    """State of the graph for one kind of step."""

    kind: _Kind
    rooms: dict[TileShape, TilingRoom]
    warm: bool = False
    recording: Recording | None = None
    proofs: int = 0


class DecodeGraphs:
    """Computation of steps by `compute`, or by replay of recordings if every sequence decodes one token.

    `compute` must launch the same kernels for any two steps of the same number of sequences whose attention is planned
    by `TiledPlan`, and for which `FlashRule` gives the same numbers. Steps of at most `max_sequences` sequences of at
    most `max_blocks` blocks are replayed.
    """

    def __init__(self, compute: Compute, record: Recorder, *, max_sequences: int, max_blocks: int) -> None:
        most = min(max_sequences, _SIZES[-1])
        self._compute, self._record = compute, record
        self._sizes = [*(size for size in _SIZES if size < most), most]
        self._max_blocks = max_blocks
        self._inputs: _Inputs | None = None
        self._shapes: tuple[TileShape, ...] = ()
        """Parameters of the cuts that the layers' attention needs, known after the first step."""
        self._rule: FlashRule | None = None
        """The choice between FlashAttention 3 and tiles; None if there are only tiles."""
        self._graphs: dict[_Kind, _Graph] = {}
        self._too_large: set[_Kind] = set()
        """Kinds of steps whose recordings did not fit into memory."""
        self.disabled: str | None = None
        """Why no graph is used any more; None while graphs are used."""

    @property
    def recorded(self) -> list[int]:
        """Numbers of sequences that have recordings."""
        return sorted({kind.size for kind, graph in self._graphs.items() if graph.recording is not None})

    @torch.inference_mode()
    def prepare(self, caches: Sequence[LayerCache], most: int) -> None:
        """Record and verify the graphs of decodes of up to `most` sequences, while `caches` hold no sequences yet.

        Otherwise each would be recorded when a step first has that many sequences, and several steps would take long.
        """
        num_blocks, _, block_size, _ = caches[0].keys.shape
        longest = min(_PREPARED_KEYS, (self._max_blocks - 1) * block_size)
        generator = torch.Generator(caches[0].keys.device).manual_seed(0)
        for part in (part for cache in caches for part in (cache.keys, cache.values)):
            part[: most * -(-_PREPARED_KEYS // block_size)].normal_(generator=generator)
        # The largest first: the others find room in its memory.
        for size in reversed(self._sizes[: bisect_left(self._sizes, most) + 1]):
            for keys in (1, longest):
                # The first step is computed without a graph, or shows which attention is used.
                for step in range(2 + _PROOFS):
                    each = -(-(keys + step) // block_size)
                    if self.disabled is not None or keys < 1 or min(size, most) * each > num_blocks:
                        continue
                    try:
                        self(_decodes(min(size, most), keys + step, each, block_size, caches[0].keys.device))
                    except Exception as error:  # such as out of memory: a smaller one may be recorded later
                        _log.warning("graphs are not prepared: %s: %s", type(error).__name__, error)
                        return

    def __call__(self, batch: StepBatch) -> Tensor:
        """Return the logits of `batch` -> [R, vocab]; they are valid until the next call."""
        if self.disabled is not None or not self._fits(batch):
            return self._compute(batch)
        if not self._shapes:
            logits = self._compute(batch)
            plan = batch.attention_plan
            if isinstance(plan, TiledPlan):
                self._shapes = plan.shapes
                self._rule = plan.rule if isinstance(plan, FlashPlan) else None
            else:
                self._disable("the attention that runs cannot be replayed")
            return logits
        try:
            padded = self._padded(batch)
        except Exception as error:  # from a driver or a library: whatever it is, steps can be computed without graphs
            self._disable(f"{type(error).__name__}: {error}")
            padded = None
        return self._compute(batch) if padded is None else padded[: batch.num_sequences]

    def _fits(self, batch: StepBatch) -> bool:
        return (
            batch.num_tokens == batch.num_sequences == batch.logit_rows.shape[0]
            and batch.num_sequences <= self._sizes[-1]
            and batch.block_tables.shape[1] <= self._max_blocks
        )

    def _disable(self, reason: str) -> None:
        _log.warning("steps are not replayed from CUDA graphs: %s", reason)
        self.disabled = reason
        self._graphs.clear()
        self._inputs = None

    def _padded(self, batch: StepBatch) -> Tensor | None:
        """Return the logits of `batch` followed by those of padding; None if there is no room for its tiles or graph.

        Raises `WrongReplay`, and whatever recording raises.
        """
        size = self._sizes[bisect_left(self._sizes, batch.num_sequences)]
        device = batch.slots.device
        if self._inputs is None:
            self._inputs = _Inputs(self._sizes[-1], self._max_blocks, device)
        # Padding repeats the shortest sequence: this only stores the same keys and values again.
        order = np.full(size, int(np.argmin(batch.contexts)))
        order[: batch.num_sequences] = np.arange(batch.num_sequences)
        tables, contexts, ones = batch.tables[order], np.array(batch.contexts)[order], np.ones(size, np.int64)
        own = batch.num_sequences
        splits = [
            0 if self._rule is None else self._rule.splits(tables, ones, contexts, shape, own) for shape in self._shapes
        ]
        tilings = {
            shape: tile(tables, ones, contexts, shape, own)
            for shape, each in zip(self._shapes, splits, strict=True)
            if not each
        }
        kind = _Kind(
            size=size,
            splits=tuple(splits),
            wide=any(len(tiling.wide) for tiling in tilings.values()),
            merged=any(len(tiling.merged) for tiling in tilings.values()),
        )
        if kind in self._too_large:
            return None
        try:
            return self._replayed(kind, tilings, batch, order, self._inputs)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            # The step itself needs less memory than its recording, whose tensors stay allocated.
            _log.warning("steps of up to %d sequences are not replayed from a CUDA graph: %s", size, error)
            self._too_large.add(kind)
            self._graphs.pop(kind, None)
            return None

    def _replayed(
        self, kind: _Kind, tilings: Mapping[TileShape, Tiling], batch: StepBatch, order: np.ndarray, inputs: _Inputs
    ) -> Tensor | None:
        if kind not in self._graphs:
            rooms = {
                shape: TilingRoom(capacity(kind.size, shape, wide=kind.wide, merged=kind.merged), batch.slots.device)
                for shape in tilings
            }
            self._graphs[kind] = _Graph(kind, rooms)
        graph = self._graphs[kind]
        if not all(graph.rooms[shape].load(tiling) for shape, tiling in tilings.items()):
            return None
        inputs.load(batch, order)
        return self._run(graph, inputs)

    def _run(self, graph: _Graph, inputs: _Inputs) -> Tensor:
        if not graph.warm:
            # Kernels are compiled and loaded when they first run, which must not happen during a recording.
            logits = self._compute(inputs.step(graph, self._shapes, self._rule))
            graph.warm = True
            return logits
        if graph.recording is None:
            static = inputs.step(graph, self._shapes, self._rule)
            graph.recording = self._record(lambda: self._compute(static))
        graph.recording.replay()
        if graph.proofs < _PROOFS:
            _require_like(graph.recording.output, self._compute(inputs.step(graph, self._shapes, self._rule)))
            graph.proofs += 1
        return graph.recording.output


def _decodes(sequences: int, keys: int, blocks: int, block_size: int, device: torch.device) -> StepBatch:
    """Return a step of decodes of sequences with this many keys each, in this many blocks of their own."""
    ones = np.ones(sequences, np.int32)
    tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
    token_ids, logit_rows = np.zeros(sequences, np.int64), np.arange(sequences, dtype=np.int64)
    return batch_of(token_ids, ones, ones * (keys - 1), tables, logit_rows, block_size, device)


class _Inputs:
    """Memory from which graphs read the inputs of a step."""

    def __init__(self, sequences: int, max_blocks: int, device: torch.device) -> None:
        self._token_ids, self._positions, self._slots = torch.zeros(3, sequences, dtype=torch.int64, device=device)
        self._contexts = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._tables = torch.zeros(sequences, max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(sequences, device=device)
        self._starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)

    def load(self, batch: StepBatch, order: np.ndarray) -> None:
        """Copy the sequences of `batch` in `order`."""
        index = on_device(order, self._slots.device)
        size, width = len(order), batch.block_tables.shape[1]
        self._token_ids[:size] = batch.token_ids[index]
        self._positions[:size] = batch.positions[index]
        self._slots[:size] = batch.slots[index]
        self._contexts[:size] = batch.context_lens[index]
        self._tables[:size, :width] = batch.block_tables[index]

    def step(self, graph: _Graph, shapes: tuple[TileShape, ...], rule: FlashRule | None) -> StepBatch:
        """Return a step of the sequences that were loaded for `graph`.

        Its tensors are new objects each time, since caches of a step recognize it by the identity of its tensors. The
        host has no numbers for planning the attention, only the plan.
        """
        size = graph.kind.size
        batch = StepBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            block_tables=self._tables[:size],
            logit_rows=self._rows[:size],
            query_lens=[1] * size,
            contexts=[],
            tables=np.zeros((0, 0), np.int32),
        )
        block_size = shapes[0].block_size
        if rule is None:
            plan = TiledPlan(batch, block_size)
        else:
            plan = FlashPlan(batch, block_size, rule)
            plan.splits.update(zip(shapes, graph.kind.splits, strict=True))
        plan.tilings.update({shape: room.tiling for shape, room in graph.rooms.items()})
        batch.attention_plan = plan
        return batch


def _require_like(ours: Tensor, expected: Tensor) -> None:
    """Raise `WrongReplay` if logits differ, apart from NaN and infinities, which a request itself may cause."""
    ours, expected = (torch.nan_to_num(each.float(), 0.0, 0.0, 0.0) for each in (ours, expected))
    error = float((ours - expected).norm() / expected.norm().clamp_min(1e-30))
    if not error <= _TOLERANCE:
        raise WrongReplay(f"a replayed step differs by {error:.2g} (relative norm) from the same step computed anew")
