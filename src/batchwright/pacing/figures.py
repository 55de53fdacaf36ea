"""What a `Pacer` has found, for display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LimitFigures:
    """A limit of an endpoint, for display."""

    kind: str
    limit: float
    window: float
    """Seconds."""
    left: float
    is_stated: bool
    """Whether the endpoint states it; otherwise the user configured it."""


@dataclass(frozen=True, slots=True)
class PacerFigures:
    """What a pacer has found, for display."""

    sent: int
    """Requests sent, including failed tries."""
    refused: int
    """Requests among them that were refused because of a limit."""
    under_way: int
    concurrency: int
    """Requests that may be under way."""
    found_concurrency: bool
    """Whether refusals have shown that no more concurrent requests are accepted."""
    found_per_minute: float | None
    """Requests of the mean size that an unstated limit admits per minute; None: none was found."""
    limits: Sequence[LimitFigures]
    blocked_seconds: float
    """Time for which the endpoint accepts no requests."""
    waiting: int = 0
    """Requests that wait for their turn."""
    next_in: float = 0.0
    """Seconds until the next of them may be sent, given stated and configured limits and refusals."""
    waits_for: LimitFigures | None = None
    """The limit for which it waits; None if it is none of `limits`."""
    given_up: int = 0
    """Requests that were sent and then abandoned without waiting for the answer."""
