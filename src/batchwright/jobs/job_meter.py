"""`JobMeter`: what the requests of a job may cost and have cost, within its budget."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchwright.errors import BudgetExhausted, InvalidRequest, RunFailed, shown
from batchwright.inference.inference import Call
from batchwright.inference.metering import WAITS_FOR_BUDGET, FreeReservation, Meter, Reservation
from batchwright.jobs.spend_journal import OpenReservation, Settlement, SpendJournal, SpendTotals
from batchwright.pricing.bounds import most_cost
from batchwright.pricing.price_sources import PriceBook
from batchwright.pricing.rates import ModelPrices, Picodollars, shown_dollars
from batchwright.pricing.spending_limit import SpendingLimit
from batchwright.pricing.usage import rates_of, read_usage

_log = logging.getLogger(__name__)
_MOST: Picodollars = 2**62
"""Amount from which on it cannot be recorded."""


class JobMeter(Meter):
    """Reserves the most that each request of a job may cost, and counts what it has cost, over all runs of the job.

    - `limit`: the budget of all runs, in picodollars; None: what is spent is only counted.
    - `journal`: holds what earlier runs spent, and records what this one spends.
    - `states_costs`: whether `cost_of` will be asked.

    Requests that wait for the reservations of others get theirs in the order in which they came.
    """

    def __init__(
        self,
        prices: PriceBook,
        journal: SpendJournal,
        *,
        limit: Picodollars | None = None,
        states_costs: bool = False,
    ) -> None:
        self._prices = prices
        self._journal = journal
        self.before = replace(journal.totals)
        """What earlier runs spent."""
        self.unpriced = 0
        """Requests of this run for models whose price is not known, which are counted nowhere else."""
        self._inherited = dict(journal.inherited)
        inherited = sum(each.amount for each in self._inherited.values())
        self._limit = SpendingLimit(limit, self.before.spent, self.before.kept, inherited=inherited)
        self._warned_of_small_batches = False
        self._waiting: deque[tuple[Picodollars, asyncio.Future[None]]] = deque()
        self._costs: dict[str, Picodollars] | None = {} if states_costs else None

    @property
    def limit(self) -> Picodollars | None:
        """The budget; None if there is none."""
        return self._limit.limit

    @property
    def totals(self) -> SpendTotals:
        """What all runs spent so far."""
        return self._journal.totals

    @property
    def committed(self) -> Picodollars:
        """All that may have to be paid, requests under way included."""
        return self._limit.committed

    @property
    def still_open(self) -> Sequence[OpenReservation]:
        """Reservations that have not ended: after a run those of lines in batches."""
        return self._journal.open

    def cost_of(self, call_id: str) -> Picodollars | None:
        """Return what all answers to a call cost so far, and forget it; None if it is not known."""
        return None if self._costs is None else self._costs.pop(call_id, None)

    @property
    def waits_for_batches(self) -> bool:
        """Whether money is reserved for lines of earlier runs, in batches, that this run has not taken up yet."""
        return bool(self._inherited)

    async def reserve(
        self, call: Call, body: Mapping[str, Any], size: int, *, batch: bool = False, is_fetched: bool = False
    ) -> Reservation:
        """Reserve, as the interface says. Also raises `RunFailed` if the journal cannot be written."""
        model = body.get("model")
        prices = self._prices.of(model if isinstance(model, str) else None)
        tier = body.get("service_tier")
        if batch and (found := self._inherited.pop(call.request_id, None)) is not None:
            self._limit.take_up(found.amount)
            return _JobReservation(
                self, call.request_id, found.number, found.amount, prices, tier, batch, found.bounded
            )
        if is_fetched:
            return _CountedReservation(self, call.request_id, prices)
        if prices is None and self._limit.limit is None:
            self.unpriced += 1
            return FreeReservation()
        amount, bounded = self._most(call, body, size, prices, batch)
        if self._waiting or self._limit.judge(amount) != "fits":
            if batch:
                self._warn_of_small_batches(amount)
                await self._turn(amount)
            else:
                await self._paused_turn(amount, call)
        else:
            self._limit.reserve(amount)
        try:
            number = self._journal.reserve(call.request_id, amount, batch=batch, bounded=bounded)
        except OSError as error:
            self._limit.release(amount)
            self._wake()
            raise RunFailed(
                f"what the job spends cannot be noted: {error}. Finished lines are kept: mend this, then run the same "
                "command again"
            ) from error
        return _JobReservation(self, call.request_id, number, amount, prices, tier, batch, bounded)

    def close(self, *, is_complete: bool = False) -> None:
        """Leave only the totals in the journal, and the reservations of lines in batches.

        `is_complete`: all lines of the job have ended, so no run will take these up: they count as spent.
        """
        if is_complete:
            self._journal.keep_open()
        try:
            self._journal.close()
        except OSError as error:
            _log.warning("what the job spent could not be summed up, and stays as it was noted: %s", error)

    def _most(
        self, call: Call, body: Mapping[str, Any], size: int, prices: ModelPrices | None, batch: bool
    ) -> tuple[Picodollars, bool]:
        """Return the most that a request may cost, and whether that is known."""
        if prices is None:
            raise InvalidRequest(
                f"the price of the model {shown(body.get('model'))} is not known, which a budget needs: give it with "
                "--price input=…,output=… or --prices FILE",
                param="model",
            )
        try:
            amount = most_cost(call.endpoint, body, size, prices, batch=batch)
        except InvalidRequest:
            if self._limit.limit is None:
                return 0, False
            raise
        # Without a budget nothing prevents a request from naming an absurdly large limit of tokens.
        return (amount, True) if self._limit.limit is not None or amount < _MOST else (0, False)

    def _warn_of_small_batches(self, amount: Picodollars) -> None:
        """Warn once if a line waits to enter a batch until the results of others free money."""
        if self._warned_of_small_batches or self._limit.limit is None or self._limit.judge(amount) != "wait":
            return
        self._warned_of_small_batches = True
        lines = len(self._journal.open)
        _log.warning(
            "%s left of the budget lets %s line%s into batches at a time: what a line may cost, up to %s, is reserved "
            "until its result is there. A larger --budget, or a lower --max-tokens, makes larger batches",
            shown_dollars(max(0, self._limit.limit - self._limit.committed + self._limit.reserved)),
            f"{lines:,}",
            "" if lines == 1 else "s",
            shown_dollars(amount),
        )

    async def _paused_turn(self, amount: Picodollars, call: Call) -> None:
        """Reserve `amount` as `_turn` does. While it waits, giving up the call loses nothing."""
        notify = call.pauses or (lambda _: None)
        notify(WAITS_FOR_BUDGET)
        try:
            await self._turn(amount)
        finally:
            notify(None)

    async def _turn(self, amount: Picodollars) -> None:
        """Reserve `amount` as soon as it fits, after those that already wait. Raises `BudgetExhausted`."""
        if self._limit.judge(amount) == "never":
            raise self._exhausted(amount)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._limit.release(amount)  # it came at the moment of the cancellation
            turn.cancel()
            self._wake()
            raise

    def _wake(self) -> None:
        """Serve the waiting reservations that fit now."""
        while self._waiting:
            amount, turn = self._waiting[0]
            if not turn.done():
                verdict = self._limit.judge(amount)
                if verdict == "wait":
                    return
                if verdict == "never":
                    turn.set_exception(self._exhausted(amount))
                else:
                    self._limit.reserve(amount)
                    turn.set_result(None)
            self._waiting.popleft()

    def _exhausted(self, amount: Picodollars) -> BudgetExhausted:
        limit = self._limit
        assert limit.limit is not None
        left = max(0, limit.limit - (limit.committed - limit.reserved))
        return BudgetExhausted(
            f"{shown_dollars(left)} is left of the budget of {shown_dollars(limit.limit)}, and the next request may "
            f"cost up to {shown_dollars(amount)}"
        )

    def settled(self, reservation: _JobReservation, answer: Mapping[str, Any]) -> None:
        """Count what the answer to a reserved request cost. Only its reservation calls this."""
        used, prices, batch = read_usage(answer), reservation.prices, reservation.batch
        rates = None if prices is None else rates_of(prices, answer, reservation.tier, batch=batch)
        if used is None or rates is None or prices is None:
            self.kept(reservation)
            return
        cost = used.cost(rates)
        if reservation.bounded and cost > reservation.amount:
            _log.warning(
                "%s cost %s, more than the %s that were reserved for it: either its price is another one, or its "
                "tokens are not bounded as supposed",
                reservation.call_id,
                shown_dollars(cost),
                shown_dollars(reservation.amount),
            )
        saved = used.cost(prices.live) - cost if batch else 0
        self._limit.settle(reservation.amount, cost)
        self._journal.settle(
            reservation.number,
            Settlement(cost, used.saved_by_cache(rates), saved, used.prompt, used.cached, used.output),
        )
        if self._costs is not None:
            # A line may be sent again because its answer was not JSON.
            self._costs[reservation.call_id] = self._costs.get(reservation.call_id, 0) + cost
        self._wake()

    def note_cost(self, call_id: str, prices: ModelPrices | None, answer: Mapping[str, Any]) -> None:
        """Record, for `cost_of`, the cost of an answer that was counted before. Only its reservation calls this."""
        used = read_usage(answer)
        if self._costs is not None and used is not None and prices is not None:
            self._costs[call_id] = used.cost(prices.batch)

    def released(self, reservation: _JobReservation) -> None:
        """Give back a reservation. Only its reservation calls this."""
        self._limit.release(reservation.amount)
        self._journal.release(reservation.number)
        self._wake()

    def kept(self, reservation: _JobReservation) -> None:
        """Count a reservation as spent. Only its reservation calls this."""
        self._limit.keep(reservation.amount)
        self._journal.keep(reservation.number)
        self._wake()


@dataclass(frozen=True, slots=True)
class _JobReservation(Reservation):
    """Money set aside by a `JobMeter`."""

    meter: JobMeter
    call_id: str
    number: int
    """Number in the journal."""
    amount: Picodollars
    prices: ModelPrices | None
    tier: object
    """The `service_tier` that the request asks for."""
    batch: bool
    bounded: bool
    """Whether `amount` is the most that the request may cost."""

    def settle(self, endpoint: str, answer: Mapping[str, Any]) -> None:
        self.meter.settled(self, answer)

    def release(self) -> None:
        self.meter.released(self)

    def keep(self) -> None:
        self.meter.kept(self)


@dataclass(frozen=True, slots=True)
class _CountedReservation(Reservation):
    """The reservation of a line whose result was fetched and counted before, but whose result line was lost."""

    meter: JobMeter
    call_id: str
    prices: ModelPrices | None

    def settle(self, endpoint: str, answer: Mapping[str, Any]) -> None:
        self.meter.note_cost(self.call_id, self.prices, answer)

    def release(self) -> None:
        pass

    def keep(self) -> None:
        pass
