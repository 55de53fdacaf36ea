"""The attention of a step, cut into tiles of similar work by pure arithmetic on the host; and the tiles on the device.

A tile consists of some queries and a range of keys, which are in the blocks of one table. Queries of different
sequences are in one tile if the keys belong to all of them. A query whose keys are spread over several tiles gets a
partial result from each; these are merged by their log-sum-exp.

Sequences that share a prefix have the same blocks at the beginning of their tables. Prefixes may branch: all sequences
may have a system prompt in common, and some of them also the examples after it. So the spans form a tree.

Shapes: a step has T rows of S sequences, `tables` are [S, most blocks] int32, `counts` [S] queries per sequence, which
are the last of `contexts` [S] positions, and `starts` [S + 1] their first rows. Tiles are [tiles, FIELDS].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.attention.paged import PagedPlan
from batchwright.engine.step.batch import StepBatch, on_device


@dataclass(frozen=True, slots=True)
class Span:
    """Range of the block tables of `sequences`, from `begin` to `end`, where all have the same blocks."""

    sequences: np.ndarray
    """Indices of two or more sequences, ascending."""
    begin: int
    end: int


def shared_spans(tables: np.ndarray, limits: np.ndarray, least: int) -> list[Span]:
    """Return the spans of at least `least` blocks that several rows of `tables` [S, most blocks] share.

    Only the first `limits` [S] blocks of each row count. The spans of a sequence are in ascending order and without
    gaps from its block 0; the blocks after them are its own. Raises ValueError if `least` is not positive.
    """
    if least < 1:
        raise ValueError(f"least={least}: a span needs at least one block")
    spans: list[Span] = []
    waiting: list[tuple[np.ndarray, int]] = [(np.arange(len(limits)), 0)]
    while waiting:
        members, begin = waiting.pop()
        for alike in _alike(tables, members[limits[members] >= begin + least], begin, begin + least):
            end = _common_end(tables[alike], begin + least, int(limits[alike].min()))
            spans.append(Span(alike, begin, end))
            waiting.append((alike, end))
    return spans


def _alike(tables: np.ndarray, members: np.ndarray, begin: int, end: int) -> Iterable[np.ndarray]:
    """Group the `members` [any] whose rows of `tables` are equal from `begin` to `end`, at least two in each group."""
    groups: dict[bytes, list[int]] = {}
    for index, blocks in zip(members.tolist(), tables[members, begin:end], strict=True):
        groups.setdefault(blocks.tobytes(), []).append(index)
    return (np.array(group) for group in groups.values() if len(group) > 1)


def _common_end(tables: np.ndarray, begin: int, end: int) -> int:
    """Return where rows of `tables` [n, most blocks] that are the same before `begin` first differ, at most `end`."""
    same = (tables[1:, begin:end] == tables[0, begin:end]).all(axis=0)
    return end if same.all() else begin + int(same.argmin())


TABLE, FIRST, COUNT, BEGIN, END, ORDINAL, SEEN = range(7)
"""Columns of a tile: the row of the block tables; the first of its queries among `rows`, and their number; its keys,
from position `BEGIN` to before `END`; the ordinal of its partial result among those of each query; and the position
before which all of its queries see all keys."""
FIELDS = 7

_LEAST_SHARED = 128
"""Fewest shared keys that are worth another partial result."""
_PIECE_STEP = 64
"""Number of keys of which the length of each piece is a multiple."""


@dataclass(frozen=True, slots=True)
class _Cutting:
    """How finely the keys of tiles are cut."""

    least: int
    """Fewest keys of a piece: a finer one spends its time on starting and merging."""
    programs: int
    """Programs wanted per multiprocessor, so that all are busy to the end."""
    slack: float
    """Most keys of a tile that is not cut, as a multiple of a program's even share. Partial results cost their traffic
    and a launch, and the longest tiles start first."""


_NARROW = _Cutting(least=128, programs=4, slack=2.5)
_WIDE = _Cutting(least=256, programs=1, slack=1.0)
"""One program per multiprocessor leaves room for narrow ones beside it, and the partial results of its many queries
cost as much traffic as its keys."""

_NARROW_ROWS = 16
"""Rows of a narrow tile's product (queries times heads per KV head): the fewest for matrix units."""
_WIDE_ROWS = 128
_INTERPRETED_PROCESSORS = 1


@dataclass(frozen=True, slots=True)
class TileShape:
    """Parameters of the cut other than the batch."""

    kv_heads: int
    narrow: int
    """Queries of one narrow tile."""
    wide: int
    """Queries of one wide tile, more than `narrow`."""
    block_size: int
    processors: int
    """Multiprocessors of the device: each KV head of each tile is a program for one of them."""


