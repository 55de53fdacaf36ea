"""A table of the ids of lines, which finds duplicates among millions of lines in little memory."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from batchwright.errors import InputError, InvalidRequest

_SPARE = 16


class IdTable:
    """Custom ids seen so far, each with the number of its line.

    An open-addressing table of 128-bit hashes in flat arrays: 36 MB for a million ids, where a set of strings takes
    several times as much and a table on disk is far slower. It is made for a number of lines counted before, so it
    never grows, and its pages take no memory until ids use them (lines without an explicit id use few). Among a million
    ids, two different ones collide with a probability of 10⁻²⁶.
    """

    def __init__(self, expected: int) -> None:
        """`expected`: the largest number of ids that will be claimed, ≥ 0."""
        self._expected = expected
        self._capacity = expected + expected // 2 + _SPARE
        # Scalar access through a memoryview is several times as fast as through the array itself.
        self._high = np.zeros(self._capacity, np.uint64).data
        self._low = np.zeros(self._capacity, np.uint64).data
        self._line = np.zeros(self._capacity, np.uint64).data
        self._used = 0

    def claim(self, custom_id: str, line: int) -> int | None:
        """Give `custom_id` to `line` (≥ 1) and return None, or return the other line that has it already.

        Raises `InputError` when more ids are claimed than were expected: the input grew after it was counted.
        """
        return self.claim_digest(blake2b(custom_id.encode(), digest_size=16).digest(), line)

    def claim_digest(self, digest: bytes, line: int) -> int | None:
        """Like `claim`, for a 16-byte hash of what is claimed."""
        high, low = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        slot = high % self._capacity
        while holder := self._line[slot]:
            if self._high[slot] == high and self._low[slot] == low:
                return None if holder == line else int(holder)
            slot = slot + 1 if slot + 1 < self._capacity else 0
        if self._used >= self._expected:
            raise InputError("the input has more lines than when it was counted: it changed while it was being read")
        self._used += 1
        self._high[slot], self._low[slot], self._line[slot] = high, low, line
        return None

    def assign(self, line: int, custom_id: str | None) -> tuple[str, InvalidRequest | None]:
        """The id under which the result of `line` is written, and the error if the id in the line is taken.

        A line without an id gets `line-<number>`. A line whose id is taken fails, and its error is written under
        `line-<number>`, so that no id is in the output twice. Another call for the same line returns the same.
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
    """The error of a line whose id line `holder` already has. `default`: the id that it got, if it has none itself."""
    which = "This custom_id" if default is None else f"This line has no custom_id, and its default {default!r}"
    return InvalidRequest(
        f"{which} is already used on line {holder}: give each line its own.",
        param="custom_id",
        code="duplicate_custom_id",
    )
