"""`Attempt`: one request on its way to an endpoint, with what limits count for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from batchwright.pacing.limits import Use
from batchwright.pacing.sliding_window import Counted, SlidingWindow
from batchwright.pacing.stated_budget import Sent
from batchwright.wire.rate_limits import RateKind

StatedKey: TypeAlias = tuple[RateKind, float | None]
"""What a stated limit counts, and its window in seconds; None: the endpoint does not name it."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One request on its way."""

    use: Use
    at: float
    """When it was sent."""
    under_way: int
    """Requests under way then, itself included."""
    at_once: int
    """The same of all processes that share the endpoint's limits, as far as is known."""
    amount: float
    """What it counts for a limit of which it is not known what it counts."""
    epoch: int
    cap_epoch: int
    is_below: bool
    """Whether it was sent below the limits that refusals have shown."""
    number: int
    """Of all requests, in the order in which they were sent."""
    configured: Sequence[tuple[SlidingWindow, Counted]]
    stated: dict[StatedKey, Sent] = field(default_factory=dict)
    ended: bool = False
