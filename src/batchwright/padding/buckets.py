"""Buckets of similar lengths: sequences are padded to the boundary of their bucket, so few shapes occur."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import overload

import numpy as np

from batchwright.padding.rectangle import Ids, Mask, PaddingConfig, PaddingOptimizer, Tokens
from batchwright.policies.checks import check_size

DEFAULT_BOUNDARIES = (32, 64, 128, 256, 512, 1024, 2048)


@dataclass(slots=True)
class Bucket:
    """Sequences whose lengths share a boundary. `boundary` is None for those longer than every boundary."""

    boundary: int | None
    indices: list[int] = field(default_factory=list)
    """Positions of the sequences in the input."""
    sequences: list[Tokens] = field(default_factory=list)


class BucketedPadding:
    """Sorts sequences into buckets and pads each to its boundary.

    A sequence longer than the last boundary goes into an overflow bucket that is padded to its longest sequence:
    nothing is cut. `buckets` keeps the positions of the sequences in the input; `bucket_sequences` does not. Raises
    ValueError for boundaries that are not positive and ascending, for no boundaries, and for a `pad_token_id` that is
    not an integer of at least 0.
    """

    def __init__(self, bucket_boundaries: Sequence[int] | None = None, pad_token_id: int = 0) -> None:
        given = DEFAULT_BOUNDARIES if bucket_boundaries is None else bucket_boundaries
        if not isinstance(given, (Sequence, np.ndarray)):
            raise TypeError(f"bucket_boundaries={given!r}: must be a list of whole numbers")
        for position, boundary in enumerate(given):
            check_size(f"bucket_boundaries[{position}]", boundary)
        boundaries = [int(boundary) for boundary in given]
        if not boundaries or not all(low < high for low, high in pairwise(boundaries)):
            raise ValueError(f"bucket_boundaries={boundaries}: give at least one, and each above the one before it")
        check_size("pad_token_id", pad_token_id, least=0)
        self.boundaries: Sequence[int] = tuple(boundaries)
        """Boundaries, ascending."""
        self.pad_token_id = pad_token_id

    @classmethod
    def fit(cls, lengths: Sequence[int], num_buckets: int, pad_token_id: int = 0) -> BucketedPadding:
        """Return buckets whose boundaries pad a sample of `lengths` least. Raises as `fit_boundaries` does."""
        return cls(fit_boundaries(lengths, num_buckets), pad_token_id)

    def get_bucket(self, length: int) -> int | None:
        """Return the boundary to which a sequence of `length` tokens is padded; None if it is longer than all of them.

        Raises ValueError for a `length` that is not an integer of at least 0.
        """
        check_size("length", length, least=0)
        index = bisect_left(self.boundaries, length)
        return self.boundaries[index] if index < len(self.boundaries) else None

    def buckets(self, sequences: Sequence[Tokens]) -> list[Bucket]:
        """Return the non-empty buckets by boundary, overflow last; each keeps the order of the input."""
        buckets: dict[int | None, Bucket] = {}
        for index, sequence in enumerate(sequences):
            boundary = self.get_bucket(len(sequence))
            bucket = buckets.setdefault(boundary, Bucket(boundary))
            bucket.indices.append(index)
            bucket.sequences.append(sequence)
        overflow = self.boundaries[-1] + 1
        return sorted(buckets.values(), key=lambda bucket: overflow if bucket.boundary is None else bucket.boundary)

    def bucket_sequences(self, sequences: Sequence[Tokens]) -> dict[int, list[Tokens]]:
        """Return the sequences by the width to which they are padded: a boundary, or the longest of the overflow."""
        return {_width(bucket): bucket.sequences for bucket in self.buckets(sequences)}

    @overload
    def pad_bucket(self, bucket: Bucket) -> tuple[Ids, Mask]: ...

    @overload
    def pad_bucket(self, bucket: Sequence[Tokens], bucket_size: int) -> Ids: ...

    def pad_bucket(self, bucket: Bucket | Sequence[Tokens], bucket_size: int | None = None) -> tuple[Ids, Mask] | Ids:
        """Return a bucket of `buckets` as `(ids, mask)`, as `PaddingOptimizer.pad_batch` does.

        Sequences, given with their width from `bucket_sequences`, are returned as ids only. Raises ValueError for a
        sequence that is longer, and TypeError for anything else.
        """
        if isinstance(bucket, Bucket):
            if bucket_size is not None:
                raise TypeError(f"bucket_size={bucket_size}: a Bucket has its own; leave it out")
            return self._padded(bucket.sequences, _width(bucket))
        if bucket_size is None:
            raise TypeError(
                f"bucket of type {type(bucket).__name__}: must be a Bucket, of those that `buckets` returns, or "
                "sequences with the bucket_size that `bucket_sequences` gives them"
            )
        check_size("bucket_size", bucket_size, least=0)
        return self._padded(bucket, bucket_size)[0]

    def _padded(self, sequences: Sequence[Tokens], width: int) -> tuple[Ids, Mask]:
        config = PaddingConfig(pad_token_id=self.pad_token_id, max_length=max(width, 1))
        return PaddingOptimizer(config).pad_batch(sequences, width)


def _width(bucket: Bucket) -> int:
    """Return the width to which the sequences of a bucket are padded."""
    if bucket.boundary is not None:
        return bucket.boundary
    return max((len(sequence) for sequence in bucket.sequences), default=0)


def fit_boundaries(lengths: Sequence[int], num_buckets: int) -> list[int]:
    """Return at most `num_buckets` boundaries with the least total padding for a sample of `lengths`.

    Exact, by dynamic programming over the distinct lengths: the best k buckets for the shortest j lengths end in one
    bucket (i, j], padded to its longest, after the best k - 1 buckets for the shortest i. O(k · m²) for m distinct
    lengths, vectorized over i. Empty sequences cost nothing wherever they are. Raises ValueError if there are no
    lengths above 0 or no buckets, or a number that is not an integer.
    """
    check_size("num_buckets", num_buckets)
    values, counts = _distinct(lengths)
    distinct = len(values)
    below = np.concatenate(([0], np.cumsum(counts))).astype(np.float64)
    # cells[j]: least padded cells of the j shortest distinct lengths with the buckets so far.
    cells = np.full(distinct + 1, np.inf)
    cells[0] = 0.0
    cuts: list[np.ndarray] = []
    for _ in range(min(num_buckets, distinct)):
        better, cut = np.empty(distinct + 1), np.zeros(distinct + 1, np.int64)
        better[0] = 0.0
        for j in range(1, distinct + 1):
            costs = cells[:j] + values[j - 1] * (below[j] - below[:j])
            cut[j] = int(np.argmin(costs))
            better[j] = costs[cut[j]]
        cells = better
        cuts.append(cut)
    boundaries, j = [], distinct
    for cut in reversed(cuts):
        if j == 0:
            break
        boundaries.append(int(values[j - 1]))
        j = int(cut[j])
    return sorted(boundaries)


def _distinct(lengths: Sequence[int]) -> tuple[Ids, Ids]:
    """Return the distinct lengths above 0, ascending, and how many there are of each."""
    sample = np.asarray(lengths)
    if sample.ndim != 1 or (sample.size and sample.dtype.kind not in "iu"):
        raise ValueError(f"lengths: must be a row of whole numbers, not {sample.dtype} with {sample.ndim} axes")
    if sample.size and sample.min() < 0:
        raise ValueError(f"lengths: {sample.min()} is negative")
    values, counts = np.unique(sample[sample > 0], return_counts=True)
    if not values.size:
        raise ValueError("lengths: give at least one above 0")
    return values.astype(np.int64), counts
