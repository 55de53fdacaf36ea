"""How a step's attention is cut: no key is left out, none is read twice, and none is another sequence's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.engine.attention.tiles import (
    BEGIN,
    COUNT,
    END,
    FIRST,
    ORDINAL,
    SEEN,
    TABLE,
    TileShape,
    Tiling,
    capacity,
    shared_spans,
    tile,
)

BLOCK = 16


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Block tables of sequences that branch off each other, in any order."""
    width = draw(st.integers(1, 24))
    rows = [np.arange(width, dtype=np.int32)]
    for _ in range(draw(st.integers(0, 7))):
        parent, at = draw(st.sampled_from(rows)), draw(st.integers(0, width))
        fresh = np.arange(width, dtype=np.int32) + (len(rows) + 1) * 1000
        rows.append(np.concatenate([parent[:at], fresh[at:]]))
    return np.stack(draw(st.permutations(rows)))


@given(tables=tables(), least=st.integers(1, 5), data=st.data())
def test_spans_are_of_like_blocks_and_leave_nothing_out(tables: np.ndarray, least: int, data: st.DataObject) -> None:
    size, width = tables.shape
    limits = np.array(data.draw(st.lists(st.integers(0, width), min_size=size, max_size=size)))
    reached = np.zeros(size, int)
    spans = shared_spans(tables, limits, least)
    for span in spans:
        assert len(span.sequences) > 1
        assert span.end - span.begin >= least
        assert (reached[span.sequences] == span.begin).all()
        assert (limits[span.sequences] >= span.end).all()
        own = tables[span.sequences, span.begin : span.end]
        assert (own == own[0]).all()
        reached[span.sequences] = span.end
    for one in range(size):
        for other in range(one):
            if (at := reached[one]) == reached[other] and min(limits[one], limits[other]) >= at + least:
                assert (tables[one, : at + least] != tables[other, : at + least]).any()


def test_a_common_prefix_and_then_two_branches() -> None:
    common, left, right = [1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]
    rows = [common + left + [90], common + right + [91], common + left + [92], common + right + [93], [4, 5, 6] * 3]
    tables = np.array([row[:8] for row in rows], np.int32)
    spans = shared_spans(tables, np.full(5, 7), 3)
    found = {(tuple(span.sequences.tolist()), span.begin, span.end) for span in spans}
    assert found == {((0, 1, 2, 3), 0, 3), ((0, 2), 3, 7), ((1, 3), 3, 7)}


def test_a_span_has_blocks() -> None:
    with pytest.raises(ValueError, match="least=0"):
        shared_spans(np.zeros((2, 2), np.int32), np.array([2, 2]), 0)


shapes = st.builds(
    lambda kv_heads, narrow, more, processors: TileShape(kv_heads, narrow, narrow + more, BLOCK, processors),
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 40),
)


