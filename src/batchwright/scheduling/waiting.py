"""Sequences that wait for a place: ordered by urgency within a request, and requests by their fair shares."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from typing import TypeAlias

from batchwright.limiting.turns import ENDED_KEPT, Turns
from batchwright.scheduling.fairness import Share, nodes
from batchwright.scheduling.sequence import Sequence, Status, Urgency

_Turn: TypeAlias = tuple[float, ...]


class WaitingQueue:
    """A heap by urgency. A sequence may be entered again after its urgency has changed: only its last entry counts."""

    def __init__(self) -> None:
        self._heap: list[tuple[Urgency, int, Sequence]] = []
        self._entries = 0
        self._waiting = 0
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._waiting

    @property
    def num_entries(self) -> int:
        """Number of entries, including those that no longer count."""
        return len(self._heap)

    @property
    def best_priority(self) -> int:
        """Best priority of a waiting sequence; there must be one."""
        return min(self._priorities)

    def add(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._waiting += 1
        self._priorities[sequence.priority] += 1
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Add a sequence under its present urgency; an older entry of it no longer counts."""
        self._entries += 1
        sequence.queue_entry = self._entries
        heapq.heappush(self._heap, (sequence.urgency, self._entries, sequence))

    def left(self, sequence: Sequence) -> None:
        """Record that a waiting sequence runs, or has ended: its status must say so before the next call."""
        self._waiting -= 1
        self._priorities[sequence.priority] -= 1
        if not self._priorities[sequence.priority]:
            del self._priorities[sequence.priority]

    def peek(self) -> Sequence | None:
        """Return the most urgent sequence, which stays in the queue."""
        while self._heap:
            if _is_valid(self._heap[0]):
                return self._heap[0][2]
            heapq.heappop(self._heap)
        return None

    def sweep(self) -> None:
        """Remove ended sequences deep in the heap, once they are most of it."""
        if len(self._heap) > 2 * self._waiting + ENDED_KEPT:
            self._heap = [entry for entry in self._heap if _is_valid(entry)]
            heapq.heapify(self._heap)


class FairQueue:
    """Waiting sequences of one class of traffic, with a queue for each request, and turns among requests.

    The order is by priority (unless `by_priority` is false), then by the shares of owners, then by those of requests.
    Promotion puts a sequence only before the others of its own request. A request that has no place, and has had none
    for as long as promotion takes, goes before the others of its owner; such an owner goes before all other owners.
    """

    def __init__(self, promote_after: float | None, *, by_priority: bool = True) -> None:
        self._promote_after = math.inf if promote_after is None else promote_after
        self._by_priority = by_priority
        self._queues: dict[Share, WaitingQueue] = {}
        self._requests: dict[Share, Turns[Share]] = {}
        """Waiting requests by owner."""
        self._owners = Turns(self._turn_of_owner)
        self._changed: set[Share] = set()
        """Requests whose turn, or whose owner's turn, may come sooner than queued."""
        self._alarms: list[tuple[float, int, Share]] = []
        """Heap of times at which a request, or its owner, may have gone without a place for too long."""
        self._alarms_set = 0
        self._waiting = 0
        self._now = 0.0

    def __len__(self) -> int:
        return self._waiting

    @property
    def num_entries(self) -> int:
        """Number of entries, including those that no longer count."""
        return sum(queue.num_entries for queue in self._queues.values())

    def begin(self, now: float) -> None:
        """Begin a plan."""
        self._now = now
        while self._alarms and self._alarms[0][0] <= now:
            self._changed.add(heapq.heappop(self._alarms)[2])

    def add(self, sequence: Sequence) -> None:
        share = _share(sequence)
        if share not in self._queues:
            self._queues[share] = WaitingQueue()
        self._queues[share].add(sequence)
        self._waiting += 1
        self._changed.add(share)

    def enter(self, sequence: Sequence) -> None:
        """Do as `WaitingQueue.enter`."""
        self._queues[_share(sequence)].enter(sequence)
        self._changed.add(_share(sequence))

    def left(self, sequence: Sequence) -> None:
        """Do as `WaitingQueue.left`."""
        share = _share(sequence)
        queue = self._queues[share]
        queue.left(sequence)
        self._waiting -= 1
        if len(queue):
            self._changed.add(share)
        else:
            self._remove(share)

    def place_lost(self, sequence: Sequence) -> None:
        """Record that a running sequence has lost its place: the turn of its share comes sooner."""
        share = _share(sequence)
        if share in self._queues:
            self._changed.add(share)
        elif (requests := self._requests.get(nodes(sequence)[1])) is not None:
            self._changed.add(requests.first())

    def peek(self) -> Sequence | None:
        """Return the sequence that gets the next place, which stays in the queue."""
        if len(self._queues) <= 1:
            return next((queue.peek() for queue in self._queues.values()), None)
        changed, self._changed = self._changed, set()
        for share in changed:
            if share in self._queues:
                self._offer(share)
        return self._queues[self._requests[self._owners.first()].first()].peek()

    def sweep(self, sequence: Sequence) -> None:
        """Do as `WaitingQueue.sweep`, in the queue of this sequence, which has ended."""
        if (queue := self._queues.get(_share(sequence))) is not None:
            queue.sweep()

    def _remove(self, share: Share) -> None:
        del self._queues[share]
        self._changed.discard(share)
        owner = _owner(share)
        if (requests := self._requests.get(owner)) is not None:
            requests.remove(share)
            if not len(requests):
                del self._requests[owner]
                self._owners.remove(owner)

    def _offer(self, share: Share) -> None:
        owner = _owner(share)
        if owner not in self._requests:
            self._requests[owner] = Turns(self._turn_of_request)
        self._requests[owner].offer(share)
        self._owners.offer(owner)
        if self._first(share).promoted:
            for each in (share, owner):
                if not each.places and not each.starves(self._now, self._promote_after):
                    self._alarms_set += 1
                    due = each.placed_at + self._promote_after
                    heapq.heappush(self._alarms, (due, self._alarms_set, share))

    def _first(self, request: Share) -> Sequence:
        first = self._queues[request].peek()
        if first is None:
            raise RuntimeError("a queue without waiting sequences was kept")
        return first

    def _turn_of_request(self, request: Share) -> _Turn:
        """Return a request's turn among those of its owner."""
        first = self._first(request)
        settled = not (first.promoted and request.starves(self._now, self._promote_after))
        level: float = self._queues[request].best_priority if self._by_priority and settled else 0
        return (settled, level, request.weighted_places, request.served, first.deadline, first.ordinal)

    def _turn_of_owner(self, owner: Share) -> _Turn:
        of_request = self._turn_of_request(self._requests[owner].first())
        settled, level = of_request[:2]
        if not settled:
            best: float = min(owner.priorities) if self._by_priority else 0
            level = -math.inf if owner.starves(self._now, self._promote_after) else best
        return (level, owner.weighted_places, owner.served, *of_request)


def _owner(request: Share) -> Share:
    if request.parent is None:
        raise ValueError("the share of a request has an owner")
    return request.parent


def _share(sequence: Sequence) -> Share:
    if sequence.share is None:
        raise ValueError("the sequence was not entered into the shares")
    return sequence.share


def _is_valid(entry: tuple[Urgency, int, Sequence]) -> bool:
    _, serial, sequence = entry
    return sequence.status is Status.WAITING and serial == sequence.queue_entry
