"""What a policy knows of a request that waits."""

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
        """Lower is sooner."""
        self.due = due
        self.tenant = tenant
        """Whose share of the model it takes, where a policy shares it out."""
        self.max_tokens = max_tokens
        """How many tokens may be generated for it."""
        self.key = 0.0
        """Its place in the queue, lower first. Set once, by the order, when it enters."""
        self.level = 0.0
        """Lower is sooner; items of one level may overtake each other. Set once, by the order, when it enters."""
        self.release = -math.inf
        """Until when it may be held back. Set once, by the timing, when it enters."""
        self.ordinal = -1
        """Counts the items of a queue; -1 when it is in none. Set by the queue."""
