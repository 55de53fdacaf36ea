"""A waiting request as a policy sees it."""

from __future__ import annotations

import math
from collections.abc import Hashable


class Item:
    """One waiting request. Equal only to itself.

    `arrival` and `due` are seconds on the clock of the runtime, `due` being infinite where there is no deadline.
    `length` is in tokens, or in whatever unit the runtime measures: what counts is its proportion to others.
    """

    __slots__ = ("arrival", "due", "key", "length", "level", "max_tokens", "ordinal", "priority", "release", "tenant")

    def __init__(
        self,
        arrival: float,
        length: int = 1,
        *,
        priority: int = 5,
        due: float = math.inf,
        tenant: Hashable = None,
        max_tokens: int = 0,
    ) -> None:
        self.arrival = arrival
        self.length = length
        self.priority = priority
        """Priority; lower is sooner."""
        self.due = due
        self.tenant = tenant
        """Tenant whose share of the model it uses, where a policy divides the model among tenants."""
        self.max_tokens = max_tokens
        """Most tokens that may be generated for it."""
        self.key = 0.0
        """Place in the queue, lower first. Set once, by the order, when the item enters."""
        self.level = 0.0
        """Level, lower is sooner; items of one level may overtake each other. Set once, by the order, on entry."""
        self.release = -math.inf
        """Time until which it may be held back. Set once, by the timing, when the item enters."""
        self.ordinal = -1
        """Serial number in the queue, set by it; -1 when the item is in none."""
