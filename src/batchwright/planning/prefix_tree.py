"""The tree of the prefixes of prompts, in blocks of tokens, and the order in which a cache finds the most of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
_Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
_Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]

_FACTOR = np.int64(-7046029254386353131)
"""An odd number without a pattern in its bits: 2⁶⁴ over the golden ratio, less 2⁶⁴."""
_OTHER_FACTOR = np.int64(-4658895280553007687)
"""Another one, for sums of what was summed with the first: with the same one, tokens could change places."""


def block_ids(tokens: Sequence[int] | _Ints, block_size: int) -> _Ints:
    """Ids of the full blocks of `tokens`: equal for equal blocks, and for others with a chance of about 2⁻⁶⁴."""
    count = len(tokens) // block_size
    blocks = np.asarray(tokens[: count * block_size], np.int64).reshape(count, block_size)
    with np.errstate(over="ignore"):
        ids: _Ints = (blocks * _factors(block_size)).sum(axis=1)
    return ids


@lru_cache
def _factors(count: int) -> _Ints:
    """The first `count` powers of `_FACTOR`, modulo 2⁶⁴."""
    return np.cumprod(np.full(count, _FACTOR))


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The blocks of many prompts: equal ids in equal places, after equal ones, are the same block."""

    blocks: _Ints
    """Ids of the blocks of all prompts, one prompt after the other."""
    starts: _Ints
    """Where the blocks of each prompt begin in `blocks`, and the length of `blocks` at the end."""

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> Paths:
        """The paths of prompts whose blocks are given by their ids."""
        lengths = np.fromiter((len(each) for each in prompts), np.int64, len(prompts))
        blocks = np.fromiter((block for each in prompts for block in each), np.int64, int(lengths.sum()))
        return cls(blocks, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    @classmethod
    def joined(cls, prompts: Sequence[_Ints]) -> Paths:
        """The paths of prompts, each of which is an array of ids."""
        lengths = np.fromiter(map(len, prompts), np.int64, len(prompts))
        blocks = np.concatenate(prompts) if prompts else np.zeros(0, np.int64)
        return cls(blocks, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Prompts as the leaves of a tree, each of whose nodes is a prefix that at least two of them share.

    The prefix of a node is longer than that of its parent, and ends where not all of its prompts go on alike. Node 0
    is the root, which has all prompts: its prefix is empty unless all of them share one.
    """

    parents: _Ints
    """The parent of each node, which comes before it; -1 for the root."""
    levels: _Ints
    """Number of nodes above each node."""
    depths: _Ints
    """Number of blocks of the prefix of each node."""
    counts: _Ints
    """Number of prompts with that prefix."""
    nodes: _Ints
    """For each prompt, the node of the longest prefix that it shares; 0 if it shares none but the root's."""

    @classmethod
    def of(cls, paths: Paths) -> PrefixTree:
        """The tree of prompts. Takes time proportional to the shared blocks and one more of each prompt."""
        return _Builder(paths).tree()

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.nodes)

    @property
    def own_blocks(self) -> _Ints:
        """Number of blocks of each node that are not its parent's."""
        own = self.depths.copy()
        own[1:] -= self.depths[self.parents[1:]]
        return own

    @property
    def shared_blocks(self) -> int:
        """Number of blocks that are not computed again if each prefix is kept until its last prompt is computed."""
        return int((self.own_blocks * np.maximum(self.counts - 1, 0)).sum())

    def counts_of(self, lines: int) -> _Ints:
        """For each node, the number of prompts with its prefix among the first `lines`."""
        counts: _Ints = np.bincount(self.nodes[:lines], minlength=len(self.parents)).astype(np.int64)
        for level in reversed([*self._by_level()]):
            np.add.at(counts, self.parents[level], counts[level])
        return counts

    def ids(self, paths: Paths) -> _Ints:
        """Ids of the prefixes of nodes: equal for equal ones, and for others as long with a chance of about 2⁻⁶⁴.

        `paths` are those of the prompts of the tree. Takes time proportional to the shared blocks.
        """
        own, first = self.own_blocks, self._first()
        ends = np.cumsum(own)
        places = np.arange(int(own.sum())) - np.repeat(ends - own - (self.depths - own), own)
        blocks = paths.blocks[np.repeat(paths.starts[first], own) + places]
        with np.errstate(over="ignore"):
            powers = np.cumprod(np.full(int(self.depths.max()), _OTHER_FACTOR))
            sums = np.append(0, np.cumsum(blocks * powers[places]))
            ids: _Ints = sums[ends] - sums[ends - own]
            for level in self._by_level():
                ids[level] += ids[self.parents[level]]
        return ids

    def below(self, above: _Bools) -> _Ints:
        """For each prompt, its node right below the nodes chosen by `above`; -1 for a prompt of one of these.

        `above` contains the root, and the parent of every other node in it.
        """
        found = np.arange(len(self.parents))
        for level in self._by_level():
            is_deeper = ~above[self.parents[level]]
            found[level[is_deeper]] = found[self.parents[level[is_deeper]]]
        found[above] = -1
        return found[self.nodes]

    def nearest(self, chosen: _Bools) -> _Ints:
        """For each node, the deepest `chosen` one among itself and those above it; -1 if there is none."""
        found = np.where(chosen, np.arange(len(self.parents)), -1)
        for level in self._by_level():
            found[level] = np.where(chosen[level], level, found[self.parents[level]])
        return found

    def order(self, expected: _Floats) -> _Ints:
        """The order in which a cache that holds one path of the tree computes each prefix once.

        Depth first, so that prompts with a common prefix follow one another. Within that constraint, the greatest value
        in `expected`, which has one for each prompt, comes first; of equals, the lowest number. With expected lengths
        of answers, the longest begin early, and the last to begin are short.
        """
        leaves = len(self.nodes)
        greatest, first = self._greatest(expected), self._first()
        # The children of a node are prompts and nodes; nodes are numbered after all prompts.
        parents = np.concatenate([self.nodes, self.parents])
        sizes = np.concatenate([np.ones(leaves, np.int64), self.counts])
        order = np.lexsort(
            (
                np.concatenate([np.arange(leaves), first]),
                -np.concatenate([expected, greatest]),
                parents,
            )
        )
        offsets = np.empty(len(order), np.int64)
        offsets[order] = _sums_before(sizes[order], parents[order])
        places = offsets[leaves:]
        for level in self._by_level():
            places[level] += places[self.parents[level]]
        result = np.empty(leaves, np.int64)
        result[places[self.nodes] + offsets[:leaves]] = np.arange(leaves)
        return result

    def _greatest(self, expected: _Floats) -> _Floats:
        """For each node, the greatest expected value of its prompts."""
        greatest = np.full(len(self.parents), -np.inf)
        np.maximum.at(greatest, self.nodes, expected)
        for level in reversed([*self._by_level()]):
            np.maximum.at(greatest, self.parents[level], greatest[level])
        return greatest

    def _first(self) -> _Ints:
        """For each node, the least number of its prompts."""
        first = np.full(len(self.parents), len(self.nodes), np.int64)
        np.minimum.at(first, self.nodes, np.arange(len(self.nodes)))
        for level in reversed([*self._by_level()]):
            np.minimum.at(first, self.parents[level], first[level])
        return first

    def _by_level(self) -> Iterator[_Ints]:
        """The nodes of each level but that of the root, from above."""
        by_level = np.argsort(self.levels, kind="stable")
        ends = np.cumsum(np.bincount(self.levels))
        for start, end in pairwise(ends):
            yield by_level[start:end]


def _sums_before(sizes: _Ints, families: _Ints) -> _Ints:
    """For each of `sizes`, the sum of those before it in its family, whose members follow one another."""
    before = np.cumsum(sizes) - sizes
    is_first = _changes(families)
    lengths = np.diff(np.append(np.flatnonzero(is_first), len(sizes)))
    return before - np.repeat(before[is_first], lengths)


def _changes(values: _Ints) -> _Bools:
    """Whether each value differs from the one before it; the first does."""
    changes = np.ones(len(values), np.bool_)
    changes[1:] = values[1:] != values[:-1]
    return changes


class _Builder:
    """Builds a tree by going through all prompts at once, block by block."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lengths = np.diff(paths.starts)
        self._nodes = np.zeros(len(paths), np.int64)
        self._parents = np.array([-1])
        self._levels = np.zeros(1, np.int64)
        self._depths = np.zeros(1, np.int64)
        self._counts = np.array([len(paths)])

    def tree(self) -> PrefixTree:
        # Prompts of a node follow one another.
        prompts = np.arange(len(self._paths))
        depth = 0
        while len(prompts):
            prompts = self._divide(prompts[self._lengths[prompts] > depth], depth)
            depth += 1
        return PrefixTree(self._parents, self._levels, self._depths, self._counts, self._nodes)

    def _divide(self, prompts: _Ints, depth: int) -> _Ints:
        """Divide the nodes of `prompts` by their block at `depth`, and return the prompts that share it with others."""
        blocks = self._paths.blocks[self._paths.starts[prompts] + depth]
        nodes = self._nodes[prompts]
        is_first = _changes(nodes) | _changes(blocks)
        if is_first.sum() > _changes(nodes).sum():
            order = np.lexsort((blocks, nodes))
            prompts, blocks, nodes = prompts[order], blocks[order], nodes[order]
            is_first = _changes(nodes) | _changes(blocks)
        sizes = np.diff(np.append(np.flatnonzero(is_first), len(prompts)))
        parents = nodes[is_first]
        is_shared = sizes > 1
        is_whole = is_shared & (sizes == self._counts[parents])
        self._depths[parents[is_whole]] = depth + 1
        is_new = is_shared & ~is_whole
        if is_new.any():
            numbers = parents.copy()
            numbers[is_new] = np.arange(int(is_new.sum())) + len(self._parents)
            self._nodes[prompts] = np.repeat(numbers, sizes)
            self._add(parents[is_new], sizes[is_new], depth + 1)
        return prompts[np.repeat(is_shared, sizes)]

    def _add(self, parents: _Ints, counts: _Ints, depth: int) -> None:
        self._levels = np.append(self._levels, self._levels[parents] + 1)
        self._parents = np.append(self._parents, parents)
        self._counts = np.append(self._counts, counts)
        self._depths = np.append(self._depths, np.full(len(parents), depth))
