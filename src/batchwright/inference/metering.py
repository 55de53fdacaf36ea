"""`Meter`: what calls to an endpoint elsewhere may cost, reserved before they are sent, and what they did cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from batchwright.inference.inference import Call


class Reservation(Protocol):
    """Money set aside for one try of one call. Exactly one of its methods is called, once."""

    def settle(self, endpoint: str, answer: Mapping[str, Any]) -> None:
        """Count what the answer cost, by its `usage`; `endpoint` says which form that has."""

    def release(self) -> None:
        """Give all of it back: the endpoint refused the call, and charges nothing."""

    def keep(self) -> None:
        """Count all of it as spent: the call may have been computed, and nobody knows what it cost."""


class Meter(Protocol):
    """Reserves money for calls, and counts what is spent. All methods are called on one event loop."""

    async def reserve(self, call: Call, body: Mapping[str, Any], size: int, *, batch: bool = False) -> Reservation:
        """Reserve the most that a try may cost: of `body`, which has `size` bytes as JSON; `batch`: at batch prices.

        Waits while only the reservations of other calls are in the way. A line of a provider's batch that was reserved
        when an earlier run was killed, with the same `call.request_id`, is not reserved again: its reservation goes on.

        Raises `BudgetExhausted` when what is left does not cover it, and `InvalidRequest` for a call whose cost has no
        bound, where there is a budget.
        """


class FreeReservation(Reservation):
    """The reservation where nothing is counted."""

    def settle(self, endpoint: str, answer: Mapping[str, Any]) -> None:
        pass

    def release(self) -> None:
        pass

    def keep(self) -> None:
        pass


class NoMeter(Meter):
    """Meter that reserves and counts nothing."""

    async def reserve(self, call: Call, body: Mapping[str, Any], size: int, *, batch: bool = False) -> Reservation:
        return FreeReservation()
