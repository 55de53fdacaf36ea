"""Steps of decodes replayed from CUDA graphs, so that the host does not launch hundreds of kernels one by one.

A graph repeats the same launches on the same memory. So a step is padded to one of a few numbers of sequences, copied
to where the graphs read, and replayed. Prompts, and whatever does not fit, are computed as ever.

Nothing is taken on trust: a graph's first replays, on other inputs than it was recorded with, are compared with the
same steps computed as ever. When one differs, or recording fails, the log says so and no graph is used any more.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.attention.tiles import TiledPlan, TileShape, TilingRoom, capacity, tile
from batchwright.engine.step.batch import StepBatch

_log = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Sequences of the graphs: close enough to pad little, few enough for the logits that each of them keeps."""
_PROOFS = 2
"""Replays that are compared. The second has other inputs than the recording had."""
_TOLERANCE = 1e-2

Compute = Callable[[StepBatch], Tensor]
"""A step's logits."""


class Recording(Protocol):
    """A computation that can be repeated, on what the memory of its inputs holds by then."""

    output: Tensor
    """Undefined until `replay`, and overwritten by the next one."""

    def replay(self) -> None:
        """Compute `output` anew."""
        ...


Recorder = Callable[[Callable[[], Tensor]], Recording]
"""Records a computation without carrying it out."""


