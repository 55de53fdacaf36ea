"""Requests of a simulation: lengths and times, and which prompts begin alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchwright.planning.arrangement import LineShape
from batchwright.request import Flow, Traffic
from batchwright.routing.prefixes import KEY_TOKENS, MOST_KEYS

_SERIALS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """A request for which only the lengths are known. Raises ValueError for lengths below 1 or a time below 0."""

    arrived_at: float = 0.0
    """Seconds from the beginning."""
    prompt_tokens: int
    output_tokens: int
    """Tokens of its answer."""
    max_tokens: int = 0
    """Most tokens that were asked for; 0: as many as there are."""
    traffic: Traffic = "online"
    blocks: tuple[int, ...] = ()
    """Ids of the blocks of its prompt, from the first on: prompts begin alike as far as these are equal."""
    block_tokens: int = 512
    """Tokens of such a block."""
    flow: Flow | None = None
    expected_tokens: int | None = None
    """Tokens of its answer that are expected beforehand, which a planner is given; None: nothing is known."""

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.output_tokens) < 1 or not self.arrived_at >= 0.0 or self.block_tokens < 1:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens}, output_tokens={self.output_tokens}, "
                f"arrived_at={self.arrived_at}: lengths must be at least 1, and a time at least 0"
            )

    @property
    def limit(self) -> int:
        """Most tokens that its answer may have."""
        return max(self.max_tokens, self.output_tokens)

    def tokens(self, serial: int) -> list[int]:
        """Return stand-ins for its prompt's tokens, equal to others' where the prompts are; `serial`: its own number.

        Tokens in no block are its own.
        """
        own, size, count = own_token(serial), self.block_tokens, self.prompt_tokens
        found: list[int] = []
        for block in self.blocks[: count // size]:
            found += [block] * size
        return found + [own] * (count - len(found))

    def shape(self, block_size: int) -> LineShape:
        """Return what a planner knows of it before it is computed, in blocks of `block_size` tokens."""
        each = self.block_tokens // block_size
        whole = np.array(self.blocks[: self.prompt_tokens // self.block_tokens], dtype=np.int64)
        return LineShape(self.prompt_tokens, self.limit, np.repeat(whole, each), self.expected_tokens)

    @property
    def prefix_keys(self) -> tuple[int, ...]:
        """Keys of the prefixes of its prompt, one for each `KEY_TOKENS`, as a router compares them."""
        whole = self.blocks[: self.prompt_tokens // self.block_tokens]
        keys, chain, chained = list[int](), 0, 0
        for count in range(1, min(MOST_KEYS, len(whole) * self.block_tokens // KEY_TOKENS) + 1):
            needed = -(-count * KEY_TOKENS // self.block_tokens)
            for block in whole[chained:needed]:
                chain = hash((chain, block)) & 0xFFFFFFFFFFFF
            chained = needed
            keys.append(chain << 12 | count)
        return tuple(keys)


def own_token(serial: int) -> int:
    """Return a token that only the request with this number has."""
    return _SERIALS + serial
