"""`Attempt`: one request on its way to an endpoint, with the amounts that limits count for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from batchwright.pacing.limits import Use
from batchwright.pacing.sliding_window import Counted, SlidingWindow
from batchwright.pacing.stated_budget import Sent
from batchwright.wire.rate_limits import RateKind

StatedKey: TypeAlias = tuple[RateKind, float | None]
"""What a stated limit counts, and its window in seconds; None: the endpoint does not state the window."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One request on its way."""

    use: Use
    at: float
    """When it was sent."""
    under_way: int
    """Requests under way at that time, including this one."""
    at_once: int
    """The same for all processes that share the endpoint's limits, as far as known."""
    amount: float
    """The amount that it uses of a limit whose unit is unknown."""
    epoch: int
    cap_epoch: int
    is_below: bool
    """Whether it was sent below the limits that refusals have shown."""
    number: int
    """Sequence number among all requests, in the order in which they were sent."""
    configured: Sequence[tuple[SlidingWindow, Counted]]
    stated: dict[StatedKey, Sent] = field(default_factory=dict)
    ended: bool = False