class CudaRecorder:
    """Records CUDA graphs, which share the memory of what lies between their inputs and their outputs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            # A recording that fails leaves its own stream in place; this one brings the old one back.
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            # Other threads may use the device meanwhile: what they do must not end the recording.
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
    """A replay gave other logits than the same step computed as ever."""


@dataclass(slots=True)
class _Graph:
    """What is known of one number of sequences."""

    rooms: dict[TileShape, TilingRoom]
    warm: bool = False
    recording: Recording | None = None
    proofs: int = 0


class DecodeGraphs:
    """Computes steps as `compute` does; those that are decodes of one token each, through recordings.

    `compute` must launch the same for any two steps of the same number of sequences whose attention is planned by
    `TiledPlan`. Steps of at most `max_sequences` sequences of at most `max_blocks` blocks are replayed.
    """

    def __init__(self, compute: Compute, record: Recorder, *, max_sequences: int, max_blocks: int) -> None:
        most = min(max_sequences, _SIZES[-1])
        self._compute, self._record = compute, record
        self._sizes = [*(size for size in _SIZES if size < most), most]
        self._max_blocks = max_blocks
        self._inputs: _Inputs | None = None
        self._shapes: tuple[TileShape, ...] = ()
        """How the attention of the layers is cut, as the first step shows."""
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        """By the number of sequences, and whether there is room for wide tiles, whose empty places cost time too."""
        self.disabled: str | None = None
        """Why no graph is used any more."""

    @property
    def recorded(self) -> list[int]:
        """Numbers of sequences that there are recordings for."""
        return sorted({size for (size, _), graph in self._graphs.items() if graph.recording is not None})

    def __call__(self, batch: StepBatch) -> Tensor:
        """The logits [R, vocab] of `batch`, to be read before the next call."""
        if self.disabled is not None or not self._fits(batch):
            return self._compute(batch)
        if not self._shapes:
            logits = self._compute(batch)
            self._learn(batch)
            return logits
        try:
            padded = self._padded(batch)
        except Exception as error:  # a driver's or a library's: whatever it is, steps can be computed without graphs
            self._disable(f"{type(error).__name__}: {error}")
            padded = None
        return self._compute(batch) if padded is None else padded[: batch.num_sequences]

    def _fits(self, batch: StepBatch) -> bool:
        return (
            batch.num_tokens == batch.num_sequences == batch.logit_rows.shape[0]
            and batch.num_sequences <= self._sizes[-1]
            and batch.block_tables.shape[1] <= self._max_blocks
        )

    def _learn(self, batch: StepBatch) -> None:
        if isinstance(batch.attention_plan, TiledPlan):
            self._shapes = tuple(batch.attention_plan.tilings)
        else:
            self._disable("the attention that runs cannot be replayed")

    def _disable(self, reason: str) -> None:
        _log.warning("steps are not replayed from CUDA graphs: %s", reason)
        self.disabled = reason
        self._graphs.clear()
        self._inputs = None

    def _padded(self, batch: StepBatch) -> Tensor | None:
        """The logits of `batch` and of padding after it; None when there is no room for its tiles.

        Raises `WrongReplay`, and whatever recording raises.
        """
        size = self._sizes[bisect_left(self._sizes, batch.num_sequences)]
        device = batch.slots.device
        if self._inputs is None:
            self._inputs = _Inputs(self._sizes[-1], self._max_blocks, device)
        # Padding repeats the shortest sequence: it stores once more what that one stores, and nothing else.
        order = np.full(size, int(np.argmin(batch.contexts)))
        order[: batch.num_sequences] = np.arange(batch.num_sequences)
        tables, contexts, ones = batch.tables[order], np.array(batch.contexts)[order], np.ones(size, np.int64)
        tilings = {shape: tile(tables, ones, contexts, shape) for shape in self._shapes}
        wide = any(len(tiling.wide) for tiling in tilings.values())
        if (size, wide) not in self._graphs:
            rooms = {shape: TilingRoom(capacity(size, shape, wide=wide), device) for shape in self._shapes}
            self._graphs[size, wide] = _Graph(rooms)
        graph = self._graphs[size, wide]
        if not all(graph.rooms[shape].load(tiling) for shape, tiling in tilings.items()):
            return None
        self._inputs.load(batch, order)
        return self._run(graph, self._inputs, size)

    def _run(self, graph: _Graph, inputs: _Inputs, size: int) -> Tensor:
        if not graph.warm:
            # Kernels are compiled and loaded when they first run, which must not be while they are recorded.
            logits = self._compute(inputs.step(size, graph.rooms))
            graph.warm = True
            return logits
        if graph.recording is None:
            static = inputs.step(size, graph.rooms)
            graph.recording = self._record(lambda: self._compute(static))
        graph.recording.replay()
        if graph.proofs < _PROOFS:
            _require_like(graph.recording.output, self._compute(inputs.step(size, graph.rooms)))
            graph.proofs += 1
        return graph.recording.output


class _Inputs:
    """Where graphs read what a step is."""

    def __init__(self, sequences: int, max_blocks: int, device: torch.device) -> None:
        self._token_ids, self._positions, self._slots = torch.zeros(3, sequences, dtype=torch.int64, device=device)
        self._contexts = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._tables = torch.zeros(sequences, max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(sequences, device=device)
        self._starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)

    def load(self, batch: StepBatch, order: np.ndarray) -> None:
        """The sequences of `batch` in `order`."""
        index = torch.from_numpy(order).to(self._slots.device, non_blocking=True)
        size, width = len(order), batch.block_tables.shape[1]
        self._token_ids[:size] = batch.token_ids[index]
        self._positions[:size] = batch.positions[index]
        self._slots[:size] = batch.slots[index]
        self._contexts[:size] = batch.context_lens[index]
        self._tables[:size, :width] = batch.block_tables[index]

    def step(self, size: int, rooms: dict[TileShape, TilingRoom]) -> StepBatch:
        """The first `size` sequences that were loaded.

        In new objects each time: what somebody keeps of a step, and knows again by its tensors, is not this one's. The
        host's numbers are not the step's; attention, which alone would need them, has its plan.
        """
        batch = StepBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            block_tables=self._tables[:size],
            logit_rows=self._rows[:size],
            query_lens=[1] * size,
            contexts=[1] * size,
            tables=np.zeros((size, 1), np.int32),
        )
        plan = TiledPlan(batch, next(iter(rooms)).block_size)
        plan.tilings.update({shape: room.tiling for shape, room in rooms.items()})
        batch.attention_plan = plan
        return batch


def _require_like(ours: Tensor, expected: Tensor) -> None:
    """But for NaN and infinities, which a request may have of its own."""
    ours, expected = (torch.nan_to_num(each.float(), 0.0, 0.0, 0.0) for each in (ours, expected))
    error = float((ours - expected).norm() / expected.norm().clamp_min(1e-30))
    if not error <= _TOLERANCE:
        raise WrongReplay(f"a replayed step differs by {error:.2g} (relative norm) from the same step computed anew")
