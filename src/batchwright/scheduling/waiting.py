"""Sequences that wait for a place: those of each request by urgency, and requests by their fair shares."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from typing import TypeAlias

from batchwright.scheduling.fairness import Share, nodes
from batchwright.scheduling.sequence import Sequence, Status, Urgency

_Turn: TypeAlias = tuple[float, float, float, bool, float, float, float, int]

ENDED_KEPT = 64
"""Entries of ended sequences that a queue may hold beside twice those that it needs."""


class WaitingQueue:
    """A heap by urgency. A sequence may be entered again when its urgency has changed: only its last entry counts."""

    def __init__(self) -> None:
        self._heap: list[tuple[Urgency, int, Sequence]] = []
        self._entries = 0
        self._waiting = 0
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._waiting

    @property
    def num_entries(self) -> int:
        """Those that no longer count included."""
        return len(self._heap)

    @property
    def best_priority(self) -> int:
        """Of those that wait; there must be one."""
        return min(self._priorities)

    def add(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._waiting += 1
        self._priorities[sequence.priority] += 1
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Under its present urgency; an older entry of it is void from now on."""
        self._entries += 1
        sequence.queue_entry = self._entries
        heapq.heappush(self._heap, (sequence.urgency, self._entries, sequence))

    def left(self, sequence: Sequence) -> None:
        """A sequence that waited runs, or has ended: its status must say so before the next call."""
        self._waiting -= 1
        self._priorities[sequence.priority] -= 1
        if not self._priorities[sequence.priority]:
            del self._priorities[sequence.priority]

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


class FairQueue:
    """The waiting sequences of one class of traffic: a queue for each request, and turns between these.

    The order is by priority (unless `by_priority` is false), then by the shares of owners, then by those of requests.
    Promotion puts a sequence before the others of its own request only. A request that has no place, and got none for
    as long as promotion takes, goes before the others of its owner; an owner of which that is true, before all others.
    """

    def __init__(self, promote_after: float | None, *, by_priority: bool = True) -> None:
        self._promote_after = math.inf if promote_after is None else promote_after
        self._by_priority = by_priority
        self._queues: dict[Share, WaitingQueue] = {}
        self._waiting = 0
        self._now = 0.0
        self._offers = 0
        self._turns: list[tuple[_Turn, int, Share]] | None = None
        """A heap of the requests, made when a plan first needs it. One whose turn comes sooner now is offered anew."""

    def __len__(self) -> int:
        return self._waiting

    @property
    def num_entries(self) -> int:
        """Those that no longer count included."""
        return sum(queue.num_entries for queue in self._queues.values())

    def begin(self, now: float) -> None:
        """A plan begins: places among the requests are looked at anew."""
        self._now = now
        self._turns = None

    def add(self, sequence: Sequence) -> None:
        share = _share(sequence)
        if share not in self._queues:
            self._queues[share] = WaitingQueue()
        self._queues[share].add(sequence)
        self._waiting += 1
        self._offer(share)

    def enter(self, sequence: Sequence) -> None:
        """As `WaitingQueue.enter`."""
        self._queues[_share(sequence)].enter(sequence)
        self._offer(_share(sequence))

    def left(self, sequence: Sequence) -> None:
        """As `WaitingQueue.left`."""
        share = _share(sequence)
        queue = self._queues[share]
        queue.left(sequence)
        self._waiting -= 1
        if not len(queue):
            del self._queues[share]

    def peek(self) -> Sequence | None:
        """The one that is to have the next place, still in the queue."""
        if len(self._queues) <= 1:
            return next((queue.peek() for queue in self._queues.values()), None)
        if self._turns is None:
            self._turns = []
            for share in self._queues:
                self._offer(share)
        while self._turns:
            turn, number, share = self._turns[0]
            if share not in self._queues:
                heapq.heappop(self._turns)
            elif (now := self._turn(share)) != turn:
                heapq.heapreplace(self._turns, (now, number, share))
            else:
                return self._queues[share].peek()
        return None

    def sweep(self, needed: int) -> None:
        """As `WaitingQueue.sweep`."""
        for queue in self._queues.values():
            queue.sweep(needed)

    def _offer(self, share: Share) -> None:
        if self._turns is not None:
            self._offers += 1
            heapq.heappush(self._turns, (self._turn(share), self._offers, share))

    def _turn(self, share: Share) -> _Turn:
        queue = self._queues[share]
        first = queue.peek()
        if first is None:
            raise RuntimeError("a queue without waiting sequences was kept")
        request, owner = nodes(first)
        settled = not (first.promoted and request.starves(self._now, self._promote_after))
        level: float = queue.best_priority if self._by_priority else 0
        if not settled:
            starves = owner.starves(self._now, self._promote_after)
            level = -math.inf if starves else min(level, *owner.priorities) if self._by_priority else level
        return (
            level, owner.crowd, owner.served, settled, request.crowd, request.served, first.deadline, first.ordinal,
        )  # fmt: skip


def _share(sequence: Sequence) -> Share:
    if sequence.share is None:
        raise ValueError("the sequence was not entered into the shares")
    return sequence.share


def _is_valid(entry: tuple[Urgency, int, Sequence]) -> bool:
    _, serial, sequence = entry
    return sequence.status is Status.WAITING and serial == sequence.queue_entry
