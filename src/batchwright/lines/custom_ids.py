"""Custom ids by line: duplicates are found among millions of lines in little memory."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from batchwright.errors import InputError, InvalidRequest

_SPARE = 16


class IdTable:
    """Custom ids seen so far, each with the number of its line.

    An open-addressing table of 128-bit hashes in flat arrays: 36 MB for a million ids, where a set of strings takes
    several times that and a table on disk is slower by far. It is made for the number of lines counted before,
    so it never grows, and its pages take no memory until ids use them (lines without an explicit id use few).
    Two different ids collide with a probability of 10⁻²⁶ at a million.
    """

    def __init__(self, expected: int) -> None:
        """`expected` is the number of ids that will be claimed, ≥ 0."""
        self._expected = expected
        self._capacity = expected + expected // 2 + _SPARE
        # Scalar access through a memoryview is several times as fast as through the array itself.
        self._high = np.zeros(self._capacity, np.uint64).data
        self._low = np.zeros(self._capacity, np.uint64).data
        self._line = np.zeros(self._capacity, np.uint64).data
        self._used = 0

    def claim(self, custom_id: str, line: int) -> int | None:
        """Give `custom_id` to `line` (≥ 1), or return the line that has it already.

        Raises `InputError` when more ids are claimed than were expected: the input grew after it was counted.
        """
        digest = blake2b(custom_id.encode(), digest_size=16).digest()
        high, low = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        slot = high % self._capacity
        while holder := self._line[slot]:
            if self._high[slot] == high and self._low[slot] == low:
                return int(holder)
            slot = slot + 1 if slot + 1 < self._capacity else 0
        if self._used >= self._expected:
            raise InputError("the input has more lines than when it was counted: it changed while it was being read")
        self._used += 1
        self._high[slot], self._low[slot], self._line[slot] = high, low, line
        return None

    def assign(self, line: int, custom_id: str | None) -> tuple[str, InvalidRequest | None]:
        """Return the id under which the result of `line` is written, and what is wrong with the id that it asked for.

        A line without an id is called `line-<number>`. One whose id is taken fails, and its error is written under
        `line-<number>`, so that no id is in the output twice.
        """
        default = f"line-{line}"
        wanted = default if custom_id is None else custom_id
        holder = self.claim(wanted, line)
        if holder is None:
            return wanted, None
        name = default
        while self.claim(name, line) is not None:
            name += "~"
        return name, duplicate_id(holder, None if custom_id is not None else default)


def duplicate_id(holder: int, default: str | None = None) -> InvalidRequest:
    """Return the error of a line whose id line `holder` has already; `default` is its own id if it was given none."""
    which = "This custom_id" if default is None else f"This line has no custom_id, and its default {default!r}"
    return InvalidRequest(
        f"{which} is already used on line {holder}: give each line its own.",
        param="custom_id",
        code="duplicate_custom_id",
    )
