"""`JobOrder`: the order in which an engine starts the lines of a job, of which a window is known ahead."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from batchwright.planning.arrangement import Caches, LineShape, arranged
from batchwright.planning.expected_lengths import Cluster, ExpectedLengths

_Item = TypeVar("_Item")

MOST_LINES, MOST_BYTES = 16_384, 2**26
"""Most lines, and most bytes of lines, that are held by default."""
_FIRST_LINES = 4
"""Times for each place that a line is asked for in vain before the first is given, unless the order is full: whoever
asks adds more lines each time."""
_FIRST_LOOK = 64
"""Answers after which the order is decided anew by their lengths; then after twice as many each time."""


@dataclass(slots=True)
class _Entry(Generic[_Item]):
    """A line that was not taken yet."""

    number: int
    item: _Item
    size: int
    shape: LineShape
    priority: int = 0
    cluster: Cluster | None = None
    """Cluster of its answer; None while it has no place in the order."""


class JobOrder(Generic[_Item]):
    """Hands out lines in the order that `arranged` finds for those that are held.

    At most `most_lines` lines or `most_bytes` bytes are held. The first line is handed out when a few for each place
    are there; until the order is full, more lines should be added than taken. It is decided anew when as many lines are
    new as have a place in it, and when the lengths of answers say more than before. Lines that are kept for the end
    wait for the end of the job. A line with a priority of its own goes before all others, or after them.
    """

    def __init__(
        self,
        places: int,
        *,
        caches: Caches | None = None,
        most_lines: int = MOST_LINES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`places`: number of lines that are computed at once; `caches`: those of the engines, None: one, of any size.

        Raises ValueError unless all are positive.
        """
        if places < 1 or most_lines < 1 or most_bytes < 1:
            raise ValueError(f"places={places}, most_lines={most_lines}, most_bytes={most_bytes}: must be at least 1")
        self._places, self._caches = places, caches
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self.lengths = ExpectedLengths()
        self._urgent: list[_Entry[_Item]] = []
        self._late: list[_Entry[_Item]] = []
        self._added: list[_Entry[_Item]] = []
        """Lines without a place in the order."""
        self._first: deque[_Entry[_Item]] = deque()
        self._last: deque[_Entry[_Item]] = deque()
        """Lines that are kept for the end of the job."""
        self._bytes = 0
        self._cached: LineShape | None = None
        """The line that was taken last, whose prefix is in the cache."""
        self._under_way: dict[int, Cluster] = {}
        """Clusters of the lines that were taken and have not ended, by number."""
        self._look_at = _FIRST_LOOK
        self._has_begun = False
        """Whether a line was taken."""
        self._waited = 0
        """Times in a row that no line was given while others could still be added."""

    def __len__(self) -> int:
        """Number of lines that were added and not taken."""
        return sum(map(len, (self._urgent, self._late, self._added, self._first, self._last)))

    @property
    def full(self) -> bool:
        """Whether no more lines are accepted until others are taken."""
        return len(self) >= self._most_lines or self._bytes >= self._most_bytes

    def add(self, number: int, item: _Item, *, size: int, shape: LineShape, priority: int | None = None) -> None:
        """Add a line that takes `size` bytes.

        `priority` is for a line that waits for no other: up to 0 it goes before those without one, above 0 after them;
        lower values go first.
        """
        entry = _Entry(number, item, size + 8 * len(shape.blocks), shape, priority or 0)
        self._bytes += entry.size
        if priority is None:
            self._added.append(entry)
        else:
            insort(self._urgent if priority <= 0 else self._late, entry, key=lambda each: (each.priority, each.number))

    def take(self, *, more: bool) -> _Item | None:
        """Take the next line; None if there is none, or if the order is decided only when more are added.

        `more`: whether lines can still be added, now or once others were taken.
        """
        has_next = bool(self._first or (self._urgent and self._has_begun))
        if more and not self.full and not has_next and self._waited < _FIRST_LINES * self._places:
            self._waited += 1
            return None
        self._waited = 0
        if self._urgent:
            return self._taken(self._urgent.pop(0))
        if self._is_outdated(more=more):
            self._arrange(more=more)
        for lines in (self._first, self._last):
            if lines:
                return self._taken(lines.popleft())
        return self._taken(self._late.pop(0)) if self._late else None

    def expected(self, number: int, limit: int) -> float | None:
        """Tokens expected of the answer to a line that was taken; None while nothing was learned."""
        cluster = self._under_way.get(number)
        return None if cluster is None or not self.lengths.observed else self.lengths.mean(cluster, limit)

    def ended(self, number: int, tokens: int | None) -> None:
        """Note that a line that was taken has an answer of `tokens` tokens; None: it has no answer."""
        cluster = self._under_way.pop(number, None)
        if cluster is not None and tokens is not None:
            self.lengths.observe(cluster, tokens)

    def _is_outdated(self, *, more: bool) -> bool:
        if len(self._added) >= max(1, len(self._first)) or (self._added and not more):
            return True
        return self.lengths.observed >= self._look_at

    def _arrange(self, *, more: bool) -> None:
        self._look_at = max(_FIRST_LOOK, 2 * self.lengths.observed)
        entries = sorted((*self._first, *self._last, *self._added), key=lambda each: each.number)
        cached = None if self._cached is None else self._cached.blocks
        found = arranged(
            [each.shape for each in entries],
            self.lengths,
            places=self._places,
            caches=self._caches,
            cached=cached,
            earlier=[each.cluster for each in entries],
            more=more,
        )
        for entry, cluster in zip(entries, found.clusters, strict=True):
            entry.cluster = cluster
        self._first = deque(entries[index] for index in found.first)
        self._last = deque(entries[index] for index in found.last)
        self._added = []

    def _taken(self, entry: _Entry[_Item]) -> _Item:
        self._bytes -= entry.size
        self._has_begun = True
        if len(entry.shape.blocks):
            self._cached = entry.shape
        self._under_way[entry.number] = entry.cluster or ExpectedLengths.cluster(entry.shape.prompt_tokens)
        return entry.item
