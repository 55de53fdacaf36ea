"""When a line that failed is tried again. Pure: time comes in as an argument."""

from __future__ import annotations

import random
from dataclasses import dataclass

from batchwright.backoff import Backoff
from batchwright.errors import (
    BatcherClosed,
    Cancelled,
    EndpointDown,
    EndpointError,
    EngineClosed,
    Overloaded,
    StoreUnavailable,
)

_PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})


def passing(error: BaseException) -> bool:
    """Return whether the same line may well succeed later."""
    if isinstance(error, EndpointError):
        return error.status is None or error.status in _PASSING_STATUSES
    return isinstance(error, (Overloaded, StoreUnavailable))


def nobody_computes(error: BaseException) -> bool:
    """Return whether what computes is gone, going, or known not to answer: then the line is given back."""
    return isinstance(error, (EngineClosed, BatcherClosed, Cancelled, EndpointDown))


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Number and delays of retries, in seconds."""

    max_tries: int = 5
    """Tries of one line, without those that failed while no other line succeeded either: an outage is not its fault."""
    longest: float = 3600.0
    """Seconds from its first failure; a line that still fails after that fails for good."""
    first_delay: float = 0.5
    longest_delay: float = 60.0

    def delay(self, failures: int, retry_after: float | None, draw: random.Random) -> float:
        """Return the seconds after which to try again, `failures` (≥ 1) having been seen in a row."""
        backoff = Backoff(self.first_delay, self.longest_delay, jitter=(0.5, 1.0))
        delay = backoff.pause(failures, draw.random())
        return delay if retry_after is None else max(delay, min(retry_after, self.longest_delay))


@dataclass(slots=True)
class Failures:
    """Failures of one line since it was taken up."""

    in_a_row: int = 0
    counted: int = 0
    first_at: float = 0.0
    successes: int = 0
    """Number of successes of all lines when it last failed."""

    def may_go_on(self, policy: RetryPolicy, now: float, successes: int) -> bool:
        """Note a failure at `now`, when `successes` lines had succeeded in all; return whether to try again."""
        if not self.in_a_row:
            self.first_at = now
        if not self.in_a_row or successes > self.successes:
            self.counted += 1
        self.in_a_row += 1
        self.successes = successes
        return self.counted < policy.max_tries and now - self.first_at < policy.longest
