"""Order of turns among many claimants whose keys change constantly."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)

ENDED_KEPT = 64
"""Entries that a heap may hold in addition to two for each valid one."""


class Turns(Generic[_T]):
    """Claimants ordered by key. Keys may grow unnoticed, but a claimant whose key decreases must be `offer`ed again."""

    def __init__(self, key: Callable[[_T], tuple[Any, ...]]) -> None:
        """`key`: present key of a claimant; the smallest has the next turn, and of equal ones the one offered first."""
        self._key = key
        self._heap: list[tuple[tuple[Any, ...], int, _T]] = []
        self._valid: dict[_T, int] = {}
        """Serial number of each claimant's valid entry."""
        self._offers = 0

    def __len__(self) -> int:
        return len(self._valid)

    def offer(self, claimant: _T) -> None:
        """Add a claimant, or read its key again."""
        self._offers += 1
        self._valid[claimant] = self._offers
        heapq.heappush(self._heap, (self._key(claimant), self._offers, claimant))
        if len(self._heap) > 2 * len(self._valid) + ENDED_KEPT:
            self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, claimant: _T) -> None:
        """Remove a claimant. Does nothing if it was not there."""
        self._valid.pop(claimant, None)

    def first(self) -> _T:
        """Return the claimant with the smallest key; there must be one."""
        while True:
            key, serial, claimant = self._heap[0]
            if self._valid.get(claimant) != serial:
                heapq.heappop(self._heap)
            elif (now := self._key(claimant)) != key:
                heapq.heapreplace(self._heap, (now, serial, claimant))
            else:
                return claimant
