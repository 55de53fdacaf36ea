"""The state of a budget: what is spent, what is reserved, and whether more fits. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from batchwright.pricing.rates import Picodollars

Verdict: TypeAlias = Literal["fits", "wait", "never"]


@dataclass(slots=True)
class SpendingLimit:
    """A budget, in picodollars. For each reservation, call exactly one of `settle`, `release` and `keep`.

    While no answer costs more than was reserved for it, `committed` never exceeds `limit`.
    """

    limit: Picodollars | None = None
    """Most that may be spent; None: no limit, spending is only counted."""
    spent: Picodollars = 0
    """What answers cost."""
    kept: Picodollars = 0
    """Reservations of requests that may have been computed, but whose answers were lost."""
    reserved: Picodollars = 0
    """Reservations of requests under way."""
    inherited: Picodollars = 0
    """Reservations of an earlier run that have not been taken over yet, and perhaps never will be."""

    @property
    def committed(self) -> Picodollars:
        """Total that may have to be paid."""
        return self.spent + self.kept + self.inherited + self.reserved

    @property
    def left(self) -> Picodollars | None:
        """What may still be reserved now; None without a limit."""
        return None if self.limit is None else max(0, self.limit - self.committed)

    def judge(self, amount: Picodollars) -> Verdict:
        """Return whether `amount` fits now, perhaps once requests under way are answered, or in neither case.

        "never" may change only if reservations that an earlier run left are taken up and cost less.
        """
        if self.limit is None or self.committed + amount <= self.limit:
            return "fits"
        return "wait" if self.committed - self.reserved + amount <= self.limit else "never"

    def reserve(self, amount: Picodollars) -> None:
        """Set aside an amount that fits."""
        assert self.judge(amount) == "fits"
        self.reserved += amount

    def take_up(self, amount: Picodollars) -> None:
        """Turn an inherited reservation into that of a request under way."""
        assert amount <= self.inherited
        self.inherited -= amount
        self.reserved += amount

    def settle(self, amount: Picodollars, cost: Picodollars) -> None:
        """Count the cost of the answer for which `amount` was reserved."""
        self._return(amount)
        self.spent += cost

    def release(self, amount: Picodollars) -> None:
        """Return a reservation."""
        self._return(amount)

    def keep(self, amount: Picodollars) -> None:
        """Count a reservation as spent."""
        self._return(amount)
        self.kept += amount

    def _return(self, amount: Picodollars) -> None:
        assert amount <= self.reserved
        self.reserved -= amount
