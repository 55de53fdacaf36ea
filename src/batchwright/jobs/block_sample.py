"""A sample of blocks of consecutive lines, which preserves what neighbours have in common."""

from __future__ import annotations

import random
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

_BLOCK = 64
"""Lines of a block."""


class BlockSample(Generic[_Item]):
    """Keeps blocks of 64 consecutive items each, every block with the same probability (algorithm R, Vitter 1985).

    Whether a block is kept is decided at its first item, so items of other blocks need no work. If its items are large,
    only the first of them are kept, so that all together take at most `most_bytes`, and one more item for each block.
    """

    def __init__(self, most_items: int, most_bytes: int) -> None:
        """Raises ValueError if not even one block may be kept."""
        self._most_blocks = most_items // _BLOCK
        if self._most_blocks < 1:
            raise ValueError(f"most_items={most_items}: must be at least {_BLOCK}")
        self._most_bytes = most_bytes // self._most_blocks
        self._draw = random.Random(0)
        self._blocks: list[tuple[int, list[_Item]]] = []
        """Kept blocks, each behind its number."""
        self._block: list[_Item] | None = None
        """The block of the present item; None if it is not kept."""
        self._bytes = 0
        """Bytes of the items that are kept of it."""
        self.seen = 0
        """Number of items seen so far."""

    def wants_next(self) -> bool:
        """Count one more item, and return whether it should be added."""
        number, place = divmod(self.seen, _BLOCK)
        self.seen += 1
        if place == 0:
            self._begin(number)
        return self._block is not None and self._bytes < self._most_bytes

    def add(self, item: _Item, size: int) -> None:
        """Keep the item that was counted last, which takes `size` bytes."""
        if self._block is None:
            raise ValueError("the item is not wanted")
        self._block.append(item)
        self._bytes += size

    @property
    def items(self) -> list[_Item]:
        """The items that are kept, in the order in which they came."""
        return [item for _, block in sorted(self._blocks, key=lambda each: each[0]) for item in block]

    def _begin(self, number: int) -> None:
        self._block, self._bytes = None, 0
        if len(self._blocks) < self._most_blocks:
            self._block = []
            self._blocks.append((number, self._block))
        elif (place := self._draw.randrange(number + 1)) < self._most_blocks:
            self._block = []
            self._blocks[place] = number, self._block
