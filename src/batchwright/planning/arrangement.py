"""The order of known lines, by what their prompts share and by the expected lengths of their answers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from batchwright.planning.clusters import clusters_of
from batchwright.planning.expected_lengths import Cluster, ExpectedLengths, Lengths
from batchwright.planning.prefix_tree import Paths, PrefixTree

_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
_Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
_Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]

_TRUNK = 0.9
"""Share of the lines whose common prefix stays in the cache during the whole job, in whatever order they come."""
_RESERVED = 0.35
"""Work kept for the end, as a share of what all places do in the time of the longest answer. While that answer ends,
the places become free one after another: if all lengths were known, half of that work would fill them."""


@dataclass(frozen=True, slots=True, eq=False)
class LineShape:
    """What is known about a line before it is computed."""

    prompt_tokens: int
    limit: int
    """Most tokens of its answer."""
    blocks: _Ints
    """Ids of the full blocks of its prompt: equal ids in equal places, after equal ones, are the same tokens."""
    expected: int | None = None
    """Tokens of its answer, as stated by the line itself; None if it states none."""


class Caches(NamedTuple):
    """The KV caches of the engines that compute lines."""

    number: int
    blocks: int
    """Blocks of all of them together."""
    block_tokens: int


class Arrangement(NamedTuple):
    """An order of lines, given by their indices."""

    first: _Ints
    """Lines that come first."""
    last: _Ints
    """Lines that are kept for the end of the job."""
    clusters: list[Cluster]
    """For each line, the cluster whose answers its own is expected to resemble."""
    shared_blocks: int
    """Number of blocks that lines have in common with earlier ones."""


def arranged(
    shapes: Sequence[LineShape],
    lengths: ExpectedLengths,
    *,
    places: int,
    caches: Caches | None = None,
    cached: _Ints | None = None,
    earlier: Sequence[Cluster | None] | None = None,
    more: bool = False,
) -> Arrangement:
    """The order in which lines cost the least and leave the fewest of `places` empty at the end.

    - Lines whose prompts begin alike follow one another, depth first, so that each prefix is computed once, and its
      blocks are free for others once the last of these lines has begun.
    - Prefixes, and lines that share none, are spread so that those of similar size come evenly over the whole job, and
      so are lines within a prefix: prompts, which need multipliers, stay mixed with answers, which need bandwidth.
    - Unless `more` lines are to come, each begins early enough that an answer of its expected length ends with the job;
      of those that cannot, the longest come first.
    - Lines whose answers are the surest to be short are kept for the end, the longest of them first.

    `cached` are the blocks that are in the cache now: lines that continue them come first. For replicas, as many
    prefixes are worked through side by side as they have `caches`; if these hold all prefixes anyway, lines need not
    follow one another. `earlier` are the clusters that the lines were given when they were last arranged.
    """
    nothing = np.zeros(0, np.int64)
    # The cached blocks are put among the lines, as one that comes before all others.
    paths = Paths.joined([*(each.blocks for each in shapes), nothing if cached is None else cached])
    tree = PrefixTree.of(paths)
    prefixes = _units(tree, len(shapes))
    clusters = clusters_of([each.prompt_tokens for each in shapes], tree, paths, earlier)
    expected = _expected(shapes, clusters, lengths)
    number = 1 if caches is None else caches.number
    fits = caches is not None and _fits(tree, shapes, expected.means, places, caches.blocks, caches.block_tokens)
    units = np.arange(len(prefixes)) if fits else prefixes
    ranks, is_kept = _ranks(units, clusters, expected, places, more=more)
    spread = _evenly(_kinds(units[:-1], clusters), np.arange(len(shapes)))
    inside = np.where(is_kept[units[:-1]], expected.tails, -spread)
    depth_first = np.empty(len(units), np.int64)
    depth_first[tree.order(np.append(inside, np.inf))] = np.arange(len(units))
    order = np.lexsort((depth_first[:-1], ranks[units[:-1]]))
    kept = is_kept[units[order]]
    first = order[~kept]
    if number > 1 and not fits:
        work = expected.means + [each.prompt_tokens for each in shapes]
        first = first[_side_by_side(units[first], work[first], number)]
    return Arrangement(first, order[kept], clusters, tree.shared_blocks)


def _fits(
    tree: PrefixTree, shapes: Sequence[LineShape], means: _Floats, places: int, blocks: int, block_tokens: int
) -> bool:
    """Whether caches hold all shared prefixes twice over, beside the lines that are computed."""
    shared = int(tree.own_blocks[tree.counts > 1].sum())
    held = sum(each.prompt_tokens for each in shapes) + float(means.sum())
    return 2 * shared <= blocks - places * held / max(1, len(shapes)) / block_tokens


def _units(tree: PrefixTree, lines: int) -> _Ints:
    """For each prompt, the number of its unit, which stays together in every order: a prefix, or the prompt alone."""
    below = tree.below(tree.counts_of(lines) >= _TRUNK * lines)
    alone = np.arange(len(below)) + len(tree.parents)
    return np.unique(np.where(below < 0, alone, below), return_inverse=True)[1]


def _expected(shapes: Sequence[LineShape], clusters: Sequence[Cluster], lengths: ExpectedLengths) -> Lengths:
    """The lengths that the answers to lines may have."""
    stated = np.array([-1 if each.expected is None else min(each.expected, each.limit) for each in shapes])
    unknown = np.flatnonzero(stated < 0)
    numbers: dict[tuple[Cluster, int], int] = {}
    answers = [numbers.setdefault((clusters[line], shapes[line].limit), len(numbers)) for line in unknown.tolist()]
    found = Lengths(*(stated.astype(np.float64) for _ in Lengths._fields))
    for values, each in zip(found, lengths.of([*numbers]), strict=True):
        values[unknown] = each[answers]
    return found


def _ranks(
    units: _Ints, clusters: Sequence[Cluster], expected: Lengths, places: int, *, more: bool
) -> tuple[_Ints, _Bools]:
    """For each unit, its place among all units, and whether it is kept for the end. The last unit is the cache's."""
    count, cached, units = int(units.max()) + 1, int(units[-1]), units[:-1]
    sizes = np.bincount(units, minlength=count)
    work = np.bincount(units, expected.means, minlength=count).astype(np.float64)
    longest = _greatest(units, expected.tails, count)
    first = np.full(count, len(units), np.int64)
    np.minimum.at(first, units, np.arange(len(units)))
    wanted = _RESERVED * places * float(expected.tails.max(initial=0.0))
    is_kept, last = _kept(work, sizes, longest, first, wanted, cached)
    # Prefixes are spread among themselves, and single lines by their clusters.
    kind = np.zeros(count, np.int64)
    kind[units] = np.where(sizes[units] > 1, 0, 1 + _numbered(clusters))
    spread = _evenly(kind, first)
    spread[cached] = -1.0
    if last is not None:
        spread[last] = 2.0
    order = np.lexsort((first, np.where(is_kept, -longest, spread), is_kept))
    if not more:
        # The last line of a prefix may be its longest.
        due = float(work.sum()) - (places - 1) * _greatest(units, expected.means, count)
        due[cached] = -np.inf
        begun = order[: count - int(is_kept.sum())]
        begun[:] = begun[_in_time(work[begun], due[begun])]
    ranks = np.empty(count, np.int64)
    ranks[order] = np.arange(count)
    return ranks, is_kept


