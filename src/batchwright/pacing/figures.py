"""What a `Pacer` has found, to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LimitFigures:
    """A limit of an endpoint, to be shown."""

    kind: str
    limit: float
    window: float
    """Seconds."""
    left: float
    is_stated: bool
    """Whether the endpoint states it; else the user does."""


@dataclass(frozen=True, slots=True)
class PacerFigures:
    """What a pacer has found, to be shown."""

    sent: int
    """Requests sent, tries that failed included."""
    refused: int
    """Those of them that were refused for a limit."""
    under_way: int
    concurrency: int
    """Requests that may be under way."""
    found_concurrency: bool
    """Whether refusals have shown that no more are accepted at once."""
    found_per_minute: float | None
    """Requests a minute, of the mean size, that a limit admits which is not stated; None: none was found."""
    limits: Sequence[LimitFigures]
    blocked_seconds: float
    """Time for which the endpoint wants no request."""
    waiting: int = 0
    """Requests that wait for their turn."""
    next_in: float = 0.0
    """Seconds until the next of them may go, by limits that are stated or configured and by refusals."""
    waits_for: LimitFigures | None = None
    """The limit for which it waits; None where it is none of `limits`."""
    given_up: int = 0
    """Requests that were sent, and whose answer was not waited for."""
