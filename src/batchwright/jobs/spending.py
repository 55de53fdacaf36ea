"""The money of a run: how it may be spent, and what it was spent on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from batchwright.errors import BudgetExhausted, InputError, InvalidRequest, shown
from batchwright.jobs.job import Job
from batchwright.jobs.job_meter import JobMeter
from batchwright.jobs.lines import Line
from batchwright.jobs.loop import Tally
from batchwright.jobs.provider_cache import CacheableTokens
from batchwright.jobs.spend_journal import SpendJournal
from batchwright.limiting.estimates import sequences_of_request
from batchwright.lines.forecast import answer_limit
from batchwright.planning.identical import Repeats
from batchwright.pricing.bounds import NO_ANSWER_BOUND, most_cost, most_output
from batchwright.pricing.price_sources import PriceBook, price_table
from batchwright.pricing.rates import Picodollars, in_dollars, picodollars, shown_dollars
from batchwright.pricing.usage import TokensUsed
from batchwright.request import SamplingParams
from batchwright.wire.requests import CHAT_URL, ENCODER_URLS, filled, with_defaults

_ENOUGH_ANSWERS = 10
"""Answers whose mean cost predicts that of the others."""
_LOOKED_AT = 100
"""Lines without a bound after which all are assumed to have none."""
_NOTHING = CacheableTokens()
_QUOTED_TOKENS = 100
"""Tokens of an answer whose price is quoted if no answers are known."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What a job has cost, in dollars."""

    cost: float
    """Cost of the answers of this run, including those whose lines were not finished."""
    cost_of_all_runs: float
    """Cost of the answers of this run and of earlier ones."""
    unknown_at_most: float | None
    """Most that requests of unknown cost, of all runs, may have cost in addition; None if that has no bound."""
    unknown_requests: int
    """Number of those requests: their answers were lost, or did not state the cost."""
    in_batches_at_most: float | None
    """Most that lines in batches at the provider may cost in addition; None if that has no bound."""
    in_batches: int
    """Number of those lines."""
    budget: float | None
    saved_by_caching: float
    """What the provider's prompt cache saved in this run, less the extra cost of writing to it."""
    saved_by_batching: float
    """What the provider's batches saved in this run."""
    cached_tokens: int
    """Prompt tokens of this run that the provider found in its cache."""
    cached_share: float
    """Their share of the prompt tokens."""
    unpriced_requests: int
    """Requests of this run for models whose price is not known, which are in none of the figures above."""

    @classmethod
    def of(cls, meter: JobMeter) -> Spending | None:
        """The spending that `meter` has counted; None if no price was known."""
        total, run, still_open = meter.totals, meter.totals - meter.before, meter.still_open
        amount = sum(each.amount for each in still_open)
        if meter.unpriced and not total.answers + total.lost + len(still_open):
            return None
        return cls(
            cost=in_dollars(run.spent),
            cost_of_all_runs=in_dollars(total.spent),
            unknown_at_most=None if total.unbounded else in_dollars(total.kept),
            unknown_requests=total.lost,
            in_batches_at_most=in_dollars(amount) if all(each.bounded for each in still_open) else None,
            in_batches=len(still_open),
            budget=None if meter.limit is None else in_dollars(meter.limit),
            saved_by_caching=in_dollars(run.saved_by_cache),
            saved_by_batching=in_dollars(run.saved_by_batch),
            cached_tokens=run.cached_tokens,
            cached_share=run.cached_tokens / run.prompt_tokens if run.prompt_tokens else 0.0,
            unpriced_requests=meter.unpriced,
        )


@dataclass(frozen=True, slots=True)
class PlannedPrice:
    """What a job would cost one way, in dollars."""

    at_most: float | None
    """Most that it may cost; None if a line has no bound, such as one without `max_tokens`."""
    prompts: float
    """Expected cost of the prompts."""
    answers_per_100_tokens: float
    """Cost of 100 tokens of each answer, or of as many as its line allows."""
    expected: float | None
    """Expected cost of everything, if answers are as long as those that the job has so far; None if it has none."""


@dataclass(frozen=True, slots=True)
class PlannedCost:
    """What a job would cost."""

    live: PlannedPrice
    batch: PlannedPrice
    """The same in batches of the provider."""
    lines: int
    """Lines whose price is known."""
    no_bound: str | None = None
    """Why the first line without a bound has none."""
    cached: PlannedPrice | None = None
    """As `live`, if prefixes that prompts share are found in the provider's cache, and everything else that it keeps is
    written to it, which may cost more; None if that changes nothing."""