def _greatest(units: _Ints, values: _Floats, count: int) -> _Floats:
    """For each of `count` units, the greatest value of its lines; 0 where it has none."""
    found = np.zeros(count)
    np.maximum.at(found, units, values)
    return found


def _in_time(work: _Floats, due: _Floats) -> list[int]:
    """The order in which pieces of work end by the time they are due, otherwise as given; numbers of pieces.

    Time is counted in work. The order is filled from its end, each place with the last piece that may end so late. If
    none may, the least late is taken: pieces that cannot be in time come in the order in which they are due.
    """
    waiting, left = np.argsort(due, kind="stable").tolist(), float(work.sum())
    due_at, sizes = due.tolist(), work.tolist()
    free: list[int] = []
    """Numbers of the pieces that may end now, negated."""
    found = list[int]()
    while waiting or free:
        while waiting and (due_at[waiting[-1]] >= left or not free):
            heapq.heappush(free, -waiting.pop())
        found.append(-heapq.heappop(free))
        left -= sizes[found[-1]]
    return found[::-1]


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

    A unit goes to the cache that has the least to do, and one larger than a cache's share to several.
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


def _kept(
    work: _Floats, sizes: _Ints, longest: _Floats, first: _Ints, wanted: float, cached: int
) -> tuple[_Bools, np.intp | None]:
    """The units that are kept for the end, and the one that comes right before them, if it matters which.

    The units that are the surest to be short are kept, up to half of all work. A prefix with more work than is still
    wanted comes right before them: its last lines serve instead of other units, which are less sure.
    """
    is_kept = np.zeros(len(work), np.bool_)
    left = min(wanted, work.sum() / 2)
    for unit in np.lexsort((-first, longest)):
        if left <= 0.0:
            break
        if unit == cached:
            continue
        if work[unit] <= left:
            is_kept[unit] = True
            left -= work[unit]
        elif sizes[unit] > 1:
            return is_kept, unit
    return is_kept, None


def _evenly(kinds: _Ints, first: _Ints) -> _Floats:
    """Positions from 0 to 1 at which the members of each kind are equally far apart, in the order of `first`."""
    order = np.lexsort((first, kinds))
    counts = np.bincount(kinds)
    starts = np.cumsum(counts) - counts
    positions = np.empty(len(kinds))
    positions[order] = (np.arange(len(kinds)) - starts[kinds[order]] + 0.5) / counts[kinds[order]]
    return positions
