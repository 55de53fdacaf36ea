"""Rows of cells: every sequence once, nothing cut, and attention that keeps them apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright.encoder import layouts
from batchwright.encoder.layouts import Cells
from batchwright.encoder.packed_attention import (
    Attention,
    NativeBidirectionalAttention,
    TorchAttention,
    choose_attention,
    load_bidirectional,
)
from batchwright.engine.native import load_kernels

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=25)


def sequences(lengths: list[int]) -> list[list[int]]:
    return [[1000 * (at + 1) + k for k in range(length)] for at, length in enumerate(lengths)]


def contents(rows: list[Cells]) -> dict[int, list[int]]:
    found = {}
    for cells in rows:
        for index, start, length in zip(cells.indices, cells.starts.tolist(), cells.lengths.tolist(), strict=True):
            assert index not in found
            found[index] = cells.ids[start : start + length].tolist()
            assert cells.positions[start : start + length].tolist() == list(range(length))
    return found


@given(LENGTHS, st.integers(1, 100))
def test_each_layout_holds_every_sequence_once(lengths: list[int], room: int) -> None:
    given_ = sequences(lengths)
    expected = dict(enumerate(given_))
    packed = layouts.packed(given_, room)
    assert contents(packed) == expected
    assert sum(len(cells.ids) for cells in packed) == sum(lengths)
    assert max(len(cells.ids) for cells in packed) <= max(room, max(lengths))
    (rectangle,) = layouts.padded(given_, 7)
    assert contents([rectangle]) == expected
    assert len(rectangle.ids) == max(lengths) * len(lengths)
    buckets = layouts.bucketed(given_, 7)
    assert contents(buckets) == expected
    assert sum(len(cells.ids) for cells in buckets) <= len(rectangle.ids)


@given(LENGTHS, st.integers(1, 100))
def test_batches_of_like_length_stay_below_their_limit(lengths: list[int], most: int) -> None:
    given_ = sequences(lengths)
    found = layouts.batches(given_, most)
    assert sorted(index for members in found for index in members) == list(range(len(lengths)))
    for members in found:
        longest = max(lengths[index] for index in members)
        assert longest * len(members) <= most or len(members) == 1
    order = [lengths[index] for members in found for index in members]
    assert order == sorted(order, reverse=True)


def reference(qkv: torch.Tensor, cells: Cells, heads: int) -> torch.Tensor:
    """Textbook softmax in float64, one sequence and head at a time."""
    width = qkv.shape[1] // 3
    out = torch.zeros(len(qkv), width, dtype=torch.float64)
    for start, length in zip(cells.starts.tolist(), cells.lengths.tolist(), strict=True):
        rows = slice(start, start + length)
        query, key, value = qkv[rows].double().view(length, 3, heads, -1).permute(1, 2, 0, 3)
        weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1)
        out[rows] = (weights @ value).transpose(0, 1).reshape(length, width)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 32), (2, 64), (2, 16), (1, 80), (1, 48)])
@pytest.mark.parametrize("packed", [True, False])
def test_attention_keeps_sequences_apart(dtype: torch.dtype, heads: int, head_dim: int, packed: bool) -> None:
    given_ = sequences([1, 2, 3, 15, 16, 17, 31, 33, 40, 40, 40, 70])
    (cells,) = layouts.packed(given_, 1000) if packed else layouts.padded(given_, 0)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(len(cells.ids), 3 * heads * head_dim, generator=generator).to(dtype)
    expected = reference(qkv, cells, heads)
    for way in (TorchAttention(heads), *_native(heads, head_dim, dtype)):
        got = way.attend(qkv, torch.from_numpy(cells.starts), torch.from_numpy(cells.lengths))
        tolerance = 1e-5 if dtype is torch.float32 else 0.03
        assert (got.double() - expected).abs().max() < tolerance, way.name


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 256), (torch.bfloat16, 512)])
def test_heads_for_which_the_kernel_has_no_room_are_left_to_torch(dtype: torch.dtype, most: int) -> None:
    (cells,) = layouts.packed(sequences([5, 20, 3]), 100)
    cpu = torch.device("cpu")
    assert isinstance(choose_attention(1, most + 16, dtype, cpu), TorchAttention)
    qkv = torch.randn(28, 3 * most, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = choose_attention(1, most, dtype, cpu).attend(qkv, *map(torch.from_numpy, (cells.starts, cells.lengths)))
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    assert (got.double() - reference(qkv, cells, 1)).abs().max() < tolerance


@pytest.mark.skipif(isinstance(load_kernels(torch.float32), str), reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_there_is_a_compiler_the_kernel_is_compiled(dtype: torch.dtype) -> None:
    assert not isinstance(load_bidirectional(dtype), str)


def test_a_token_that_is_not_finite_spoils_its_own_sequence_only() -> None:
    (cells,) = layouts.packed(sequences([5, 20, 3]), 100)
    qkv = torch.randn(28, 3 * 32, generator=torch.Generator().manual_seed(0))
    qkv[int(cells.starts[1]) + 1] = float("nan")
    for way in (TorchAttention(1), *_native(1, 32, torch.float32)):
        got = way.attend(qkv, torch.from_numpy(cells.starts), torch.from_numpy(cells.lengths))
        spoilt = slice(int(cells.starts[1]), int(cells.starts[1] + cells.lengths[1]))
        assert bool(got[spoilt].isnan().all())
        rest = np.delete(np.arange(28), np.arange(28)[spoilt])
        assert bool(got[torch.from_numpy(rest)].isfinite().all())


def _native(heads: int, head_dim: int, dtype: torch.dtype) -> list[Attention]:
    kernel = load_bidirectional(dtype)
    return [] if isinstance(kernel, str) else [NativeBidirectionalAttention(heads, head_dim, kernel, dtype)]
