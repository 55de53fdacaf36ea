"""Admission of requests when capacity is short.

The rule is that of dynamic thresholds (Choudhury and Hahne 1998): an owner may hold as much as is left free, times its
weight. A single owner gets half of the capacity, and two get a third each; others never take all of it, and a request
of an owner that holds nothing may take half of what is left. A further request of an owner may take two thirds of what
it may still have (with weight 1), so that its large requests leave room for its small ones.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from batchwright.decayed_rate import DecayedRate
from batchwright.errors import InvalidRequest, Overloaded
from batchwright.request import Flow

_RATE_SECONDS = 60.0
"""Seconds over which the rate of departures is averaged."""


@dataclass(frozen=True, slots=True)
class Size:
    """Capacity that a request takes until it leaves."""

    sequences: int
    """Number of completions or of texts to embed."""
    tokens: int
    """Estimated prompt tokens, counted once for each sequence."""

    def __add__(self, other: Size) -> Size:
        return Size(self.sequences + other.sequences, self.tokens + other.tokens)

    def __sub__(self, other: Size) -> Size:
        return Size(self.sequences - other.sequences, self.tokens - other.tokens)

    def covers(self, other: Size, times: float = 1.0) -> bool:
        """Return whether `times` this size is at least `other`, in both respects."""
        return other.sequences <= times * self.sequences and other.tokens <= times * self.tokens


_NOTHING = Size(0, 0)


class AdmissionController:
    """Divides a capacity among owners. Times are in seconds of a monotonic clock."""

    def __init__(self, capacity: Size) -> None:
        self.capacity = capacity
        self.held = _NOTHING
        self._held_by: dict[Hashable, Size] = {}
        self._left = DecayedRate(_RATE_SECONDS)
        """Sequences that left, and the seconds for which that was watched."""
        self._last: float | None = None

    def held_by(self, owner: Hashable) -> Size:
        """Return what an owner's requests hold in total."""
        return self._held_by.get(owner, _NOTHING)

    def admit(self, flow: Flow, size: Size, now: float) -> None:
        """Take `size` of the capacity for a request of `flow`; `release` gives it back.

        Raises `InvalidRequest` for a request too large ever to be admitted, `Overloaded` for one too large now.
        """
        self._require_possible(size)
        mine = self.held_by(flow.owner) + size
        free = self.capacity - self.held - size
        is_first = mine == size
        # An owner that holds nothing may hold as much as is left, however small its weight: otherwise its large
        # requests could never be admitted.
        may_have = max(1.0, flow.weight) if is_first else flow.weight
        if not free.covers(mine if is_first else mine + size, may_have):
            raise Overloaded(
                f"{self.held.sequences:,} completions and embeddings are waiting or being computed, "
                f"{self.held_by(flow.owner).sequences:,} of them for you: there is no room for {size.sequences:,} more "
                f"of yours, with some {size.tokens:,} prompt tokens; try again later",
                retry_after=self._seconds_for(size, now),
            )
        self.held += size
        self._held_by[flow.owner] = mine

    def release(self, flow: Flow, size: Size, now: float) -> None:
        """Note that the request that was admitted with this size has left."""
        self.held -= size
        left = self._held_by[flow.owner] - size
        if left == _NOTHING:
            del self._held_by[flow.owner]
        else:
            self._held_by[flow.owner] = left
        self._elapse(now)
        self._left.add(size.sequences)

    def _require_possible(self, size: Size) -> None:
        most = Size(self.capacity.sequences // 2, self.capacity.tokens // 2)
        if size.sequences > most.sequences:
            raise InvalidRequest(
                f"the request asks for {size.sequences:,} completions or embeddings, the most is "
                f"{most.sequences:,}: send several requests"
            )
        if size.tokens > most.tokens:
            raise InvalidRequest(
                f"the prompts of the request have some {size.tokens:,} tokens, those of a prompt with n completions "
                f"counted n times; the most is {most.tokens:,}: send several requests"
            )

    def _seconds_for(self, size: Size, now: float) -> float | None:
        """Return how long it recently took for this much to leave; None while nothing is known."""
        self._elapse(now)
        of_tokens = math.ceil(size.tokens * self.held.sequences / max(1, self.held.tokens))
        sequences = max(1, size.sequences, min(of_tokens, self.held.sequences))
        return sequences * self._left.seconds / self._left.events if self._left.events >= 1.0 else None

    def _elapse(self, now: float) -> None:
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._left.elapse(min(elapsed, _RATE_SECONDS))
        self._last = now
