"""Layouts of the sequences of a batch in the rows that an encoder computes: padded, bucketed or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from batchwright.padding import BucketedPadding, PackedSequences, PaddingConfig, PaddingOptimizer, fit_boundaries
from batchwright.padding.rectangle import Ids, Mask, Tokens

Layout: TypeAlias = Literal["packed", "padded", "bucketed"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
MOST_BUCKETS = 8
_BUCKET_SIZE = 8
"""Least average number of sequences in a bucket: each bucket is a separate pass through the weights."""

Counts: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Cells:
    """Sequences computed in one pass, in one flat row of cells, with or without padding between them."""

    ids: Ids
    """Token ids: [cells]."""
    positions: Ids
    """Positions in each sequence from 0 on, continued in its padding: [cells]."""
    starts: Counts
    """First cell of each sequence: [sequences]."""
    lengths: Counts
    """Tokens of each sequence: [sequences]."""
    indices: list[int]
    """Indices of the sequences among those of the batch."""
    width: int | None
    """Cells of every sequence, padding included; None if there is no padding."""
    types: Ids | None = None
    """Token types: [cells]. None: all tokens have the first."""


def packed(sequences: Sequence[Tokens], room: int) -> list[Cells]:
    """Pack sequences end to end, in rows of at most `room` tokens, or of the longest sequence if that is more.

    Sequences of equal length are adjacent in each row.
    """
    order = by_length(sequences)
    longest = max((len(sequence) for sequence in sequences), default=1)
    batch = PackedSequences(max(room, longest)).pack_all([sequences[index] for index in order])
    return [
        Cells(
            ids=row.ids,
            positions=row.position_ids,
            starts=row.cu_seqlens[:-1],
            lengths=np.diff(row.cu_seqlens),
            indices=[order[index] for index in row.indices],
            width=None,
        )
        for row in batch.rows
    ]


def padded(sequences: Sequence[Tokens], pad_token_id: int) -> list[Cells]:
    """Pad all sequences to the longest: one rectangle."""
    longest = max(len(sequence) for sequence in sequences)
    optimizer = PaddingOptimizer(PaddingConfig(pad_token_id=pad_token_id, max_length=longest))
    return [_rectangle(*optimizer.pad_batch(sequences), list(range(len(sequences))))]


def bucketed(sequences: Sequence[Tokens], pad_token_id: int) -> list[Cells]:
    """Pad buckets of similar lengths, at most `MOST_BUCKETS`, with boundaries fitted to these sequences."""
    buckets = min(MOST_BUCKETS, -(-len(sequences) // _BUCKET_SIZE))
    boundaries = fit_boundaries([len(sequence) for sequence in sequences], buckets)
    padding = BucketedPadding(boundaries, pad_token_id)
    return [_rectangle(*padding.pad_bucket(bucket), bucket.indices) for bucket in padding.buckets(sequences)]


def batches(sequences: Sequence[Tokens], most_cells: int) -> list[list[int]]:
    """Return indices in batches of similar lengths, longest first, of at most `most_cells` cells if more than one."""
    found: list[list[int]] = []
    width = 0
    for index in by_length(sequences):
        if not found or (len(found[-1]) + 1) * width > most_cells:
            found.append([])
            width = len(sequences[index])
        found[-1].append(index)
    return found


def typed(cells: Cells, types: Sequence[Ids]) -> Cells:
    """Return `cells` with the token types of its sequences; `types` has those of the whole batch."""
    flat = np.zeros(len(cells.ids), np.int64)
    for index, start, length in zip(cells.indices, cells.starts, cells.lengths, strict=True):
        flat[start : start + length] = types[index]
    return replace(cells, types=flat)


def by_length(sequences: Sequence[Tokens]) -> list[int]:
    """Return the indices of sequences by descending length, equal ones in their order."""
    return sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))


def _rectangle(ids: Ids, mask: Mask, indices: list[int]) -> Cells:
    rows, width = ids.shape
    return Cells(
        ids=ids.reshape(-1),
        positions=np.tile(np.arange(width, dtype=np.int64), rows),
        starts=np.arange(rows, dtype=np.int32) * np.int32(width),
        lengths=mask.sum(1).astype(np.int32),
        indices=indices,
        width=width,
    )
