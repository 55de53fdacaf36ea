"""How much may wait, and what is said to those for whom there is no room."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.errors import Overloaded


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """What a batcher takes on at most."""

    waiting: int
    """Requests that wait: in the queue, or to be computed again because their batch failed."""
    waiting_tokens: int | None
    """Their lengths in all."""
    isolate: bool
    """Whether a batch that raises is computed again in parts, until the request that is to blame is alone."""

    def exceeded(self, waiting: int, tokens: int, length: int) -> str | None:
        """Why one of `length` more is too many, while `waiting` requests of `tokens` in all wait; None: there is room.

        A request is never too long to wait alone.
        """
        if waiting >= self.waiting:
            return f"{waiting} requests wait, the limit is {self.waiting}"
        if self.waiting_tokens is not None and waiting and tokens + length > self.waiting_tokens:
            return f"requests of {tokens} tokens wait and this one has {length}, the limit is {self.waiting_tokens}"
        return None


def overloaded(reason: str, after: float | None) -> Overloaded:
    """The error for one more than there is room for; `after` is in how many seconds there will be, if that is known."""
    advice = "try again later" if after is None else f"try again in {after:.3g} s"
    return Overloaded(f"the queue is full: {reason}; {advice}", retry_after=after)
