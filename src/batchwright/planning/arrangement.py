"""The order of lines that are known, by what their prompts share and by what is expected of their answers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from batchwright.planning.expected_lengths import Cluster, ExpectedLengths
from batchwright.planning.prefix_tree import Paths, PrefixTree

_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
_Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
_Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]

_LEAST_TOLD = 8
"""Lines with a common beginning from which on it may tell something about their answers."""
_RESERVED = 0.35
"""Work that is kept for the end, in the time of the longest answer on all places. The places become free one after the
other while it ends: if all lengths were known, half of that work would fill them."""


@dataclass(frozen=True, slots=True, eq=False)
class LineShape:
    """What is known of a line before it is computed."""

    prompt_tokens: int
    limit: int
    """Most tokens of its answer."""
    blocks: _Ints
    """Ids of the full blocks of its prompt: equal ids in equal places, after equal ones, are the same tokens."""
    expected: int | None = None
    """Tokens of its answer, as the line says itself; None if it does not."""


class Caches(NamedTuple):
    """The KV caches of the engines that compute lines."""

    number: int
    blocks: int
    """Blocks of all of them."""
    block_tokens: int


class Arrangement(NamedTuple):
    """An order of lines, given by their indices."""

    first: _Ints
    """Those that come first."""
    last: _Ints
    """Those that are kept for the end of the job."""
    clusters: list[Cluster]
    """For each line, the cluster whose answers its own is expected to be like."""
    shared_blocks: int
    """Number of blocks that lines have in common with earlier ones."""


def arranged(
    shapes: Sequence[LineShape],
    lengths: ExpectedLengths,
    *,
    places: int,
    caches: Caches | None = None,
    cached: _Ints | None = None,
) -> Arrangement:
    """The order in which lines cost the least and leave the fewest of `places` empty at the end.

    - Lines whose prompts begin alike follow one another, depth first, so that each beginning is computed once, and its
      blocks are free for others when the last of them has begun.
    - Beginnings, and lines that share none, are spread so that those with like sizes come evenly over the whole job,
      and so are lines within a beginning: prompts and answers stay mixed, of which the ones need multipliers and the
      others bandwidth.
    - Those whose answers are the surest to be short are kept for the end, among them the longest first.

    `cached` are the blocks that are in the cache now: what goes on after them comes first. For replicas, as many
    beginnings are gone through side by side as they have `caches`; where these hold all beginnings anyway, lines need
    not follow one another.
    """
    nothing = np.zeros(0, np.int64)
    # What is cached is put among the lines, as one that comes before all others.
    tree = PrefixTree.of(Paths.joined([*(each.blocks for each in shapes), nothing if cached is None else cached]))
    beginnings = _units(tree)
    clusters = _clusters(shapes, beginnings[:-1])
    means, tails = _expected(shapes, clusters, lengths)
    number = 1 if caches is None else caches.number
    fits = caches is not None and _fits(tree, shapes, means, places, caches.blocks, caches.block_tokens)
    units = np.arange(len(beginnings)) if fits else beginnings
    ranks, is_kept = _ranks(units, clusters, means, tails, places)
    inside = np.where(is_kept[units[:-1]], tails, -_evenly(_kinds(units[:-1], clusters), np.arange(len(shapes))))
    depth_first = np.empty(len(units), np.int64)
    depth_first[tree.order(np.append(inside, np.inf))] = np.arange(len(units))
    order = np.lexsort((depth_first[:-1], ranks[units[:-1]]))
    kept = is_kept[units[order]]
    first = order[~kept]
    if number > 1 and not fits:
        work = means + [each.prompt_tokens for each in shapes]
        first = first[_side_by_side(units[first], work[first], number)]
    return Arrangement(first, order[kept], clusters, tree.shared_blocks)


def _fits(
    tree: PrefixTree, shapes: Sequence[LineShape], means: _Floats, places: int, blocks: int, block_tokens: int
) -> bool:
    """Whether caches hold all shared beginnings twice over, beside the lines that are computed."""
    shared = int(tree.own_blocks[tree.counts > 1].sum())
    held = sum(each.prompt_tokens for each in shapes) + float(means.sum())
    return 2 * shared <= blocks - places * held / max(1, len(shapes)) / block_tokens


def _units(tree: PrefixTree) -> _Ints:
    """For each line, the number of what it follows or is followed by whatever else comes: a beginning, or the line."""
    tops = tree.tops
    alone = np.arange(len(tops)) + len(tree.parents)
    return np.unique(np.where(tops > 0, tops, alone), return_inverse=True)[1]


def _clusters(shapes: Sequence[LineShape], units: _Ints) -> list[Cluster]:
    told = np.bincount(units)[units] >= _LEAST_TOLD
    return [
        ExpectedLengths.cluster(shape.prompt_tokens, int(shape.blocks[0]) if tells and len(shape.blocks) else None)
        for shape, tells in zip(shapes, told, strict=True)
    ]


def _expected(
    shapes: Sequence[LineShape], clusters: Sequence[Cluster], lengths: ExpectedLengths
) -> tuple[_Floats, _Floats]:
    """For each line, the mean and the tail of the lengths that its answer may have."""
    known: dict[tuple[Cluster, int], tuple[float, float]] = {}
    pairs = np.empty((2, len(shapes)))
    for index, (shape, cluster) in enumerate(zip(shapes, clusters, strict=True)):
        if shape.expected is not None:
            pairs[:, index] = min(shape.expected, shape.limit)
            continue
        key = cluster, shape.limit
        if key not in known:
            known[key] = lengths.mean(*key), lengths.tail(*key)
        pairs[:, index] = known[key]
    return pairs[0], pairs[1]


def _ranks(
    units: _Ints, clusters: Sequence[Cluster], means: _Floats, tails: _Floats, places: int
) -> tuple[_Ints, _Bools]:
    """For each unit, its place among all units, and whether it is kept for the end. The last is that of the cache."""
    count, cached, units = int(units.max()) + 1, int(units[-1]), units[:-1]
    sizes = np.bincount(units, minlength=count)
    work = np.bincount(units, means, minlength=count).astype(np.float64)
    longest = np.zeros(count)
    np.maximum.at(longest, units, tails)
    first = np.full(count, len(units), np.int64)
    np.minimum.at(first, units, np.arange(len(units)))
    is_kept = _kept(work, longest, first, _RESERVED * places * float(tails.max(initial=0.0)), cached)
    # Beginnings are spread among themselves, and lines alone by their clusters.
    kind = np.zeros(count, np.int64)
    kind[units] = np.where(sizes[units] > 1, 0, 1 + _numbered(clusters))
    spread = _evenly(kind, first)
    spread[cached] = -1.0
    order = np.lexsort((first, np.where(is_kept, -longest, spread), is_kept))
    ranks = np.empty(count, np.int64)
    ranks[order] = np.arange(count)
    return ranks, is_kept


def _numbered(clusters: Sequence[Cluster]) -> _Ints:
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    return np.fromiter((numbers[each] for each in clusters), np.int64, len(clusters))


def _kinds(units: _Ints, clusters: Sequence[Cluster]) -> _Ints:
    """For each line, a number that only lines of the same unit and cluster have."""
    numbers = _numbered(clusters)
    kinds: _Ints = np.unique(units * (int(numbers.max(initial=0)) + 1) + numbers, return_inverse=True)[1]
    return kinds


def _side_by_side(units: _Ints, work: _Floats, caches: int) -> _Ints:
    """The order in which lines, which come by unit, are divided among caches that take them at the same pace.

    A unit goes to the cache that has the least to do, and one of more than a cache's share to several.
    """
    share = float(work.sum()) / caches
    before = np.cumsum(work) - work
    starts = np.flatnonzero(np.diff(units, prepend=-1))
    within = before - np.repeat(before[starts], np.diff(np.append(starts, len(units))))
    is_first = np.diff(units, prepend=-1) != 0
    is_first |= np.diff(within // max(share, 1e-9), prepend=0.0) != 0
    pieces = np.append(np.flatnonzero(is_first), len(units))
    loads = [(0.0, cache) for cache in range(caches)]
    starts_of = np.empty(len(pieces) - 1)
    for piece, (start, end) in enumerate(pairwise(pieces)):
        load, cache = heapq.heappop(loads)
        starts_of[piece] = load
        heapq.heappush(loads, (load + float(work[start:end].sum()), cache))
    sizes = np.diff(pieces)
    at = np.repeat(starts_of - before[pieces[:-1]], sizes) + before
    return np.argsort(at, kind="stable")


def _kept(work: _Floats, longest: _Floats, first: _Ints, wanted: float, cached: int) -> _Bools:
    """The units that are kept for the end: the surest to be short, as long as they are at most half of all work."""
    is_kept = np.zeros(len(work), np.bool_)
    left = min(wanted, work.sum() / 2)
    for unit in np.lexsort((-first, longest)):
        if left <= 0.0:
            break
        if unit != cached and work[unit] <= left:
            is_kept[unit] = True
            left -= work[unit]
    return is_kept


def _evenly(kinds: _Ints, first: _Ints) -> _Floats:
    """Positions from 0 to 1 at which the members of each kind are equally far apart, in the order of `first`."""
    order = np.lexsort((first, kinds))
    counts = np.bincount(kinds)
    starts = np.cumsum(counts) - counts
    positions = np.empty(len(kinds))
    positions[order] = (np.arange(len(kinds)) - starts[kinds[order]] + 0.5) / counts[kinds[order]]
    return positions
