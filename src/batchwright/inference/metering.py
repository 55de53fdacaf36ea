"""`Meter`: reserves what calls to a remote endpoint may cost before they are sent, and counts what they did cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Protocol

from batchwright.errors import BatchwrightError, EndpointDown, EndpointError, EndpointUnreachable, EngineClosed
from batchwright.inference.inference import Call

_MAYBE_COMPUTED = frozenset({HTTPStatus.GATEWAY_TIMEOUT, 524})
"""Statuses with which a proxy says that the endpoint received the request but took too long."""


class Reservation(Protocol):
    """Money reserved for one try of one call. Exactly one of its methods is called, once."""

    def settle(self, endpoint: str, answer: Mapping[str, Any]) -> None:
        """Count what the answer cost, by its `usage`, whose form depends on `endpoint`."""

    def release(self) -> None:
        """Return all of it: the endpoint refused the call, and charges nothing."""

    def keep(self) -> None:
        """Count all of it as spent: the call may have been computed, at an unknown cost."""


class Meter(Protocol):
    """Reserves money for calls, and counts what is spent. All methods are called on one event loop."""

    async def reserve(
        self, call: Call, body: Mapping[str, Any], size: int, *, batch: bool = False, is_fetched: bool = False
    ) -> Reservation:
        """Reserve the most that a try of `body`, which has `size` bytes as JSON, may cost; `batch`: at batch prices.

        Waits if only other calls' reservations are in the way, and notifies `call.pauses`. A line of a provider's batch
        that had a reservation when an earlier run was killed, with the same `call.request_id`, keeps it and gets no new
        one. `is_fetched`: its result is here already, so if nothing is reserved for it any more, it has been counted
        before.

        Raises `BudgetExhausted` if the remaining budget does not cover it, and `InvalidRequest` for a call whose cost
        has no limit, if there is a budget.
        """


class WaitsForBudget(BatchwrightError):
    """Reason why an unsent call waits: the money is reserved for calls in progress."""

    code = "waits_for_budget"


WAITS_FOR_BUDGET = WaitsForBudget("what is left of the budget is reserved for requests under way")


class FreeReservation(Reservation):
    """The reservation for use without counting."""

    def settle(self, endpoint: str, answer: Mapping[str, Any]) -> None:
        pass

    def release(self) -> None:
        pass

    def keep(self) -> None:
        pass


class CountingMeter(Meter):
    """Counts the calls that wait for their reservation by another meter, by the names that `name_of` returns."""

    def __init__(self, meter: Meter, name_of: Callable[[Call], str]) -> None:
        self._meter = meter
        self._name_of = name_of
        self.waiting: Counter[str] = Counter()

    async def reserve(
        self, call: Call, body: Mapping[str, Any], size: int, *, batch: bool = False, is_fetched: bool = False
    ) -> Reservation:
        name = self._name_of(call)
        self.waiting[name] += 1
        try:
            return await self._meter.reserve(call, body, size, batch=batch, is_fetched=is_fetched)
        finally:
            self.waiting[name] -= 1


class NoMeter(Meter):
    """Meter that reserves and counts nothing."""

    async def reserve(
        self, call: Call, body: Mapping[str, Any], size: int, *, batch: bool = False, is_fetched: bool = False
    ) -> Reservation:
        return FreeReservation()


async def metered_answer(
    meter: Meter, call: Call, body: Mapping[str, Any], size: int, send: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the answer of one try, `send`, after reserving money for it. Raises what both raise."""
    reservation = await meter.reserve(call, body, size)
    try:
        answer = await send()
    except BaseException as error:
        give_up(reservation, error)
        raise
    reservation.settle(call.endpoint, answer)
    return answer


async def metered_chunks(
    meter: Meter,
    call: Call,
    body: Mapping[str, Any],
    size: int,
    send: Callable[[], AsyncGenerator[dict[str, Any]]],
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the chunks of one try, `send`, after reserving money for it. The last `usage` is what it cost."""
    reservation = await meter.reserve(call, body, size)
    last: dict[str, Any] | None = None
    has_begun = False
    try:
        async with aclosing(send()) as chunks:
            async for chunk in chunks:
                has_begun = True
                if chunk.get("usage"):
                    last = chunk
                yield chunk
    except BaseException as error:
        if has_begun:
            reservation.keep()
        else:
            give_up(reservation, error)
        raise
    reservation.settle(call.endpoint, last or {})


def give_up(reservation: Reservation, error: BaseException) -> None:
    """Release the reservation of a try that failed with `error` if it was certainly not computed, else keep it."""
    if isinstance(error, EndpointUnreachable):
        refused = not error.sent
    elif isinstance(error, EndpointError):
        status = error.status
        refused = status is not None and status >= HTTPStatus.MULTIPLE_CHOICES and status not in _MAYBE_COMPUTED
    else:
        refused = isinstance(error, (EngineClosed, EndpointDown))  # raised before anything is sent
    if refused:
        reservation.release()
    else:
        reservation.keep()
