"""Decides which of several identical requests are sent, which wait for another's answer, and which are answered."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

_Line = TypeVar("_Line")

_FAILURES_APART = 2
"""Failures of a request after which lines with it no longer wait for each other."""


class RepeatFinder:
    """Finds out which of many lines have the same request. Holds 24 bytes a line until `repeats` is called."""

    def __init__(self) -> None:
        self._numbers, self._high, self._low = array("Q"), array("Q"), array("Q")

    def add(self, number: int, identity: bytes) -> None:
        """Note a line, by rising number, with the 16 bytes that are equal for identical requests.

        Among a million lines, two different requests are taken for one with a probability of 10⁻²⁷ if these are a hash.
        """
        self._numbers.append(number)
        self._high.append(int.from_bytes(identity[:8], "little"))
        self._low.append(int.from_bytes(identity[8:], "little"))

    def repeats(self) -> Repeats:
        """The groups of lines with the same request. The finder is empty afterwards."""
        numbers, high, low = (np.asarray(each) for each in (self._numbers, self._high, self._low))
        self._numbers, self._high, self._low = array("Q"), array("Q"), array("Q")
        # The second halves need to be looked at only where the first halves are equal.
        by_high = np.argsort(high)
        chosen = by_high[_beside_equal(high[by_high])]
        chosen = chosen[np.lexsort((numbers[chosen], low[chosen], high[chosen]))]
        high, low = high[chosen], low[chosen]
        starts = np.ones(len(chosen), np.bool_)
        starts[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        groups = np.cumsum(starts) - 1
        shared = np.bincount(groups)[groups] > 1 if len(groups) else starts
        by_number = np.argsort(numbers[chosen[shared]])
        ordered = numbers[chosen[shared]][by_number]
        _, renumbered = np.unique(groups[shared], return_inverse=True)
        return Repeats(array("Q", ordered.tobytes()), array("I", renumbered[by_number].astype(np.uintc).tobytes()))


def _beside_equal(ordered: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each of the ordered values has an equal one beside it."""
    found = np.zeros(len(ordered), np.bool_)
    equal = ordered[1:] == ordered[:-1]
    found[1:] |= equal
    found[:-1] |= equal
    return found


class Repeats:
    """Groups of lines with the same request, by line number. Takes 12 bytes for each line and 8 for each group."""

    def __init__(self, numbers: array[int], groups: array[int]) -> None:
        """`numbers`: those of all such lines, rising; `groups`: the group of each, counted from 0."""
        self._numbers = numbers
        self._groups = groups
        self.groups = max(groups, default=-1) + 1
        """Number of groups, each of which has at least two lines."""
        self._firsts = array("Q", bytes(8 * self.groups))
        for number, group in zip(reversed(numbers), reversed(groups), strict=True):
            self._firsts[group] = number

    def __len__(self) -> int:
        """Number of lines in groups."""
        return len(self._numbers)

    def group_of(self, number: int) -> int | None:
        """The group of a line; None if no other line has the same request."""
        index = bisect_left(self._numbers, number)
        return self._groups[index] if index < len(self._numbers) and self._numbers[index] == number else None

    def first_of(self, group: int) -> int:
        """The number of the first line in a group."""
        return self._firsts[group]


class Place(NamedTuple):
    """Place of an answer in the file that holds it."""

    offset: int
    size: int
    """Bytes."""


@dataclass(slots=True)
class _Asked(Generic[_Line]):
    """A request that is in progress."""

    first: _Line
    """The first line with it that was taken up."""
    under_way: int = 1
    """Lines with it that are in progress."""
    waiting: deque[tuple[_Line, int]] = field(default_factory=deque)
    """Lines that wait for the answer, and the bytes of each."""


class Sharing(Generic[_Line]):
    """Has identical requests sent only once, as long as that succeeds, and knows where the answer is.

    While a line is in progress, others with the same request wait, and its answer is for all of them. An error is for
    that line alone, and the next one is sent; after a second error, all the others are sent, since otherwise requests
    that always fail would be sent one after another. Takes 13 bytes for each group, and what waiting lines take.
    """

    def __init__(self, repeats: Repeats) -> None:
        self.repeats = repeats
        self.waiting = 0
        """Number of lines that wait for the answer to another."""
        self.waiting_bytes = 0
        self._offsets = array("q", [-1]) * repeats.groups
        self._sizes = array("I", [0]) * repeats.groups
        self._failures = bytearray(repeats.groups)
        self._asked: dict[int, _Asked[_Line]] = {}

    def answered_at(self, number: int) -> Place | None:
        """The place of the answer to an identical request; None if there is none yet."""
        group = self.repeats.group_of(number)
        if group is None or self._offsets[group] < 0:
            return None
        return Place(self._offsets[group], self._sizes[group])

    def asked_like(self, number: int) -> _Line | None:
        """The first line taken up with the request of line `number`, while one of them is in progress; else None."""
        group = self.repeats.group_of(number)
        asked = None if group is None else self._asked.get(group)
        return None if asked is None else asked.first

    def take_up(self, number: int, line: _Line, size: int) -> bool:
        """Take up a line of `size` bytes that has no answer yet. Returns whether to send it; if not, it waits."""
        group = self.repeats.group_of(number)
        if group is None:
            return True
        asked = self._asked.get(group)
        if asked is None:
            self._asked[group] = _Asked(line)
            return True
        if self._failures[group] >= _FAILURES_APART:
            asked.under_way += 1
            return True
        asked.waiting.append((line, size))
        self.waiting += 1
        self.waiting_bytes += size
        return False

    def know(self, number: int, place: Place) -> None:
        """Note the answer to a line, which may be of an earlier run."""
        group = self.repeats.group_of(number)
        if group is not None and self._offsets[group] < 0:
            self._offsets[group], self._sizes[group] = place

    def answered(self, number: int, place: Place) -> list[_Line]:
        """Note the answer to a line that was sent, and return the lines that waited for it."""
        self.know(number, place)
        group = self.repeats.group_of(number)
        return [] if group is None else self._ended(group, everyone=True)

    def failed(self, number: int) -> list[_Line]:
        """Note the error of a line that was sent, and return the lines to send now."""
        group = self.repeats.group_of(number)
        if group is None:
            return []
        self._failures[group] = min(_FAILURES_APART, self._failures[group] + 1)
        asked = self._asked[group]
        # If there is an answer, nobody waits.
        following = self._ended(group, everyone=self._failures[group] >= _FAILURES_APART)
        if following:
            asked.under_way += len(following)
            self._asked[group] = asked
        return following

    def given_up(self, number: int) -> list[_Line]:
        """Note that a line is not sent after all, and return the lines that waited for it: they are forgotten, too."""
        group = self.repeats.group_of(number)
        return [] if group is None or group not in self._asked else self._ended(group, everyone=True)

    def all_waiting(self) -> list[_Line]:
        """All lines that wait for the answer to another."""
        return [line for asked in self._asked.values() for line, _ in asked.waiting]

    def _ended(self, group: int, *, everyone: bool) -> list[_Line]:
        """End a line that was sent, and return those that no longer wait: one, or everyone."""
        asked = self._asked[group]
        asked.under_way -= 1
        count = len(asked.waiting) if everyone else min(1, len(asked.waiting))
        released = [asked.waiting.popleft() for _ in range(count)]
        self.waiting -= count
        self.waiting_bytes -= sum(size for _, size in released)
        if not asked.under_way:
            del self._asked[group]
        return [line for line, _ in released]
