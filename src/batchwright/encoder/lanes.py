"""Computation of sequences of tokens in rows, in one of the layouts, on all cores."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from batchwright.encoder import layouts
from batchwright.encoder.layouts import Cells, Layout
from batchwright.padding.rectangle import Ids

Vectors: TypeAlias = npt.NDArray[np.float32]

_ROOM = {"cpu": 1024, "cuda": 16384}
"""Tokens of a row: few enough to keep its results in the cache of a CPU core, or enough to fill a GPU."""
_LEAST_ROOM = 256
"""Fewest tokens that are worth their own lane; fewer are computed by all threads together."""
_SLACK = 1.05
"""Ratio of rows to equal shares, so that the last texts find room in them."""


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """Counts of what an `Encoder` or a `Classifier` has computed so far."""

    texts: int = 0
    tokens: int = 0
    cells: int = 0
    """Computed tokens, padding included."""
    truncated: int = 0
    """Texts cut to the longest that the model takes; 0 without `truncate`."""


class Lanes:
    """Threads, each of which computes a row of sequences by itself. Thread-safe.

    `compute` returns the vectors [sequences, width] of the sequences in its cells, and is called from any thread.
    """

    def __init__(
        self,
        compute: Callable[[Cells], Vectors],
        width: int,
        layout: Layout,
        pad_token_id: int,
        device_type: str,
        *,
        alone: bool,
    ) -> None:
        """`alone`: whether only one thread computes at a time, using all cores by itself."""
        self._compute = compute
        self._width = width
        self._layout = layout
        self._pad_token_id = pad_token_id
        self._room = _ROOM[device_type]
        self._num_lanes = torch.get_num_threads() if device_type == "cpu" and not alone else 1
        self._lanes = _open_lanes(self._num_lanes)
        self._counting = threading.Lock()
        self.stats = EncoderStats()
        """Counts since the lanes were opened."""

    def one_batch(self, sequences: list[Ids], types: Sequence[Ids] | None = None) -> Vectors:
        """Compute the vectors of sequences, as one batch in the layout -> [len(sequences), width].

        `types` are the token types of each sequence; None: all tokens have the first.
        """
        return self._computed(sequences, types, self._one_batch(sequences))

    def many_batches(self, sequences: list[Ids], types: Sequence[Ids] | None = None) -> Vectors:
        """Compute as `one_batch` does, in the number of batches that is fastest."""
        return self._computed(sequences, types, self._many_batches(sequences))

    def _one_batch(self, sequences: list[Ids]) -> list[Cells]:
        if not sequences:
            return []
        if self._layout == "packed":
            return layouts.packed(sequences, self._row_room(sequences))
        rectangles = layouts.padded if self._layout == "padded" else layouts.bucketed
        return rectangles(sequences, self._pad_token_id)

    def _many_batches(self, sequences: list[Ids]) -> list[Cells]:
        if self._layout == "packed":
            return self._one_batch(sequences)
        most = self._room if self._lanes is None else max(_LEAST_ROOM, self._row_room(sequences))
        return [
            replace(cells, indices=[members[index] for index in cells.indices])
            for members in layouts.batches(sequences, most)
            for cells in self._one_batch([sequences[index] for index in members])
        ]

    def _row_room(self, sequences: list[Ids]) -> int:
        """Return the most tokens of a row, so that all lanes get equal work."""
        if self._lanes is None:
            return self._room
        share = sum(map(len, sequences)) / self._num_lanes * _SLACK
        return max(_LEAST_ROOM, min(self._room, int(share) + 1))

    def _computed(self, sequences: list[Ids], types: Sequence[Ids] | None, batch: list[Cells]) -> Vectors:
        vectors = np.empty((len(sequences), self._width), np.float32)

        def compute(cells: Cells) -> None:
            vectors[cells.indices] = self._compute(cells if types is None else layouts.typed(cells, types))

        if self._lanes is None or len(batch) == 1:
            for cells in batch:
                compute(cells)
        else:
            list(self._lanes.map(compute, batch))
        with self._counting:
            stats = self.stats
            self.stats = replace(
                stats,
                texts=stats.texts + len(sequences),
                tokens=stats.tokens + sum(map(len, sequences)),
                cells=stats.cells + sum(len(cells.ids) for cells in batch),
            )
        return vectors


def _open_lanes(count: int) -> ThreadPoolExecutor | None:
    """Return `count` threads, each of which computes a batch alone; None if OpenMP cannot be set up for it.

    Threads that share one batch wait for each other after every product; threads with their own batches never do, and
    each finds the rows that it has just written in the cache of its own core.
    """
    if count == 1 or _set_openmp_threads() is None:
        return None
    return ThreadPoolExecutor(count, thread_name_prefix="batchwright-lane", initializer=_work_alone)


def _work_alone() -> None:
    torch.get_num_threads()  # torch sets the number of a new thread when first asked, which would undo ours
    set_threads = _set_openmp_threads()
    if set_threads is not None:
        set_threads(1)  # for this thread only: OpenMP keeps the number by thread


def _set_openmp_threads() -> Callable[[int], object] | None:
    """Return `omp_set_num_threads` of torch's OpenMP; torch's own function would change all future threads."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):  # not found; no such library; Windows
        return None
    return found
