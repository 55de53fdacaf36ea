"""A step's attention cut into tiles of like work, by pure arithmetic on the host.

A tile is some queries and a range of keys, which lie in the blocks of one table. Queries of different sequences are in
one tile where the keys belong to all of them. A query whose keys are spread over several tiles gets a partial result
from each; these are merged by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchwright.engine.attention.spans import shared_spans

TABLE, FIRST, COUNT, BEGIN, END, ORDINAL = range(6)
"""Columns of a tile: the row of the block tables; where its queries begin among `rows`, and how many they are; its
keys, from position `BEGIN` to before `END`; and which of its queries' partial results it makes."""
FIELDS = 6

_LEAST_SHARED = 128
"""Keys: fewer are not worth another partial result."""
_PIECE_STEP = 64
"""Keys: pieces are multiples of it."""


@dataclass(frozen=True, slots=True)
class _Cutting:
    """How finely the keys of tiles are cut."""

    least: int
    """Keys of a piece: a finer one spends its time on starting and merging."""
    programs: int
    """Wanted for each multiprocessor, so that all are busy to the end."""


_NARROW = _Cutting(least=128, programs=16)
_WIDE = _Cutting(least=256, programs=1)
"""One fills a multiprocessor; and the partial results of its many queries take as much memory traffic as keys do."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """What the cut depends on besides the batch."""

    kv_heads: int
    narrow: int
    """Queries of one narrow tile."""
    wide: int
    """Queries of one wide tile, more than `narrow`."""
    block_size: int
    processors: int
    """Of the device: each KV head of each tile is a program for one of them."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A step's attention. All arrays are int32."""

    narrow: np.ndarray
    """[tiles, FIELDS]: those of few queries, bound by the reading of their keys."""
    wide: np.ndarray
    """[tiles, FIELDS]: those of more queries."""
    rows: np.ndarray
    """Rows of the step, in the order in which tiles take their queries from here."""
    partial_starts: np.ndarray
    """[T + 1]: where each row's partial results begin. A row with one tile has none: its result is whole."""
    merged: np.ndarray
    """The rows that have partial results."""

    @property
    def num_partials(self) -> int:
        return int(self.partial_starts[-1])


