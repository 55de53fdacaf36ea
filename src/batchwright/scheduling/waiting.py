"""Sequences that wait for a place, most urgent first."""

from __future__ import annotations

import heapq

from batchwright.scheduling.sequence import Sequence, Status, Urgency

ENDED_KEPT = 64
"""Entries of ended sequences that a queue may hold beside twice those that it needs."""


class WaitingQueue:
    """A heap by urgency. A sequence may be entered again when its urgency has changed: only its last entry counts."""

    def __init__(self) -> None:
        self._heap: list[tuple[Urgency, int, Sequence]] = []
        self._entries = 0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def num_entries(self) -> int:
        """Those that no longer count included."""
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._waiting += 1
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Under its present urgency; an older entry of it is void from now on."""
        self._entries += 1
        sequence.queue_entry = self._entries
        heapq.heappush(self._heap, (sequence.urgency, self._entries, sequence))

    def left(self) -> None:
        """A sequence that waited runs, or has ended: its status must say so before the next call."""
        self._waiting -= 1

    def peek(self) -> Sequence | None:
        """The most urgent one, still in the queue."""
        while self._heap:
            if _is_valid(self._heap[0]):
                return self._heap[0][2]
            heapq.heappop(self._heap)
        return None

    def sweep(self, needed: int) -> None:
        """Let go of ended sequences that lie deep in the heap, once they are most of it."""
        if len(self._heap) > 2 * needed + ENDED_KEPT:
            self._heap = [entry for entry in self._heap if _is_valid(entry)]
            heapq.heapify(self._heap)


def _is_valid(entry: tuple[Urgency, int, Sequence]) -> bool:
    _, serial, sequence = entry
    return sequence.status is Status.WAITING and serial == sequence.queue_entry
