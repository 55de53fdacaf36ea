"""Limits on waiting requests, and the error for a request beyond them."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.errors import Overloaded


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """Limits on the requests of a batcher."""

    waiting: int
    """Most waiting requests: in the queue, or to be computed again because their batch failed."""
    waiting_tokens: int | None
    """Most tokens of all waiting requests; None: any number."""
    isolate: bool
    """Whether a batch that raises is computed again in parts, until the request at fault is alone."""
    retries: int = 0
    """How often a request that failed by itself is retried."""

    def exceeded(self, waiting: int, tokens: int, length: int) -> str | None:
        """Return why there is no room for `length` beside `waiting` requests of `tokens` in total; None if there is.

        A request is never too long to wait alone.
        """
        if waiting >= self.waiting:
            return f"{waiting} requests wait, the limit is {self.waiting}"
        if self.waiting_tokens is not None and waiting and tokens + length > self.waiting_tokens:
            return f"requests of {tokens} tokens wait and this one has {length}, the limit is {self.waiting_tokens}"
        return None


def model_down(error: BaseException, after: float) -> Overloaded:
    """Return the error for a request not computed because the model fails every request, the last one with `error`."""
    failure = Overloaded(
        f"the model is down: it fails every request, the last with {type(error).__name__}; try again in {after:.3g} s",
        retry_after=after,
    )
    failure.__cause__ = error
    return failure


def overloaded(reason: str, after: float | None) -> Overloaded:
    """Return the error for a request without room; `after`: seconds until there will be, if known."""
    advice = "try again later" if after is None else f"try again in {after:.3g} s"
    return Overloaded(f"the queue is full: {reason}; {advice}", retry_after=after)
