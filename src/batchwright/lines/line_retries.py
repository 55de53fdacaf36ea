"""Decides whether and when a line that failed is tried again. Pure: time is an argument."""

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


def passing(error: BaseException) -> bool:
    """Whether the same line may well succeed later, after it failed with `error`."""
    if isinstance(error, EndpointError):
        return error.may_pass
    return isinstance(error, (Overloaded, StoreUnavailable))


def nobody_computes(error: BaseException) -> bool:
    """Whether the inference is closed, closing, or known not to answer: the line is not to blame, and is returned."""
    return isinstance(error, (EngineClosed, BatcherClosed, Cancelled, EndpointDown))


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Limits of the tries of one line, and the delays between them, in seconds."""

    max_tries: int = 5
    """Most tries of a line. Failures while no other line succeeds do not count: it is not to blame for an outage."""
    longest: float = 3600.0
    """Time from the first failure of a line after which another failure is final."""
    first_delay: float = 0.5
    longest_delay: float = 60.0
    most_in_vain: int = 100
    """Failures of all lines in a row from which on only one line at a time is tried again, until one succeeds: whatever
    fails all of them should not get many times the requests of the job."""

    def delay(self, failures: int, retry_after: float | None, draw: random.Random) -> float:
        """Seconds until the next try, after `failures` (≥ 1) failures in a row."""
        delay = Backoff(self.first_delay, self.longest_delay, jitter=(0.5, 1.0)).pause(failures, draw.random())
        return delay if retry_after is None else max(delay, min(retry_after, self.longest_delay))


@dataclass(slots=True)
class Failures:
    """Failures of one line since an executor started it."""

    in_a_row: int = 0
    counted: int = 0
    first_at: float = 0.0
    successes: int = 0
    """Number of successes of all lines at the last failure."""

    def may_go_on(self, policy: RetryPolicy, now: float, successes: int) -> bool:
        """Note a failure at `now`, after `successes` lines succeeded in all, and return whether to try again."""
        if not self.in_a_row:
            self.first_at = now
        if not self.in_a_row or successes > self.successes:
            self.counted += 1
        self.in_a_row += 1
        self.successes = successes
        return self.counted < policy.max_tries and now - self.first_at < policy.longest