@dataclass(frozen=True, slots=True)
class SpendingTerms:
    """What a run may spend, and at which prices.

    - `budget`: dollars for all runs of the job; None: any amount.
    - `price`, `prices`: see `PriceBook` (`given`), and a file with a `table`.
    - `states_costs`: whether each answer's `usage` says what it cost.

    Raises `InputError` for terms that make no sense.
    """

    budget: Picodollars | None
    book: PriceBook
    states_costs: bool = False

    @classmethod
    def of(
        cls,
        backend: str | None,
        *,
        budget: object = None,
        price: str | None = None,
        prices: Path | None = None,
        states_costs: bool = False,
    ) -> SpendingTerms | None:
        """The terms of a run with an endpoint; None for models in this process."""
        given = {"budget": budget, "price": price, "prices": prices, "cost": states_costs or None}
        if backend is None:
            for name, value in given.items():
                if value is not None:
                    raise InputError(f"{name}={shown(value)} is for an endpoint that is paid: add --backend")
            return None
        if price is not None and prices is not None:
            raise InputError("price and prices both say what models cost: give one of them")
        table = None
        if prices is not None:
            try:
                table = price_table(prices.read_bytes(), prices.name)
            except OSError as error:
                raise InputError(f"prices {prices} cannot be read: {error.strerror}") from error
        book = PriceBook(at=datetime.now(UTC), given=price, table=table, address=backend)
        limit = None if budget is None else picodollars("budget", budget)
        return cls(limit, book, states_costs)

    def meter(self, job: Job) -> JobMeter | None:
        """The meter of a run of `job`; None if there is nothing to count, since no price is known.

        Raises `InputError` and `ResumeRefused` for its journal.
        """
        if not self.book.has_any and self.budget is None:
            return None
        journal = SpendJournal(job.spend_journal, job.key, starts_over=job.spec.overwrite)
        return JobMeter(self.book, journal, limit=self.budget, states_costs=self.states_costs)

    def require_price(self, model: str | None) -> None:
        """Raise `InputError` if the price of the model of all lines must be known but is not."""
        if self.book.of(model) is not None or not (self.budget or self.states_costs):
            return
        raise InputError(
            f"the price of the model {shown(model)} is not known at this endpoint: give it in dollars per million "
            "tokens with --price input=2.50,cached=1.25,output=10.00, or --price PROVIDER/MODEL, or --prices FILE"
        )


def require_answer_bounds(job: Job, defaults: SamplingParams | Mapping[str, Any]) -> None:
    """Raise `InputError` if none of the first remaining lines of `job` says how long its answer may be."""
    endless = 0
    for record in job.source.records():
        if record.number in job.finished or not isinstance(line := job.parser.parse(record), Line):
            continue
        if line.endpoint in ENCODER_URLS:
            return
        try:
            most_output(filled(line.endpoint, line.body, defaults))
            return
        except InvalidRequest as error:
            if error.code != NO_ANSWER_BOUND:
                return
        endless += 1
        if endless == _LOOKED_AT:
            break
    if endless:
        first, left = "" if endless < _LOOKED_AT else "first ", " left" if job.finished else ""
        # A job that has begun cannot have other parameters.
        remedy = "go on without a budget, or start over with --overwrite and" if left else "give it for all with"
        raise InputError(
            f"budget: none of the {first}{endless:,} lines{left} has max_tokens, so what their answers may cost has no "
            f"bound: {remedy} --max-tokens, such as --max-tokens 500"
        )


def exhausted(error: BudgetExhausted, meter: JobMeter, done: int, total: int) -> str:
    """The message with which a run ends when its budget is spent."""
    assert meter.limit is not None
    totals = meter.totals
    lost = (
        f", and up to {shown_dollars(totals.kept)} for {totals.lost:,} whose cost is not known" if totals.lost else ""
    )
    return (
        f"the budget of {shown_dollars(meter.limit)} is spent: {shown_dollars(totals.spent)} for {done:,} of {total:,} "
        f"lines{lost}; {error}. Finished lines are kept: the same command with a larger --budget goes on"
    )


def lines_covered(meter: JobMeter, lines: int, lines_per_answer: float) -> int | None:
    """Return for about how many of `lines` the budget is enough, by the answers so far; None: for all, or unknown.

    `lines_per_answer`: lines that end for each answer that is paid for.
    """
    totals = meter.totals
    if meter.limit is None or totals.answers < _ENOUGH_ANSWERS or not totals.spent:
        return None
    answers = max(0, meter.limit - totals.kept) * totals.answers / totals.spent
    covered = int(answers * lines_per_answer)
    return covered if covered < lines else None