def tile(tables: np.ndarray, counts: np.ndarray, contexts: np.ndarray, shape: TileShape) -> Tiling:
    """Cut a step: `counts` [S] queries, the last of `contexts` [S] positions, of `tables` [S, most blocks].

    Every query has each key up to its own position in exactly one tile; a tile may have keys that come after some of
    its queries.
    """
    starts = np.concatenate(([0], np.cumsum(counts)))
    # Where many queries belong to one sequence, reading is cheap beside the products already.
    limits = np.where(counts <= shape.narrow, (contexts - counts) // shape.block_size, 0)
    spans = shared_spans(tables, limits, -(-_LEAST_SHARED // shape.block_size))
    rows, first = [np.arange(starts[-1])], int(starts[-1])
    shared_tiles, shared_members, begins = [], [], np.zeros(len(counts), np.int64)
    for span in spans:
        queries = np.concatenate([np.arange(starts[each], starts[each + 1]) for each in span.sequences])
        each_tile = _queries(np.array([first]), np.array([len(queries)]), shape)
        made = np.zeros((len(each_tile), FIELDS), np.int64)
        made[:, TABLE] = span.sequences[0]
        made[:, [FIRST, COUNT]] = each_tile[:, :2]
        made[:, BEGIN], made[:, END] = span.begin * shape.block_size, span.end * shape.block_size
        begins[span.sequences] = span.end * shape.block_size
        shared_tiles.append(made)
        shared_members.append(span.sequences)
        rows.append(queries)
        first += len(queries)
    own = _own_tiles(starts, counts, contexts, begins, shape)
    return _cut(shared_tiles, shared_members, own, np.concatenate(rows), int(starts[-1]), shape)


def capacity(sequences: int, shape: TileShape, *, wide: bool) -> Tiling:
    """Room for the tiles of decodes of so many sequences, whatever their lengths, unless much branches.

    `wide`: also for wide tiles, which many sequences with a common prefix have. Tiles have no queries, merged rows
    are -1.
    """
    whole, pieces = 2 * sequences, _wanted(shape, _NARROW)
    wide_pieces = 0 if not wide else sequences // shape.narrow + _wanted(shape, _WIDE)
    partial_starts = np.zeros(sequences + 1, np.int32)
    partial_starts[-1] = whole + pieces * min(shape.narrow, sequences) + wide_pieces * min(shape.wide, sequences)
    return Tiling(
        narrow=np.zeros((whole + pieces, FIELDS), np.int32),
        wide=np.zeros((wide_pieces, FIELDS), np.int32),
        rows=np.zeros(4 * sequences, np.int32),
        partial_starts=partial_starts,
        merged=np.full(sequences, -1, np.int32),
    )


def _own_tiles(
    starts: np.ndarray, counts: np.ndarray, contexts: np.ndarray, begins: np.ndarray, shape: TileShape
) -> np.ndarray:
    """[tiles, FIELDS]: the keys that each sequence has for itself, in the order of the rows."""
    each_tile = _queries(starts[:-1], counts, shape)
    owner = each_tile[:, 2]
    made = np.zeros((len(each_tile), FIELDS), np.int64)
    made[:, TABLE] = owner
    made[:, [FIRST, COUNT]] = each_tile[:, :2]
    made[:, BEGIN] = begins[owner]
    # The position of its last query: no query of the tile sees a later key.
    last = each_tile[:, :2].sum(axis=1) - starts[owner] + (contexts - counts)[owner]
    made[:, END] = last
    return made


def _queries(firsts: np.ndarray, counts: np.ndarray, shape: TileShape) -> np.ndarray:
    """[tiles, (first, count, which of `counts`)] of runs of `counts` queries from `firsts` on."""
    size = np.where(counts <= shape.narrow, shape.narrow, shape.wide)
    tiles = -(-counts // size)
    owner = np.repeat(np.arange(len(counts)), tiles)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    offset = index * size[owner]
    return np.stack((firsts[owner] + offset, np.minimum(size[owner], counts[owner] - offset), owner), axis=1)


def _cut(
    shared: list[np.ndarray],
    members: list[np.ndarray],
    own: np.ndarray,
    rows: np.ndarray,
    total_rows: int,
    shape: TileShape,
) -> Tiling:
    """Cut the keys of every tile into pieces, and give each row's pieces their ordinals."""
    tiles = np.concatenate([*shared, own])
    is_wide = tiles[:, COUNT] > shape.narrow
    pieces = np.where(is_wide, _pieces(tiles, is_wide, shape, _WIDE), _pieces(tiles, ~is_wide, shape, _NARROW))
    made_before = np.zeros(int(own[:, TABLE].max()) + 1, np.int64)
    """Pieces of each sequence's spans so far: the same for all members of a span, since what goes before is shared."""
    at = 0
    for span, sequences in zip(shared, members, strict=True):
        tiles[at : at + len(span), ORDINAL] = made_before[sequences[0]]
        # A span's tiles have the same keys; a last one of few queries must not be cut otherwise than the rest.
        pieces[at : at + len(span)] = pieces[at]
        made_before[sequences] += pieces[at]
        at += len(span)
    tiles[at:, ORDINAL] = made_before[tiles[at:, TABLE]]
    of_rows = np.repeat(tiles[at:, ORDINAL] + pieces[at:], tiles[at:, COUNT])
    cut = _cut_each(tiles, pieces)
    cut_wide = np.repeat(is_wide, pieces)
    partial_starts = np.zeros(total_rows + 1, np.int64)
    np.cumsum(np.where(of_rows > 1, of_rows, 0), out=partial_starts[1:])
    return Tiling(
        narrow=cut[~cut_wide].astype(np.int32),
        wide=cut[cut_wide].astype(np.int32),
        rows=rows.astype(np.int32),
        partial_starts=partial_starts.astype(np.int32),
        merged=np.flatnonzero(of_rows > 1).astype(np.int32),
    )


def _pieces(tiles: np.ndarray, which: np.ndarray, shape: TileShape, cutting: _Cutting) -> np.ndarray:
    """[tiles]: into how many pieces the keys of each are cut so that those of `which` fill the device together."""
    keys = tiles[:, END] - tiles[:, BEGIN]
    share = -(-int(keys[which].sum()) // _wanted(shape, cutting))
    piece = max(cutting.least, -(-share // _PIECE_STEP) * _PIECE_STEP)
    pieces: np.ndarray = np.maximum(1, -(-keys // piece))
    return pieces


def _wanted(shape: TileShape, cutting: _Cutting) -> int:
    """Pieces that fill the device."""
    return max(1, shape.processors * cutting.programs // shape.kv_heads)


def _cut_each(tiles: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """`tiles`, each in as many pieces of like length as `pieces` says, with ordinals that count on."""
    owner = np.repeat(np.arange(len(tiles)), pieces)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut = tiles[owner]
    length = -(-(tiles[:, END] - tiles[:, BEGIN]) // pieces)
    length = -(-length // _PIECE_STEP) * _PIECE_STEP
    begin = cut[:, BEGIN] + index * length[owner]
    cut[:, END] = np.minimum(begin + length[owner], cut[:, END])
    cut[:, BEGIN] = begin
    cut[:, ORDINAL] += index
    return cut
