"""Padding, buckets and packing: shapes, contents, round trips, and optimality against brute force."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.padding import BucketedPadding, PackedSequences, PaddingConfig, PaddingOptimizer, fit_boundaries

SEQUENCES = st.lists(st.lists(st.integers(0, 50_000), max_size=12), max_size=10)


@given(SEQUENCES, st.sampled_from(["left", "right"]), st.integers(0, 9))
def test_padding_keeps_every_token_on_its_side(sequences: list[list[int]], side: str, pad: int) -> None:
    config = PaddingConfig(pad_token_id=pad, padding_side="left" if side == "left" else "right")
    ids, mask = PaddingOptimizer(config).pad_batch(sequences)
    width = max((len(s) for s in sequences), default=0)
    assert ids.shape == mask.shape == (len(sequences), width)
    assert ids.dtype.kind == mask.dtype.kind == "i"
    for row, bits, sequence in zip(ids.tolist(), mask.tolist(), sequences, strict=True):
        padding = [pad] * (width - len(sequence))
        assert row == (padding + sequence if side == "left" else sequence + padding)
        ones, zeros = [1] * len(sequence), [0] * len(padding)
        assert bits == (zeros + ones if side == "left" else ones + zeros)


def test_an_empty_sequence_padded_on_the_left_is_all_padding() -> None:
    ids, mask = PaddingOptimizer(PaddingConfig(pad_token_id=7, padding_side="left")).pad_batch([[], [1, 2]])
    assert ids.tolist() == [[7, 7], [1, 2]]
    assert mask.tolist() == [[0, 0], [1, 1]]


def test_too_long_is_refused_with_its_position() -> None:
    with pytest.raises(ValueError, match=r"sequences 1 .*max_length=2"):
        PaddingOptimizer().pad_batch([[1], [1, 2, 3]], max_length=2)
    with pytest.raises(ValueError, match="max_length=4"):
        PaddingOptimizer(PaddingConfig(max_length=4)).pad_batch([[0] * 5])


def test_the_config_bounds_what_a_call_may_ask_for() -> None:
    padding = PaddingOptimizer(PaddingConfig(max_length=3))
    with pytest.raises(ValueError, match=r"max_length=5: PaddingConfig\(max_length=3\)"):
        padding.pad_batch([[1]], max_length=5)
    assert padding.pad_batch([[1]], max_length=3)[0].tolist() == [[1, 0, 0]]
    assert padding.pad_batch([[]], max_length=0)[0].shape == (1, 0)


def _any(value: object) -> Any:
    return value


def _given(value: object) -> Any:
    """None says there that nothing is given, and is fine."""
    return "x" if value is None else value


@pytest.mark.parametrize("value", ["8", None, float("nan"), float("inf"), True, 1.5, -1])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda value: PaddingConfig(max_length=value), "max_length"),
        (lambda value: PaddingConfig(pad_token_id=value), "pad_token_id"),
        (PackedSequences, "max_length"),
        (lambda value: PackedSequences(8, separator_id=_given(value)), "separator_id"),
        (lambda value: BucketedPadding([4, value]), r"bucket_boundaries\[1\]"),
        (lambda value: BucketedPadding([4], pad_token_id=value), "pad_token_id"),
        (lambda value: BucketedPadding.fit([1, 2], value), "num_buckets"),
        (lambda value: BucketedPadding.fit([value], 1), "lengths"),
        (lambda value: BucketedPadding().get_bucket(value), "length"),
        (lambda value: PaddingOptimizer().pad_batch([[1]], _given(value)), "max_length"),
    ],
)
def test_what_is_no_whole_number_is_refused_by_name(make: Callable[[Any], object], name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        make(value)


def test_whole_numbers_of_numpy_are_taken() -> None:
    assert BucketedPadding(_any(np.array([4, 8]))).boundaries == (4, 8)
    assert PaddingOptimizer(PaddingConfig(max_length=_any(np.int64(3)))).pad_batch([[1, 2, 3]])[0].shape == (1, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PackedSequences(8).unpack(_any(PackedSequences(8).pack([[1, 2]]))),
            "packed of type tuple.*packed, positions =",
        ),
        (lambda: BucketedPadding([4]).pad_bucket(_any([[1], [2]])), "bucket of type list.*`buckets` returns"),
        (lambda: PaddingOptimizer(_any({"max_length": 3})), "config of type dict: must be a PaddingConfig"),
        (lambda: BucketedPadding(_any(8)), "bucket_boundaries=8: must be a list"),
    ],
)
def test_what_is_of_another_type_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_floats_and_nested_rows_are_refused() -> None:
    for bad in ([[1.5, 2.0]], [np.ones((2, 2), np.int64)]):
        with pytest.raises(ValueError, match="sequence 0"):
            PaddingOptimizer().pad_batch(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("lengths", "expected"), [([], 1.0), ([0, 0], 1.0), ([4], 1.0), ([2, 4], 0.75), ([0, 4], 0.5)])
def test_efficiency(lengths: list[int], expected: float) -> None:
    assert PaddingOptimizer().compute_padding_efficiency([[1] * n for n in lengths]) == expected


@given(SEQUENCES, st.lists(st.integers(1, 10), min_size=1, max_size=4, unique=True).map(sorted))
def test_buckets_hold_everything_and_cut_nothing(sequences: list[list[int]], boundaries: list[int]) -> None:
    padding = BucketedPadding(boundaries)
    buckets = padding.buckets(sequences)
    assert sorted(i for bucket in buckets for i in bucket.indices) == list(range(len(sequences)))
    for bucket in buckets:
        ids, mask = padding.pad_bucket(bucket)
        for index, row, bits in zip(bucket.indices, ids, mask, strict=True):
            assert row[bits == 1].tolist() == sequences[index]
        if bucket.boundary is not None:
            assert ids.shape[1] == bucket.boundary
            assert all(padding.get_bucket(len(s)) == bucket.boundary for s in bucket.sequences)
        else:
            assert all(len(s) > boundaries[-1] for s in bucket.sequences)


def padded_cells(lengths: list[int], boundaries: tuple[int, ...]) -> int:
    return sum(min(b for b in boundaries if b >= length) for length in lengths if length)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=14).filter(any), st.integers(1, 5))
def test_boundaries_are_optimal(lengths: list[int], count: int) -> None:
    found = fit_boundaries(lengths, count)
    assert len(found) <= count
    assert found[-1] == max(lengths)
    distinct = sorted({n for n in lengths if n})
    options = (c for k in range(1, count + 1) for c in combinations(distinct, k) if c[-1] == distinct[-1])
    assert padded_cells(lengths, tuple(found)) == min(padded_cells(lengths, c) for c in options)


def test_boundaries_need_lengths() -> None:
    with pytest.raises(ValueError, match="at least one above 0"):
        fit_boundaries([0, 0], 2)
    with pytest.raises(ValueError, match="num_buckets=0"):
        fit_boundaries([1], 0)
    with pytest.raises(ValueError, match="bucket_boundaries"):
        BucketedPadding([4, 4])


@given(SEQUENCES, st.sampled_from([None, 3]))
def test_packing_all_round_trips(sequences: list[list[int]], separator: int | None) -> None:
    packer = PackedSequences(max_length=13, separator_id=separator)
    packed = packer.pack_all(sequences)
    assert [row.tolist() for row in packer.unpack(packed)] == sequences
    for row in packed.rows:
        assert len(row.ids) <= 13
        assert row.ids.dtype == np.int64
        assert row.cu_seqlens.tolist()[0] == 0
        assert row.cu_seqlens.tolist()[-1] == len(row.ids)
        bounds = row.cu_seqlens.tolist()
        for start, end in pairwise(bounds):
            assert row.position_ids[start:end].tolist() == list(range(end - start))
    assert sorted(i for row in packed.rows for i in row.indices) == list(range(len(sequences)))


@given(SEQUENCES, st.integers(1, 20))
def test_one_row_returns_what_did_not_fit(sequences: list[list[int]], room: int) -> None:
    packer = PackedSequences(max_length=room)
    row, left = packer.pack_row(sequences)
    assert sorted(row.indices + left) == list(range(len(sequences)))
    assert [part.tolist() for part in packer.unpack(row)] == [sequences[i] for i in row.indices]
    assert len(row.ids) <= room
    free = room - len(row.ids)
    assert all(len(sequences[index]) > free for index in left)


def test_a_sequence_that_no_row_holds_is_refused_with_its_position() -> None:
    with pytest.raises(ValueError, match="sequence 1 takes 5 tokens"):
        PackedSequences(max_length=4).pack_all([[1], [1] * 5])


def test_best_fit_decreasing_fills_rows() -> None:
    packed = PackedSequences(max_length=10).pack_all([[0] * n for n in (6, 4, 5, 5, 7, 3)])
    assert len(packed.rows) == 3
    assert packed.efficiency == 1.0


def test_buckets_by_width_and_arrays_of_bare_sequences() -> None:
    padding = BucketedPadding([4, 8], pad_token_id=9)
    found = padding.bucket_sequences([[1, 2], [1] * 6, [3], [5] * 11, [5] * 10])
    assert found == {4: [[1, 2], [3]], 8: [[1] * 6], 11: [[5] * 11, [5] * 10]}
    assert {width: padding.pad_bucket(sequences, width).shape for width, sequences in found.items()} == {
        4: (2, 4), 8: (1, 8), 11: (2, 11),
    }  # fmt: skip
    assert padding.pad_bucket(found[4], 4).tolist() == [[1, 2, 9, 9], [3, 9, 9, 9]]
    with pytest.raises(ValueError, match="longer than max_length=4"):
        padding.pad_bucket([[1] * 5], 4)


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6), st.sampled_from([None, -1, 99]))
def test_positions_find_the_sequences_in_a_packed_row(sequences: list[list[int]], separator: int | None) -> None:
    packer = PackedSequences(64)
    packed, positions = packer.pack(sequences, separator_token=separator)
    assert len(packed) == sum(map(len, sequences)) + (len(sequences) if separator == 99 else 0)
    assert packer.unpack(packed, positions) == sequences
    assert packer.unpack(np.array(packed, dtype=np.int64), positions) == sequences
    assert [end - start for start, end in positions] == [len(sequence) for sequence in sequences]
    # What a model gave for each token.
    assert packer.unpack([str(token) for token in packed], positions) == [list(map(str, each)) for each in sequences]


def test_a_row_that_is_too_short_for_all_is_refused_and_nothing_is_dropped() -> None:
    packer = PackedSequences(4, separator_id=0)
    assert packer.pack([[1], [2]]) == ([1, 0, 2, 0], [(0, 1), (2, 3)])
    assert packer.pack([[1], [2]], -1) == ([1, 2], [(0, 1), (1, 2)])
    with pytest.raises(ValueError, match="sequences 0 to 1 take 5 tokens, a row holds max_length=4: use pack_all"):
        packer.pack([[1], [2, 3], [4]])
    with pytest.raises(ValueError, match=r"positions\[0\]=\(1, 9\)"):
        packer.unpack([1, 2], [(1, 9)])
