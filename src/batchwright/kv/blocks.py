"""Fixed-size KV blocks with reference counts and a prefix cache.

A sequence's keys and values are in blocks of `block_size` tokens, listed in its `BlockTable`. A full block is
*published* under (prefix before it, its tokens), so that a later sequence that begins with the same tokens uses the
block instead of computing it again. A prefix is a serial number that is never reused, and the dictionary compares the
tokens of every hit, so two prefixes are equal only if all their tokens are the same: no digest is trusted.

Invariants (checked by `BlockManager.check`, which the tests call after every operation):

- a block is free if and only if no table contains it; its reference count is the number of tables that do;
- free blocks keep their contents, and stay in the prefix cache, until they are allocated again: first those that were
  closed as no longer useful, then the oldest;
- only full blocks are published, and each prefix identifies at most one block.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

_Content: TypeAlias = tuple[int, tuple[int, ...]]
"""Content of a full block: the prefix before it, and its tokens."""

_NOTHING = 0
"""Prefix before a first block."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in order; created and changed only by a `BlockManager`."""

    blocks: array[int] = field(default_factory=lambda: array("i"))
    prefixes: list[int] = field(default_factory=list)
    """Prefixes up to and including each of its leading full blocks, if they have been published or matched."""

    def __len__(self) -> int:
        return len(self.blocks)


class BlockManager:
    """Allocates blocks and finds shared prefixes.

    Raises ValueError if `num_blocks` or `block_size` is not positive.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size}: both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._content_of: list[_Content | None] = [None] * num_blocks
        self._published: dict[_Content, tuple[int, int]] = {}
        """Block by prefix up to and including it."""
        self._last_prefix = _NOTHING
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Number of blocks that no sequence holds (they may still be cached)."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def can_open(
        self, tokens: Sequence[int], spare: int = 0, *, without: Sequence[BlockTable] = (), most: int | None = None
    ) -> bool:
        """Return whether all of `tokens` would fit now, counting prefix hits, and leave `spare` blocks free.

        `without` are open tables that are assumed to be closed. `most` is as in `open`.
        """
        missing = self.blocks_for(len(tokens)) + spare
        if missing - self._most_matches(tokens, most) > len(self._free) + sum(len(table) for table in without):
            return False
        named = Counter(block for table in without for block in table.blocks)
        freed = {block for block, count in named.items() if self._references[block] == count}
        free = len(self._free) + len(freed)
        if missing <= free:
            return True
        matched = self._match(tokens, most)
        matched_free = sum(not self._references[block] or block in freed for block, _ in matched)
        return missing - len(matched) <= free - matched_free

    def open(self, tokens: Sequence[int], *, most: int | None = None) -> tuple[BlockTable, int]:
        """Return a table that holds the cached prefix of `tokens`, and how many tokens that is: `most`, or fewer.

        At least the last token is always left to compute, since its logits are needed.
        """
        table = BlockTable()
        for block, prefix in self._match(tokens, most):
            self._hold(block)
            table.blocks.append(block)
            table.prefixes.append(prefix)
        return table, len(table.blocks) * self.block_size

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room in `table` for `num_tokens` tokens in total. False, without any change, if blocks are lacking."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._unpublish(block)
            self._references[block] = 1
            table.blocks.append(block)
        return True

    def publish(self, table: BlockTable, tokens: Sequence[int], num_tokens: int) -> None:
        """Offer the blocks filled by the first `num_tokens` of `tokens` to later sequences.

        May be called when the step that computes them is planned: a sequence that joins in the same step reads each
        layer's keys after they have been written. `retract` withdraws the offer if that step fails.
        """
        if not self.prefix_caching:
            return
        size = self.block_size
        for index in range(len(table.prefixes), num_tokens // size):
            content = (
                table.prefixes[-1] if table.prefixes else _NOTHING,
                tuple(tokens[index * size : (index + 1) * size]),
            )
            if content not in self._published:
                block = table.blocks[index]
                self._last_prefix += 1
                self._published[content] = block, self._last_prefix
                self._content_of[block] = content
            table.prefixes.append(self._published[content][1])

    def retract(self, table: BlockTable, num_tokens: int) -> None:
        """Withdraw the blocks of `table` past its first `num_tokens` tokens from the prefix cache."""
        full = num_tokens // self.block_size
        for block in table.blocks[full:]:
            self._unpublish(block)
        del table.prefixes[full:]

    def close(self, table: BlockTable, *, useful: int | None = None) -> None:
        """Release all blocks. The last ones are reused first, so that prefixes stay cached longest.

        `useful`: how many of the first blocks may be useful to later sequences; None: all. The others are reused before
        any cached blocks, and before memory that was never written, which costs page faults.
        """
        for index in reversed(range(len(table.blocks))):
            block = table.blocks[index]
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._content_of[block] is None or (useful is not None and index >= useful):
                    self._free.move_to_end(block, last=False)
        table.blocks = array("i")
        table.prefixes = []

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Raise RuntimeError unless the invariants hold for `tables`, which must be all open ones."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                held[block] += 1
            if len(set(table.blocks)) != len(table.blocks):
                raise RuntimeError("a table names a block twice")
        if held != self._references:
            raise RuntimeError("reference counts differ from the tables")
        if any((count == 0) != (block in self._free) for block, count in enumerate(held)):
            raise RuntimeError("a block is both free and held, or neither")
        published = {block: content for content, (block, _) in self._published.items()}
        if len(published) != len(self._published):
            raise RuntimeError("the prefix cache names a block twice")
        if any(content != published.get(block) for block, content in enumerate(self._content_of)):
            raise RuntimeError("the prefix cache and the contents of the blocks differ")
        if any(len(tokens) != self.block_size for _, tokens in self._published):
            raise RuntimeError("a block that is not full is in the prefix cache")

    def _match(self, tokens: Sequence[int], most: int | None) -> list[tuple[int, int]]:
        if not self.prefix_caching or not self._published:
            return []
        size, prefix, matched = self.block_size, _NOTHING, []
        for index in range(self._most_matches(tokens, most)):
            hit = self._published.get((prefix, tuple(tokens[index * size : (index + 1) * size])))
            if hit is None:
                break
            matched.append(hit)
            prefix = hit[1]
        return matched

    def _most_matches(self, tokens: Sequence[int], most: int | None) -> int:
        known = max(0, len(tokens) - 1)
        return (known if most is None else min(known, most)) // self.block_size if self.prefix_caching else 0

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def _unpublish(self, block: int) -> None:
        content = self._content_of[block]
        if content is not None:
            del self._published[content]
            self._content_of[block] = None
