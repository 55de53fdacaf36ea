"""Several sequences in one row, without padding between them; attention keeps them apart by their boundaries."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from batchwright.padding.rectangle import Ids, Tokens, as_ids
from batchwright.policies.checks import check_size

_T = TypeVar("_T")

Positions = npt.NDArray[np.int64]
Boundaries = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Sequences end to end in one row."""

    ids: Ids
    """Token ids [tokens, separators included]."""
    position_ids: Positions
    """Positions [tokens], counted from 0 in each sequence; a separator continues the sequence before it."""
    cu_seqlens: Boundaries
    """Where each sequence begins [sequences + 1], separators included; the last is the length of the row."""
    indices: list[int]
    """Positions of the sequences in the input."""
    separated: bool
    """Whether each sequence is followed by a separator token."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """All sequences, in as many rows as needed."""

    rows: list[PackedRow]
    max_length: int

    @property
    def efficiency(self) -> float:
        """Filled share of the rows, each `max_length` long; 1 without rows."""
        cells = len(self.rows) * self.max_length
        return sum(len(row.ids) for row in self.rows) / cells if cells else 1.0


class PackedSequences:
    """Packs sequences into rows of at most `max_length` tokens.

    With a `separator_id`, that token follows each sequence and counts towards the length of its row. Raises ValueError
    for a `max_length` that is not an integer of at least 1, and a `separator_id` that is not one of at least 0.
    """

    def __init__(self, max_length: int = 2048, separator_id: int | None = None) -> None:
        check_size("max_length", max_length)
        if separator_id is not None:
            check_size("separator_id", separator_id, least=0)
        self.max_length = max_length
        self.separator_id = separator_id

    def pack(
        self, sequences: Sequence[Tokens], separator_token: int | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return all sequences in one row, and where each begins and ends in it, excluding separators.

        `separator_token` follows each sequence; None stands for the `separator_id` of this packer, and a negative one
        for no separator. Raises ValueError if one row cannot hold them all: `pack_all` uses several rows, and
        `pack_row` takes what fits.
        """
        separator = self.separator_id if separator_token is None else separator_token
        check_size("separator_token", -1 if separator is None else separator, least=-(2**63))
        after = [] if separator is None or separator < 0 else [separator]
        packed: list[int] = []
        positions = []
        for index, row in enumerate(self._rows(sequences)):
            start = len(packed)
            packed += row.tolist()
            positions.append((start, len(packed)))
            packed += after
            if len(packed) > self.max_length:
                raise ValueError(
                    f"sequences 0 to {index} take {len(packed)} tokens, a row holds max_length={self.max_length}: use "
                    "pack_all for several rows, pack_row for those that fit, or raise max_length"
                )
        return packed, positions

    def pack_row(self, sequences: Sequence[Tokens]) -> tuple[PackedRow, list[int]]:
        """Return one row with as many of the leading sequences as fit, and the indices of those that did not.

        A sequence that does not fit is skipped, and later ones that fit are taken. None is dropped or cut: sequences
        longer than a row are among the returned indices.
        """
        rows = self._rows(sequences)
        room, taken, left = self.max_length, [], []
        for index, row in enumerate(rows):
            if self._size(row) <= room:
                room -= self._size(row)
                taken.append(index)
            else:
                left.append(index)
        return self._join(rows, taken), left

    def pack_all(self, sequences: Sequence[Tokens]) -> PackedBatch:
        """Pack all sequences into few rows: best-fit decreasing, at most 11/9 of the fewest possible (+ 4).

        Raises ValueError, with its position, for a sequence that no row can hold.
        """
        rows = self._rows(sequences)
        for index, row in enumerate(rows):
            if self._size(row) > self.max_length:
                raise ValueError(
                    f"sequence {index} takes {self._size(row)} tokens, a row holds max_length={self.max_length}: "
                    "raise max_length, or split it first"
                )
        bins: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # (room left, bin), ascending: the first that is enough fits best
        for index in sorted(range(len(rows)), key=lambda i: -len(rows[i])):
            size = self._size(rows[index])
            at = bisect_left(rooms, (size, -1))
            if at < len(rooms):
                room, where = rooms.pop(at)
            else:
                room, where = self.max_length, len(bins)
                bins.append([])
            bins[where].append(index)
            insort(rooms, (room - size, where))
        return PackedBatch([self._join(rows, sorted(members)) for members in bins], self.max_length)

    @overload
    def unpack(self, packed: PackedRow | PackedBatch) -> list[Ids]: ...

    @overload
    def unpack(
        self, packed: Sequence[_T] | npt.NDArray[Any], positions: Sequence[tuple[int, int]]
    ) -> list[list[_T]]: ...

    def unpack(
        self,
        packed: PackedRow | PackedBatch | Sequence[Any] | npt.NDArray[Any],
        positions: Sequence[tuple[int, int]] | None = None,
    ) -> list[Ids] | list[list[Any]]:
        """Return the sequences, without separators, in the order of their indices: the inverse of packing.

        For a row of `pack`, or a model's output for each of its tokens, with the positions of `pack`: a list for each
        sequence. For one `PackedRow`, the sequences that it holds; for a batch, all. Raises TypeError for anything
        else, and ValueError for positions that are not in the row.
        """
        if positions is not None and not isinstance(packed, (PackedRow, PackedBatch)):
            return _parts(packed, positions)
        if not isinstance(packed, (PackedRow, PackedBatch)):
            raise TypeError(
                f"packed of type {type(packed).__name__}: must be a PackedRow or a PackedBatch, or be given with the "
                "positions of `packed, positions = packer.pack(sequences)`"
            )
        rows = packed.rows if isinstance(packed, PackedBatch) else [packed]
        found: list[tuple[int, Ids]] = []
        for row in rows:
            bounds = row.cu_seqlens.tolist()
            for index, start, end in zip(row.indices, bounds, bounds[1:], strict=False):
                found.append((index, row.ids[start : end - 1 if row.separated else end]))
        return [ids for _, ids in sorted(found, key=lambda item: item[0])]

    def _rows(self, sequences: Sequence[Tokens]) -> list[Ids]:
        return [as_ids(sequence, index) for index, sequence in enumerate(sequences)]

    def _size(self, row: Ids) -> int:
        return len(row) + (self.separator_id is not None)

    def _join(self, rows: list[Ids], indices: list[int]) -> PackedRow:
        parts, positions, bounds = [], [], [0]
        for index in indices:
            part = rows[index]
            if self.separator_id is not None:
                part = np.append(part, np.int64(self.separator_id))
            parts.append(part)
            positions.append(np.arange(len(part), dtype=np.int64))
            bounds.append(bounds[-1] + len(part))
        empty = np.empty(0, np.int64)
        return PackedRow(
            ids=np.concatenate(parts) if parts else empty,
            position_ids=np.concatenate(positions) if positions else empty,
            cu_seqlens=np.asarray(bounds, np.int32),
            indices=indices,
            separated=self.separator_id is not None,
        )


def _parts(row: Sequence[Any] | npt.NDArray[Any], positions: Sequence[tuple[int, int]]) -> list[list[Any]]:
    for number, (start, end) in enumerate(positions):
        if not 0 <= start <= end <= len(row):
            raise ValueError(
                f"positions[{number}]={(start, end)}: must lie within the row, which has {len(row)} entries"
            )
    parts = [row[start:end] for start, end in positions]
    return [part.tolist() if isinstance(part, np.ndarray) else list(part) for part in parts]
