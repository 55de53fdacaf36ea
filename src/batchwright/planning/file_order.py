"""`FileOrder`: an order of the lines of a file that is longer than the windows in which lines are arranged."""

from __future__ import annotations

import zlib
from array import array

import numpy as np

_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
_Words = np.ndarray[tuple[int], np.dtype[np.uint64]]

_SIZES = (256, 1024, 4096, 16384)
"""Bytes of the prefixes that are compared."""
_BITS = 32
"""Bits of the hash of a prefix, which is 0 where the prompt is shorter. Of a million, a few hundred agree by chance."""
_PIECE = 2**20
"""Lines that are processed together."""
_LEAST_GAIN = 0.02
"""Share of the text of all prompts that an order must find shared, beyond what windows of the file find."""


class FileOrder:
    """Finds an order in which lines that begin alike follow one another, for a file of any length.

    A line is identified by hashes of prefixes of its prompt, of 256 bytes and each time four times as many up to 16
    KiB; they take 16 bytes. Lines with the same hashes may differ: the windows through which the file then goes are
    arranged by all of their tokens. This only decides which lines meet in a window.
    """

    def __init__(self, least_shared: int = 0) -> None:
        """`least_shared`: bytes below which a shared prefix is worth nothing."""
        self._least_shared = least_shared
        self._high, self._low = array("Q"), array("Q")
        self._bytes = 0

    def __len__(self) -> int:
        """Number of lines."""
        return len(self._high)

    def add(self, scope: bytes, prompt: bytes) -> None:
        """Note the next line of the file, which can share the prefix of its prompt with others of its `scope`."""
        found, begin, hashed = 0, 0, zlib.crc32(scope)
        for end in _SIZES:
            found <<= _BITS
            if end <= len(prompt):
                hashed = zlib.crc32(prompt[begin:end], hashed)
                found |= hashed or 1
            begin = end
        self._high.append(found >> 64)
        self._low.append(found & 0xFFFF_FFFF_FFFF_FFFF)
        self._bytes += len(prompt)

    def order(self, most_lines: int, most_bytes: int) -> _Ints | None:
        """The lines, counted from 0, in an order in which windows of the file find more of what they share.

        Groups of lines go where the first of them is in the file. None: windows of `most_lines` lines, or of
        `most_bytes` bytes of prompts, find about as much in the order of the file.
        """
        window = max(1, min(most_lines, int(most_bytes * len(self) / max(1, self._bytes))))
        if len(self) <= window:
            return None
        high, low = (np.frombuffer(each, np.uint64) for each in (self._high, self._low))
        found = np.lexsort((low, high))
        # In pieces, as all values in another order would take as much memory again.
        pieces = (found[first : first + _PIECE + 1] for first in range(0, len(found), _PIECE))
        gained = sum(self._shared_bytes(high[piece], low[piece]) for piece in pieces)
        for first in range(0, len(found), window):
            of_window = high[first : first + window], low[first : first + window]
            within = np.lexsort(of_window[::-1])
            gained -= self._shared_bytes(*(values[within] for values in of_window))
        return None if gained < _LEAST_GAIN * self._bytes else _by_first(found, high)

    def _shared_bytes(self, high: _Words, low: _Words) -> int:
        """Sum of the bytes that each line, by `high` and `low`, has in common with the start of the one before it."""
        is_same = np.ones(max(0, len(high) - 1), np.bool_)
        total, counted = 0, 0
        for level, end in enumerate(_SIZES):
            word = _word(high, low, level)
            is_same &= (word[1:] == word[:-1]) & (word[1:] != 0)
            if end >= self._least_shared:
                total += int(is_same.sum()) * (end - counted)
                counted = end
        return total


def _word(high: _Words, low: _Words, level: int) -> _Words:
    """The hashes of the prefixes of a size, by the place of the size."""
    word: _Words = (high if level < 2 else low) >> np.uint64(0 if level % 2 else _BITS) & np.uint64(2**_BITS - 1)
    return word


def _by_first(found: _Ints, high: _Words) -> _Ints:
    """The lines of `found`, group by group, in the order of the first line of each. `high`: of all lines.

    A group has the same prefix of the shortest size; a line that is too short for that is one by itself.
    """
    word = (high >> np.uint64(_BITS)).astype(np.uint32)[found]
    is_first = np.ones(len(found), np.bool_)
    is_first[1:] = (word[1:] != word[:-1]) | (word[1:] == 0)
    firsts = np.minimum.reduceat(found, np.flatnonzero(is_first))
    order: _Ints = found[np.argsort(firsts[np.cumsum(is_first) - 1], kind="stable")]
    return order
