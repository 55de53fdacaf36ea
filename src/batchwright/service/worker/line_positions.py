"""`LinePositions`: the order in which the lines of a batch are claimed, decided while its input is validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from batchwright.lines.forecast import LONGEST_COUNTED, answer_limit
from batchwright.planning.arrangement import LineShape, arranged
from batchwright.planning.expected_lengths import ExpectedLengths
from batchwright.planning.prefix_tree import block_ids
from batchwright.store.records import NewLine
from batchwright.wire.fields import expected_tokens, priority_or_default
from batchwright.wire.identity import cacheable_prompt
from batchwright.wire.requests import ENCODER_URLS

_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

_MOST_LINES = 16_384
_MOST_BLOCKS = 2**20
_BLOCK_WORDS = 16
"""Words of eight bytes in which prompts are compared: 128 bytes, about two blocks of a KV cache."""
_TOKEN_BYTES = 4
"""Approximate bytes of a prompt per token: the model that computes it may have any tokenizer."""
_NO_BLOCKS = np.zeros(0, np.int64)


class LinePositions:
    """Gives lines the positions that `arranged` finds for them, within windows of the file.

    Prompts are compared as text, since a store serves workers with any models. All that is known of lengths is what
    the lines themselves say. In a window, lines of a better priority come before others. Lines that are equal in all
    that is compared keep the order of the file: of identical lines, the first is the one that is asked. Lines for which
    nothing is generated keep it too.
    """

    def __init__(self, places: int, *, most_lines: int = _MOST_LINES, most_blocks: int = _MOST_BLOCKS) -> None:
        """`places`: lines that are computed at once; a window has `most_lines` lines, or `most_blocks` blocks of text.

        Raises ValueError unless all are positive.
        """
        if places < 1 or most_lines < 1 or most_blocks < 1:
            raise ValueError(f"places={places}, most_lines={most_lines}, most_blocks={most_blocks}: must be positive")
        self._places, self._most_lines, self._most_blocks = places, most_lines, most_blocks
        self._lines: list[NewLine] = []
        self._shapes: list[LineShape] = []
        self._priorities: list[int] = []
        self._alike: list[int] = []
        """For each line, a hash of what is compared."""
        self._blocks = 0
        self._generates = False
        """Whether answers are generated: all lines of a batch have the same endpoint."""
        self._first = 0
        """Position of the first line of the window."""
        self._prompt_bytes = self._shared_blocks = 0
        """Bytes of all prompts; and of prompts that have a position, the blocks that earlier lines begin with too."""

    @property
    def full(self) -> bool:
        """Whether the window takes no more lines."""
        return len(self._lines) >= self._most_lines or self._blocks >= self._most_blocks

    @property
    def shared(self) -> float | None:
        """Share of the text of all prompts that earlier lines of their windows begin with too; None: there is none."""
        return self._shared_blocks * _BLOCK_WORDS * 8 / self._prompt_bytes if self._prompt_bytes else None

    def add(self, line: NewLine, endpoint: str, body: Mapping[str, Any]) -> None:
        """Add a line. Call it in ascending order of numbers."""
        self._lines.append(line)
        if endpoint in ENCODER_URLS:
            return
        self._generates = True
        scope, prompt = cacheable_prompt(endpoint, body)
        blocks = _blocks_of(scope, prompt)
        limit, expected = answer_limit(body, LONGEST_COUNTED), expected_tokens(body)
        self._shapes.append(LineShape(len(prompt) // _TOKEN_BYTES, limit, blocks, expected))
        self._priorities.append(priority_or_default(body))
        self._alike.append(hash((scope, prompt, limit, expected)))
        self._blocks += len(blocks)
        self._prompt_bytes += len(prompt)

    def window(self, *, more: bool) -> list[NewLine]:
        """Take the lines of the window, by number, with their positions. `more`: whether another comes after it."""
        ranks = self._ranks(more=more).tolist() if self._generates and self._lines else range(len(self._lines))
        lines = [replace(line, position=self._first + rank) for line, rank in zip(self._lines, ranks, strict=True)]
        self._first += len(lines)
        self._lines, self._shapes, self._priorities, self._alike, self._blocks = [], [], [], [], 0
        return lines

    def _ranks(self, *, more: bool) -> _Ints:
        """For each line of the window, its place in the order."""
        priorities, alike = np.array(self._priorities, np.int64), np.array(self._alike, np.int64)
        found = arranged(self._shapes, ExpectedLengths(), places=self._places, more=more)
        self._shared_blocks += found.shared_blocks
        order = np.concatenate([found.first, found.last])
        ranks = np.empty(len(order), np.int64)
        ranks[order[np.argsort(priorities[order], kind="stable")]] = np.arange(len(order))
        # Lines that are alike exchange their places, so that their places ascend with their numbers.
        found_first = np.lexsort((np.arange(len(ranks)), priorities, alike))
        ranks[found_first] = ranks[np.lexsort((ranks, priorities, alike))]
        return ranks


def _blocks_of(scope: bytes, prompt: bytes) -> _Ints:
    """Ids of the full blocks of a prompt; those of prompts that cannot share their prefixes differ."""
    words = np.frombuffer(prompt, np.int64, len(prompt) // 8)
    if len(words) < _BLOCK_WORDS:
        return _NO_BLOCKS
    blocks = block_ids(words, _BLOCK_WORDS)
    blocks[0] ^= hash(scope)
    return blocks