def lines_per_answer(tally: Tally, repeats: Repeats | None, lines: int) -> float:
    """Return how many of `lines` end per answer that is paid for: copies and failures are free, repeats are not.

    `repeats`: the lines that share one request with others; None: each is asked.
    """
    copies = 0 if repeats is None else len(repeats) - repeats.groups
    answered = tally.succeeded - tally.deduplicated
    paid = answered + tally.asked_again
    return lines / max(1, lines - copies) * ((answered + tally.failed) / paid if paid else 1.0)


class CostPlanner:
    """Adds up what the lines of a job would cost."""

    def __init__(
        self, book: PriceBook, model: str | None, defaults: SamplingParams | Mapping[str, Any], answer: float | None
    ) -> None:
        """`model`: of lines that name none; `answer`: mean tokens of an answer, if some are known."""
        self._book = book
        self._model = model
        self._defaults = defaults
        self._answer = answer
        self._most: list[Picodollars] = [0, 0]
        self._prompts: list[Picodollars] = [0, 0]
        self._saved: Picodollars = 0
        """How much less prompts would cost, live, if all that the provider's cache keeps of them were found in it."""
        self._saved_by_writing: Picodollars = 0
        """The same if all of it were written to the cache: below 0 if that costs more."""
        self._answers: list[Picodollars] = [0, 0]
        """Cost of 100 tokens for each line; like the next, live and as a batch."""
        self._limited: list[Picodollars] = [0, 0]
        """The same for each answer, but at most for the tokens that its line allows."""
        self._lines = 0
        self._no_bound: str | None = None

    def add(
        self,
        endpoint: str,
        body: Mapping[str, Any],
        prompt_tokens: int,
        cacheable: CacheableTokens = _NOTHING,
    ) -> None:
        """Add a line whose prompts have about `prompt_tokens` tokens, of which a provider's cache keeps `cacheable`."""
        if endpoint not in ENCODER_URLS:
            body = with_defaults(body, self._defaults, chat=endpoint == CHAT_URL)
        body = {"model": self._model, **body}
        prices = self._book.of(body["model"])
        if prices is None:
            return
        self._lines += 1
        output = 0 if endpoint in ENCODER_URLS else _QUOTED_TOKENS
        answers = sequences_of_request(endpoint, body)
        found = TokensUsed(prompt_tokens, 0, cached=cacheable.all)
        put = TokensUsed(prompt_tokens, 0, written=cacheable.all - cacheable.hourly, written_1h=cacheable.hourly)
        self._saved += found.saved_by_cache(prices.live)
        self._saved_by_writing += put.saved_by_cache(prices.live)
        for index, rates in enumerate((prices.live, prices.batch)):
            self._prompts[index] += TokensUsed(prompt_tokens, 0).cost(rates)
            self._answers[index] += output * rates.output.at(prompt_tokens)
            limited = answers * min(output, answer_limit(body, output))
            self._limited[index] += limited * rates.output.at(prompt_tokens)
        try:
            size = len(msgspec.json.encode(body))
            for index in range(2):
                self._most[index] += most_cost(endpoint, body, size, prices, batch=bool(index))
        except InvalidRequest as error:
            self._no_bound = self._no_bound or str(error)

    def result(self, cached_share: float = 0.0) -> PlannedCost | None:
        """What the lines would cost; None if no price is known.

        `cached_share`: share of the tokens that the provider's cache keeps which are found in it.
        """
        if not self._lines:
            return None
        saved = int(self._saved * cached_share + self._saved_by_writing * (1.0 - cached_share))
        cached = self._price(0, saved) if saved else None
        return PlannedCost(self._price(0), self._price(1), self._lines, self._no_bound, cached)

    def _price(self, index: int, saved: Picodollars = 0) -> PlannedPrice:
        prompts, answers = self._prompts[index] - saved, self._answers[index]
        return PlannedPrice(
            at_most=None if self._no_bound else in_dollars(self._most[index]),
            prompts=in_dollars(prompts),
            answers_per_100_tokens=in_dollars(self._limited[index]),
            expected=None
            if self._answer is None
            else in_dollars(prompts + int(answers * self._answer / _QUOTED_TOKENS)),
        )
