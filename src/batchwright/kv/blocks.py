"""Fixed-size KV blocks with reference counts and a prefix cache.

A sequence's keys and values lie in blocks of `block_size` tokens, named by its `BlockTable`. A full block is
*published* under a digest of (digest of the block before it, its tokens), so that a later sequence that begins with
the same tokens takes the block instead of computing it again. The tokens are compared on every hit: a digest alone is
never trusted.

Invariants (checked by `BlockManager.check`, which the tests call after every operation):

- a block is free if and only if no table names it; its reference count is the number of tables that do;
- free blocks keep their contents, and stay in the prefix cache, until they are handed out again: oldest first;
- only full blocks are published, and each digest names at most one block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

_ROOT = b"batchwright-kv"


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in order; made and changed by a `BlockManager` only."""

    blocks: array[int] = field(default_factory=lambda: array("i"))
    digests: list[bytes] = field(default_factory=list)
    """Of its leading full blocks, as far as they have been published or matched."""

    def __len__(self) -> int:
        return len(self.blocks)


class BlockManager:
    """Hands out blocks and finds shared prefixes.

    Raises ValueError when `num_blocks` or `block_size` is not positive.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size}: both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._tokens_of: list[tuple[int, ...]] = [()] * num_blocks
        self._published: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds (they may still be cached)."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def can_open(self, tokens: Sequence[int], spare: int = 0) -> bool:
        """Whether all of `tokens` would fit now, prefix hits counted, and leave `spare` blocks free."""
        missing = self.blocks_for(len(tokens)) + spare
        if missing <= len(self._free):
            return True
        matched = self._match(tokens)
        matched_free = sum(not self._references[block] for block, _ in matched)
        return missing - len(matched) <= len(self._free) - matched_free

    def open(self, tokens: Sequence[int]) -> tuple[BlockTable, int]:
        """A table that holds the cached prefix of `tokens`, and how many tokens that is.

        At least the last token is always left to compute, since its logits are wanted.
        """
        table = BlockTable()
        for block, digest in self._match(tokens):
            self._hold(block)
            table.blocks.append(block)
            table.digests.append(digest)
        return table, len(table.blocks) * self.block_size

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room in `table` for `num_tokens` tokens in all. False, and nothing changed, when blocks are lacking."""
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
        layer's keys after they have been written. `retract` takes the offer back if that step fails.
        """
        if not self.prefix_caching:
            return
        size = self.block_size
        for index in range(len(table.digests), num_tokens // size):
            content = tuple(tokens[index * size : (index + 1) * size])
            digest = _digest(table.digests[-1] if table.digests else _ROOT, content)
            table.digests.append(digest)
            block = table.blocks[index]
            if digest not in self._published:
                self._published[digest] = block
                self._digest_of[block] = digest
                self._tokens_of[block] = content

    def retract(self, table: BlockTable, num_tokens: int) -> None:
        """Withdraw the blocks of `table` past its first `num_tokens` tokens from the prefix cache."""
        full = num_tokens // self.block_size
        for block in table.blocks[full:]:
            self._unpublish(block)
        del table.digests[full:]

    def close(self, table: BlockTable) -> None:
        """Let go of all blocks. The last ones are handed out again first, so that prefixes stay cached longest."""
        for block in reversed(table.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._digest_of[block] is None:
                    self._free.move_to_end(block, last=False)
        table.blocks = array("i")
        table.digests = []

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
        for digest, block in self._published.items():
            if self._digest_of[block] != digest or len(self._tokens_of[block]) != self.block_size:
                raise RuntimeError("the prefix cache names a block that is not published under that digest")

    def _match(self, tokens: Sequence[int]) -> list[tuple[int, bytes]]:
        if not self.prefix_caching or not self._published:
            return []
        size, digest, matched = self.block_size, _ROOT, []
        for index in range((len(tokens) - 1) // size):
            content = tuple(tokens[index * size : (index + 1) * size])
            digest = _digest(digest, content)
            block = self._published.get(digest)
            if block is None or self._tokens_of[block] != content:
                break
            matched.append((block, digest))
        return matched

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def _unpublish(self, block: int) -> None:
        digest = self._digest_of[block]
        if digest is not None:
            del self._published[digest]
            self._digest_of[block] = None
            self._tokens_of[block] = ()


def _digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()