def tile_shape_of(heads: int, kv_heads: int, block_size: int, device: torch.device) -> TileShape:
    """Return the parameters of the cut for layers of `heads` query heads."""
    group = heads // kv_heads
    narrow = max(1, _NARROW_ROWS // group)
    processors = _INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return TileShape(
        kv_heads=kv_heads,
        narrow=narrow,
        wide=max(narrow + 1, _WIDE_ROWS // group),
        block_size=block_size,
        processors=processors,
    )


@dataclass(frozen=True, slots=True)
class Tiling:
    """The attention of a step as tiles. All arrays are int32."""

    narrow: np.ndarray
    """Tiles of few queries, limited by the reading of their keys: [tiles, FIELDS]."""
    wide: np.ndarray
    """Tiles of more queries: [tiles, FIELDS]."""
    rows: np.ndarray
    """Rows of the step, in the order in which tiles take their queries from here: [any]."""
    partial_starts: np.ndarray
    """Start of each row's partial results: [T + 1]. A row with one tile has none: its result is whole."""
    merged: np.ndarray
    """Rows that have partial results: [any]."""

    @property
    def num_partials(self) -> int:
        return int(self.partial_starts[-1])

    @property
    def parts(self) -> list[np.ndarray]:
        """The arrays in the order of the fields: [tiles, FIELDS] twice, [any], [T + 1], [any]."""
        return [self.narrow, self.wide, self.rows, self.partial_starts, self.merged]


def worthy_spans(
    tables: np.ndarray, counts: np.ndarray, contexts: np.ndarray, shape: TileShape, sharing: int | None = None
) -> list[Span]:
    """Return the spans of a step that are worth a tile of their own; see `tile` for the arguments."""
    # If many queries belong to one sequence, reading is cheap compared with the products anyway.
    limits = np.where(counts <= shape.narrow, (contexts - counts) // shape.block_size, 0)
    if sharing is not None:
        limits[sharing:] = 0
    return shared_spans(tables, limits, -(-_LEAST_SHARED // shape.block_size))


def tile(
    tables: np.ndarray, counts: np.ndarray, contexts: np.ndarray, shape: TileShape, sharing: int | None = None
) -> Tiling:
    """Cut a step of `counts` [S] queries, the last of `contexts` [S] positions, over `tables` [S, most blocks].

    For every query, each key up to its own position is in exactly one tile; a tile may have keys that come after some
    of its queries. Only the first `sharing` sequences, by default all, may share tiles.
    """
    starts = np.concatenate(([0], np.cumsum(counts)))
    spans = worthy_spans(tables, counts, contexts, shape, sharing)
    rows, first = [np.arange(starts[-1])], int(starts[-1])
    shared_tiles, shared_members, begins = [], [], np.zeros(len(counts), np.int64)
    for span in spans:
        queries = np.concatenate([np.arange(starts[each], starts[each + 1]) for each in span.sequences])
        each_tile = _queries(np.array([first]), np.array([len(queries)]), shape)
        end = begins[span.sequences] = span.end * shape.block_size
        shared_tiles.append(_tiles(each_tile, span.sequences[0], span.begin * shape.block_size, end, end))
        shared_members.append(span.sequences)
        rows.append(queries)
        first += len(queries)
    each_tile = _queries(starts[:-1], counts, shape)
    owner = each_tile[:, 2]
    before = each_tile[:, 0] - starts[owner] + (contexts - counts)[owner]
    # No query of a tile sees a key after the last of them, and the first sees none after itself.
    own = _tiles(each_tile, owner, begins[owner], before + each_tile[:, 1], before + 1)
    return _cut(shared_tiles, shared_members, own, np.concatenate(rows), int(starts[-1]), shape)


def capacity(sequences: int, shape: TileShape, *, wide: bool, merged: bool) -> Tiling:
    """Return room for the tiles of decodes of `sequences` sequences of any lengths, if prefixes do not branch much.

    `wide` adds room for wide tiles, which many sequences with a common prefix have; `merged` adds room for partial
    results, which wide tiles need. Tiles have no queries, merged rows are -1.
    """
    if not merged:
        return Tiling(
            narrow=np.zeros((sequences, FIELDS), np.int32),
            wide=np.zeros((0, FIELDS), np.int32),
            rows=np.zeros(sequences, np.int32),
            partial_starts=np.zeros(sequences + 1, np.int32),
            merged=np.zeros(0, np.int32),
        )
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


def _tiles(
    queries: np.ndarray,
    table: np.ndarray | int,
    begin: np.ndarray | int,
    end: np.ndarray | int,
    seen: np.ndarray | int,
) -> np.ndarray:
    """Return tiles of `queries` [tiles, 3], made by `_queries`; the others are [tiles] or one for all."""
    made = np.zeros((len(queries), FIELDS), np.int64)
    made[:, [FIRST, COUNT]] = queries[:, :2]
    made[:, TABLE], made[:, BEGIN], made[:, END], made[:, SEEN] = table, begin, end, seen
    return made


def _queries(firsts: np.ndarray, counts: np.ndarray, shape: TileShape) -> np.ndarray:
    """Split runs of `counts` [n] queries from `firsts` [n] on -> [tiles, (first, count, index of the run)]."""
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
    """Cut the keys of every tile into pieces, and number the pieces of each row.

    `shared` and `own` are [tiles, FIELDS], `members` the sequences [n] of each of `shared`, `rows` [any].
    """
    tiles = np.concatenate([*shared, own])
    is_wide = tiles[:, COUNT] > shape.narrow
    pieces = np.where(is_wide, _pieces(tiles, is_wide, shape, _WIDE), _pieces(tiles, ~is_wide, shape, _NARROW))
    made_before = np.zeros(int(own[:, TABLE].max()) + 1, np.int64)
    """Pieces of each sequence's spans so far, [S]: equal for all members of a span, which share earlier spans."""
    at = 0
    for span, sequences in zip(shared, members, strict=True):
        tiles[at : at + len(span), ORDINAL] = made_before[sequences[0]]
        # A span's tiles have the same keys; a last one of few queries must be cut like the rest.
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
        narrow=_longest_first(cut[~cut_wide]),
        wide=_longest_first(cut[cut_wide]),
        rows=rows.astype(np.int32),
        partial_starts=partial_starts.astype(np.int32),
        merged=np.flatnonzero(of_rows > 1).astype(np.int32),
    )


def _pieces(tiles: np.ndarray, which: np.ndarray, shape: TileShape, cutting: _Cutting) -> np.ndarray:
    """Return into how many pieces to cut each of `tiles`, so that those in `which` fill the device -> [tiles]."""
    keys = tiles[:, END] - tiles[:, BEGIN]
    share = -(-int(keys[which].sum()) // _wanted(shape, cutting))
    piece = max(cutting.least, -(-share // _PIECE_STEP) * _PIECE_STEP)
    pieces: np.ndarray = np.where(keys > cutting.slack * piece, -(-keys // piece), 1)
    return pieces


def _longest_first(tiles: np.ndarray) -> np.ndarray:
    """Return `tiles` [tiles, FIELDS] in an order in which no long one is left to the end."""
    return tiles[np.argsort(tiles[:, BEGIN] - tiles[:, END], kind="stable")].astype(np.int32)


def _wanted(shape: TileShape, cutting: _Cutting) -> int:
    """Return the number of pieces that fill the device."""
    return max(1, shape.processors * cutting.programs // shape.kv_heads)


def _cut_each(tiles: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Cut `tiles` [tiles, FIELDS] into `pieces` [tiles] of similar length, with ascending ordinals -> [any, FIELDS]."""
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


@dataclass(frozen=True, slots=True)
class DeviceTiling:
    """A `Tiling` on the device, for one step, or with room for any step of no more tiles, merged rows and partial
    results.

    Tiles without queries, and merged rows of -1, are ignored.
    """

    narrow: Tensor
    wide: Tensor
    rows: Tensor
    partial_starts: Tensor
    merged: Tensor
    num_partials: int

    @classmethod
    def of(cls, tiling: Tiling, device: torch.device) -> DeviceTiling:
        # One copy: five would take the host five times as long.
        return cls.within(on_device(np.concatenate([part.ravel() for part in tiling.parts]), device), tiling)

    @classmethod
    def within(cls, flat: Tensor, tiling: Tiling) -> DeviceTiling:
        """Return views of `flat` [any] int32, which holds the arrays of a tiling as large as `tiling`, concatenated."""
        narrow, wide, rows, partial_starts, merged = flat.split([part.size for part in tiling.parts])
        return cls(narrow.view(-1, FIELDS), wide.view(-1, FIELDS), rows, partial_starts, merged, tiling.num_partials)


class TilingRoom:
    """Device memory, as large as `room`, for the tiles of one step at a time."""

    def __init__(self, room: Tiling, device: torch.device) -> None:
        self._room, self._parts = room, room.parts
        self._empty = np.concatenate([part.ravel() for part in self._parts])
        self._flat = torch.from_numpy(self._empty.copy()).to(device)
        self.tiling = DeviceTiling.within(self._flat, room)

    def load(self, tiling: Tiling) -> bool:
        """Load the tiles of a step; return False if there is no room for them."""
        pairs = list(zip(tiling.parts, self._parts, strict=True))
        if tiling.num_partials > self._room.num_partials or any(part.size > room.size for part, room in pairs):
            return False
        flat, at = self._empty.copy(), 0
        for part, room in pairs:
            flat[at : at + part.size] = part.ravel()
            at += room.size
        self._flat.copy_(on_device(flat, self._flat.device), non_blocking=True)
        return True


class TiledPlan(PagedPlan):
    """The tiles of a step, made once for each kind of layer."""

    def __init__(self, batch: StepBatch, block_size: int) -> None:
        super().__init__(batch, block_size)
        self._batch = batch
        self.tilings: dict[TileShape, DeviceTiling] = {}

    @property
    def shapes(self) -> tuple[TileShape, ...]:
        """Parameters of the cuts that the layers requested."""
        return tuple(self.tilings)

    def tiling(self, shape: TileShape) -> DeviceTiling:
        if shape not in self.tilings:
            batch = self._batch
            cut = tile(batch.tables, np.array(batch.query_lens), np.array(batch.contexts), shape)
            self.tilings[shape] = DeviceTiling.of(cut, batch.slots.device)
        return self.tilings[shape]
