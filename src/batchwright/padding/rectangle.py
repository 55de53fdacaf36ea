"""One batch as one rectangle: every sequence padded to the length of the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from batchwright.policies.checks import check_size

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
"""Token ids of one sequence; may be empty."""
Ids: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PaddingConfig:
    """How to pad. Raises ValueError, naming the field, for an invalid value."""

    pad_token_id: int = 0
    padding_side: Literal["left", "right"] = "right"
    """Side of the padding; decoder-only models that generate from a padded batch need "left"."""
    max_length: int = 2048
    """Most tokens in a row; a longer sequence is refused, never cut."""

    def __post_init__(self) -> None:
        if self.padding_side not in ("left", "right"):
            raise ValueError(f"padding_side={self.padding_side!r}: must be 'left' or 'right'")
        check_size("max_length", self.max_length)
        check_size("pad_token_id", self.pad_token_id, least=0)


class PaddingOptimizer:
    """Pads batches, and reports how much of them is padding. Raises TypeError for a `config` of another type."""

    def __init__(self, config: PaddingConfig | None = None) -> None:
        if config is not None and not isinstance(config, PaddingConfig):
            raise TypeError(f"config of type {type(config).__name__}: must be a PaddingConfig")
        self.config = config or PaddingConfig()

    def pad_batch(self, sequences: Sequence[Tokens], max_length: int | None = None) -> tuple[Ids, Mask]:
        """`(ids, mask)`, both [len(sequences), width] int64; the mask is 1 at tokens and 0 at padding.

        The width is that of the longest sequence, or `max_length` if given, which may not exceed the config's. Raises
        ValueError if it does, and, with the positions of the offenders, if a sequence is longer than `max_length` or
        than the config allows: nothing is cut.
        """
        limit = self._limit(max_length)
        rows = [as_ids(sequence, position) for position, sequence in enumerate(sequences)]
        too_long = [position for position, row in enumerate(rows) if len(row) > limit]
        if too_long:
            longest = max(len(rows[position]) for position in too_long)
            raise ValueError(
                f"sequences {_some(too_long)} are longer than max_length={limit} (the longest has {longest} tokens): "
                "raise max_length, or shorten them first"
            )
        width = max((len(row) for row in rows), default=0) if max_length is None else max_length
        ids = np.full((len(rows), width), self.config.pad_token_id, np.int64)
        mask = np.zeros((len(rows), width), np.int64)
        for position, row in enumerate(rows):
            # An index from the left on both sides: `-len(row):` would be the whole row for an empty sequence.
            start = width - len(row) if self.config.padding_side == "left" else 0
            ids[position, start : start + len(row)] = row
            mask[position, start : start + len(row)] = 1
        return ids, mask

    def _limit(self, max_length: int | None) -> int:
        if max_length is None:
            return self.config.max_length
        check_size("max_length", max_length, least=0)
        if max_length > self.config.max_length:
            raise ValueError(
                f"max_length={max_length}: PaddingConfig(max_length={self.config.max_length}) allows no longer rows; "
                "raise that, or ask for less"
            )
        return max_length

    def compute_padding_efficiency(self, sequences: Sequence[Tokens]) -> float:
        """Return the share of the padded rectangle that is tokens, 0 to 1; 1 for a batch without cells."""
        lengths = [len(sequence) for sequence in sequences]
        return efficiency(lengths)


def efficiency(lengths: Sequence[int]) -> float:
    """Return tokens over cells if sequences of these lengths are padded to the longest."""
    cells = max(lengths, default=0) * len(lengths)
    return sum(lengths) / cells if cells else 1.0


def as_ids(sequence: Tokens, position: int) -> Ids:
    """Return `sequence` as int64. Raises ValueError, naming its position, if it is not a row of integers."""
    row = np.asarray(sequence)
    if row.size == 0 and row.ndim == 1:
        return np.empty(0, np.int64)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise ValueError(f"sequence {position}: must be a row of whole numbers, not {row.dtype} with {row.ndim} axes")
    return row.astype(np.int64)


def _some(positions: Sequence[int]) -> str:
    shown = ", ".join(map(str, positions[:5]))
    return shown if len(positions) <= 5 else f"{shown} and {len(positions) - 5} more"