@given(tables=tables(), shape=shapes, data=st.data())
def test_every_query_has_each_of_its_keys_once(tables: np.ndarray, shape: TileShape, data: st.DataObject) -> None:
    size, width = tables.shape
    most = width * BLOCK
    contexts = np.array(data.draw(st.lists(st.integers(1, most), min_size=size, max_size=size)))
    counts = np.array([data.draw(st.one_of(st.just(1), st.integers(1, int(context)))) for context in contexts])
    tiling = tile(tables, counts, contexts, shape)
    positions = np.concatenate([np.arange(n - count, n) for n, count in zip(contexts, counts, strict=True)])
    owners = np.repeat(np.arange(size), counts)
    read = np.zeros((len(positions), most), int)
    ordinals: list[list[int]] = [[] for _ in positions]
    for kind, most_queries in ((tiling.narrow, shape.narrow), (tiling.wide, shape.wide)):
        for each in kind:
            assert 1 <= each[COUNT] <= most_queries
            assert each[BEGIN] < each[END]
            used = slice(each[BEGIN] // BLOCK, -(-each[END] // BLOCK))
            for row in tiling.rows[each[FIRST] : each[FIRST] + each[COUNT]]:
                assert (tables[each[TABLE], used] == tables[owners[row], used]).all()
                assert each[END] <= contexts[owners[row]]
                assert min(each[SEEN], each[END]) <= positions[row] + 1
                read[row, each[BEGIN] : each[END]] += 1
                ordinals[row].append(int(each[ORDINAL]))
    for row, position in enumerate(positions):
        assert (read[row, : position + 1] == 1).all()
        assert (read[row] <= 1).all()
        assert sorted(ordinals[row]) == list(range(len(ordinals[row])))
    _check_partials(tiling, [len(each) for each in ordinals])


def _check_partials(tiling: Tiling, pieces: list[int]) -> None:
    """Rows of several tiles have a place for each result, the others none."""
    assert np.diff(tiling.partial_starts).tolist() == [count if count > 1 else 0 for count in pieces]
    assert tiling.merged.tolist() == [row for row, count in enumerate(pieces) if count > 1]
    assert tiling.num_partials == sum(count for count in pieces if count > 1)


def test_a_shared_prefix_is_read_once() -> None:
    prefix = np.arange(1000)
    rows = [np.concatenate([prefix, 2000 + 10 * index + np.arange(4)]) for index in range(32)]
    contexts = np.full(32, 1004 * BLOCK)
    shape = TileShape(kv_heads=8, narrow=4, wide=32, block_size=BLOCK, processors=132)
    tiling = tile(np.stack(rows).astype(np.int32), np.ones(32, int), contexts, shape)
    keys = sum(int((kind[:, END] - kind[:, BEGIN]).sum()) for kind in (tiling.narrow, tiling.wide))
    assert keys == 1000 * BLOCK + 32 * 4 * BLOCK
    # The prefix is cut, so that with 8 heads each almost all processors read it.
    assert len(tiling.wide) == 16


def test_a_full_device_does_not_cut_sequences() -> None:
    shape = TileShape(kv_heads=8, narrow=4, wide=32, block_size=BLOCK, processors=132)
    tables = np.arange(256 * 64, dtype=np.int32).reshape(256, 64)
    few = tile(tables[:1], np.ones(1, int), np.full(1, 1000), shape)
    many = tile(tables, np.ones(256, int), np.full(256, 1000), shape)
    assert len(few.narrow) == 8
    assert len(many.narrow) == 256
    assert many.num_partials == 0


def test_sequences_are_cut_for_an_idle_device_or_a_late_end_only() -> None:
    shape = TileShape(kv_heads=8, narrow=4, wide=32, block_size=BLOCK, processors=132)
    tables = np.arange(128 * 512, dtype=np.int32).reshape(128, 512)
    alike = tile(tables, np.ones(128, int), np.full(128, 1000), shape)
    assert (len(alike.narrow), alike.num_partials) == (128, 0)
    few = tile(tables[:8], np.ones(8, int), np.full(8, 1000), shape)
    assert len(few.narrow) == 64
    contexts = np.full(128, 1000)
    contexts[5] = 8000
    late = tile(tables, np.ones(128, int), contexts, shape)
    assert late.merged.tolist() == [5]
    lengths = late.narrow[:, END] - late.narrow[:, BEGIN]
    assert (np.diff(lengths) <= 0).all()


def test_padding_shares_no_tiles() -> None:
    shape = TileShape(kv_heads=8, narrow=4, wide=32, block_size=BLOCK, processors=4)
    tables = np.tile(np.arange(64, dtype=np.int32), (6, 1))
    tables[1] += 1000
    contexts = np.full(6, 1000)
    assert tile(tables, np.ones(6, int), contexts, shape).num_partials > 0
    own = tile(tables, np.ones(6, int), contexts, shape, sharing=2)
    assert own.num_partials == 0
    assert sorted(own.narrow[:, TABLE].tolist()) == [0, 1, 2, 3, 4, 5]


@given(
    own=st.lists(st.integers(1, 1600), min_size=1, max_size=64),
    shared=st.integers(0, 1500),
    kv_heads=st.integers(1, 8),
    processors=st.integers(1, 132),
)
def test_capacity_is_room_for_decodes(own: list[int], shared: int, kv_heads: int, processors: int) -> None:
    """Of any lengths that go past what they share; what ends within it makes branches, for which there may be none."""
    lengths = [shared + each for each in own]
    shape = TileShape(kv_heads=kv_heads, narrow=4, wide=32, block_size=BLOCK, processors=processors)
    tables = np.arange(len(lengths) * 200, dtype=np.int32).reshape(-1, 200)
    tables[:, : shared // BLOCK] = tables[0, : shared // BLOCK]
    tiling = tile(tables, np.ones(len(lengths), int), np.array(lengths), shape)
    room = capacity(len(lengths), shape, wide=len(tiling.wide) > 0, merged=len(tiling.merged) > 0)
    assert len(tiling.narrow) <= len(room.narrow)
    assert len(tiling.wide) <= len(room.wide)
    assert len(tiling.rows) <= len(room.rows)
    assert len(tiling.merged) <= len(room.merged)
    assert tiling.num_partials <= room.num_partials
