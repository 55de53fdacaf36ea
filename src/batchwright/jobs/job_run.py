"""`JobRun`: one run of a job, from reading the input to the report."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from batchwright.clock import Clock
from batchwright.engine_config import DEFAULT_MAX_NUM_SEQS
from batchwright.errors import BudgetExhausted, InputBroken, InputError, ResumeRefused, RunFailed
from batchwright.inference.batches.account import BatchAccount
from batchwright.inference.batches.journal import may_be_paid
from batchwright.inference.batches.provider_batches import BatchJob, memory_for_lines
from batchwright.inference.endpoint_gate import words_of_pause
from batchwright.inference.inference import Inference, engine_stats_of
from batchwright.jobs.common_failure import CommonFailure
from batchwright.jobs.earlier_answers import JobSignature, keep_answers
from batchwright.jobs.event_loops import run_coroutine
from batchwright.jobs.failures import Failure
from batchwright.jobs.identical_lines import IdenticalLines, find_repeats
from batchwright.jobs.invalid_answers import InvalidAnswers
from batchwright.jobs.job import Job
from batchwright.jobs.job_meter import JobMeter
from batchwright.jobs.line_orders import EndpointOrder, EngineOrder, LineOrder
from batchwright.jobs.lines import asks_for_form
from batchwright.jobs.loading import LoadedModels, ModelChoice, NoModel
from batchwright.jobs.loop import JobLoop, Tally
from batchwright.jobs.ordered_records import ordered_records
from batchwright.jobs.report import RunReport
from batchwright.jobs.report_page.page import save_page
from batchwright.jobs.run_bound import RunBound
from batchwright.jobs.run_forecast import RunForecast
from batchwright.jobs.run_recorder import RunRecorder
from batchwright.jobs.sink import Sink
from batchwright.jobs.sources import Record
from batchwright.jobs.spec import JobSpec
from batchwright.jobs.spending import (
    Spending,
    SpendingTerms,
    exhausted,
    lines_covered,
    lines_per_answer,
    require_answer_bounds,
)
from batchwright.lines.batch_line import request_prefix
from batchwright.lines.forecast import LONGEST_COUNTED
from batchwright.lines.line_retries import RetryPolicy
from batchwright.pacing.figures import PacerFigures
from batchwright.pacing.long_waits import LongWaits
from batchwright.planning import prefix_order
from batchwright.planning.arrangement import Caches
from batchwright.planning.bound import NoBound
from batchwright.planning.identical import Repeats
from batchwright.pricing.rates import in_dollars

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine
    from batchwright.engine.engine_stats import EngineStats
    from batchwright.engine.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_IN_BATCHES = RetryPolicy(most_in_vain=sys.maxsize)
"""A batch may end with many failures at once, and lines then wait in the next one for hours: that is not an outage."""

Phase: TypeAlias = Literal["reading", "loading", "connecting", "running", "stopping", "finishing"]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run."""

    phase: Phase
    detail: str | None = None
    """What is being done in a phase that takes long the first time."""
    total: int = 0
    succeeded: int = 0
    """Lines with a response, including those of earlier runs, as in `failed`."""
    failed: int = 0
    resumed: int = 0
    running: int = 0
    """Lines being computed."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    waiting: str | None = None
    """Reason why no line can be computed now, or why lines wait to be tried again; None if there is none."""
    first_failure: Failure | None = None
    """The line that failed first in this run; None if none did."""
    seconds_left: float | None = None
    """Forecast of the time until all lines are finished; None while too little is known."""
    seconds_left_between: tuple[float, float] | None = None
    """The least and the most that it is in nine cases of ten; None likewise."""
    pacing: Mapping[str, PacerFigures] = field(default_factory=dict)
    """What was found out about the limits of an endpoint elsewhere, by model."""
    fraction: float | None = None
    """Share of the work of this run that is done, 0 to 1, in tokens as far as they are known; None likewise."""
    cost: float | None = None
    """Dollars that the answers of all runs of the job cost so far; None if prices are not known."""
    unknown_requests: int = 0
    """Requests whose cost is not known, as their answers were lost or did not say it."""
    budget: float | None = None
    """Dollars that all runs may cost; None if there is no budget."""
    budget_covers: int | None = None
    """About how many lines the budget covers, by what answers cost so far; None: all, or too little is known."""

    @property
    def done(self) -> int:
        """Lines that ended in this run, with an answer or an error."""
        return self.succeeded + self.failed


class RunInterrupted(KeyboardInterrupt):
    """A run was stopped by KeyboardInterrupt. All finished lines are in the output; `run` continues after them."""

    def __init__(self, report: RunReport, kept_input: Path | None) -> None:
        super().__init__("interrupted")
        self.report = report
        self.kept_input = kept_input
        """File with the content of the input, if that is a stream; None otherwise."""


class BudgetSpent(BudgetExhausted):
    """The end of a run whose budget is spent. All finished lines are in the output."""

    def __init__(self, message: str, report: RunReport) -> None:
        super().__init__(message)
        self.report = report


class RunEnded(RunFailed):
    """The end of a run that could not go on, once it computed. All finished lines are in the output."""

    def __init__(self, message: str, report: RunReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass
class JobRun:
    """One run of a job, as `run` describes it."""

    spec: JobSpec
    clock: Clock
    choice: ModelChoice
    given_engine: Engine | None
    given_inference: Inference | None
    progress: Callable[[RunProgress], None]
    report_path: Path | None
    terms: SpendingTerms | None
    dedupe: bool = True
    planned: bool = True
    page_path: Path | None = None
    """File for the page of the report."""

    def carry_out(self) -> RunReport:
        self._started = self.clock.now()
        self._load_seconds = self._loop_seconds = self._model_seconds = 0.0
        self._tally = Tally()
        self._engine = self.given_engine
        self._inference: Inference | None = None
        self._generated_before = self._stats.generated_tokens
        self._loop: JobLoop | None = None
        self._copies: IdenticalLines[Any] | None = None
        self._meter: JobMeter | None = None
        self._bound: RunBound | None = None
        self._no_bound = ""
        self._rates_seconds = 0.0
        self._batches: BatchAccount | None = None
        self._long_waits = LongWaits()
        self._recorder = RunRecorder(self.clock, self._tally, lambda: self._stats, self._spent)
        self.progress(RunProgress("reading"))
        with Job(self.spec, self.clock) as job:
            if self.terms is not None and self.terms.budget is not None:
                job.require_journal()
            self._meter = None if self.terms is None else self.terms.meter(job)
            if not job.complete:
                return self._work(job)
            # No model is loaded.
            if not job.total:
                with job.begin():
                    pass
            job.end()
            if self._meter is not None:
                self._meter.close(is_complete=True)
            return self._report(job)

    def _work(self, job: Job) -> RunReport:
        before = self.clock.now()
        if self._meter is not None and self._meter.limit is not None and not self._meter.waits_for_batches:
            require_answer_bounds(job, self.spec.defaults)
        # Before `begin`: a model that cannot be loaded leaves the output as it was.
        loaded = self._loaded(job)
        if self._may_share:
            self._show("reading", job)
        self._repeats = self._found_repeats(job)
        try:
            with self._ordered_records(job, loaded) as self._records:
                self._load_seconds = self.clock.now() - before
                run_coroutine(self._compute(job, loaded))
        except KeyboardInterrupt:
            raise RunInterrupted(self._report(job, interrupted=True), job.kept_input) from None
        except BudgetExhausted as error:
            if self._meter is None:
                raise
            report = self._report(job)
            raise BudgetSpent(exhausted(error, self._meter, report.done, job.total), report) from error
        except RunFailed as error:
            raise RunEnded(str(error), self._report(job)) from error
        return self._report(job)

    def _ordered_records(self, job: Job, loaded: LoadedModels) -> AbstractContextManager[Iterator[Record] | None]:
        """The records of an input of several windows in an order for all of it; None: in the order of the input."""
        is_elsewhere = self.choice.is_live_elsewhere
        most_lines, most_bytes = EndpointOrder.window if is_elsewhere else EngineOrder.window
        generates = loaded.engine is not None or loaded.has_generating_replicas
        has_order = is_elsewhere or (generates and self.given_inference is None)
        if not (self.planned and has_order) or (job.total <= most_lines and job.bytes <= most_bytes):
            return nullcontext()
        self._show("reading", job, "planning the order of the whole file")
        least = prefix_order.LEAST_SHARED if is_elsewhere else 0
        return ordered_records(job, most_lines, most_bytes, least_shared=least, is_elsewhere=is_elsewhere)

    def _begun_bound(self, job: Job, loaded: LoadedModels) -> RunBound | None:
        """Measure the run, if it is the whole job, and one engine computes all of it."""
        began = self.clock.now()
        try:
            if loaded.replicas_of is not None:
                raise NoBound("replicas computed the lines")
            if loaded.engine is None:
                raise NoBound("no model that generates computed here")
            if loaded.encoder is not None or loaded.classifiers:
                raise NoBound("several models computed the lines")
            if job.finished:
                raise NoBound("earlier runs had finished a part of the job")
            return RunBound.begin(loaded.engine, job.total, lambda text: self._show("loading", job, text), self.clock)
        except NoBound as reason:
            self._no_bound = str(reason)
            return None
        finally:
            self._rates_seconds = self.clock.now() - began

    def _loaded(self, job: Job) -> LoadedModels:
        if self.given_engine is not None:
            return LoadedModels(self.given_engine, None, owned=False)
        if self.given_inference is not None:
            return LoadedModels(None, None)
        # An endpoint knows best what it takes.
        forms = False
        if self.choice.backend is None:
            if (first := job.first_valid_line()) is None:
                self.given_inference = NoModel()
                return LoadedModels(None, None)
            forms = asks_for_form(first.endpoint, first.body, self.spec.defaults)
        self._show("loading" if self.choice.backend is None else "connecting", job)
        endpoints = job.endpoints(separate) if (separate := self.choice.separate_endpoints) else ()
        loaded = self.choice.load(endpoints, lambda text: self._show("loading", job, text), forms=forms)
        self._engine = loaded.engine
        return loaded

    @property
    def _may_share(self) -> bool:
        """Whether identical requests are sent only once. Nothing is known about an inference that was given."""
        return self.dedupe and self.given_inference is None

    def _found_repeats(self, job: Job) -> Repeats | None:
        """The lines that share one request with others, except those that a model here refuses; None: each is sent."""
        if not self._may_share:
            return None
        here = self.choice.backend is None
        check = partial(self.choice.prompts_of, defaults=self.spec.defaults) if here else None
        return find_repeats(job, self.spec.defaults, self.spec.model, check, here=here)

    async def _compute(self, job: Job, loaded: LoadedModels) -> None:
        given = None if self.given_inference is None else nullcontext(self.choice.renamed(self.given_inference))
        is_complete = False
        began = self.clock.now()
        tokenizer = self._begin_reading_tokenizer(loaded)
        opened = self.choice.opened(
            loaded, self._meter, self._batch_job(job), lambda text: self._show("loading", job, text)
        )
        try:
            async with given or opened as inference:
                self._inference = inference
                if loaded.replicas_of is not None:
                    self._load_seconds = self.clock.now() - began
                if self.terms is not None and inference.models:
                    self.terms.require_price(self.choice.model or inference.models[0])
                self._bound = self._begun_bound(job, loaded)
                try:
                    await self._loop_through(job, inference, self._order(inference, await tokenizer))
                finally:
                    if self._bound is not None:
                        self._bound.end()
                is_complete = True
        finally:
            if self._engine is not None and self.given_engine is None:
                self._engine.keep_costs()
                # The answers of a run that was stopped, or of the rest of one, are not like those of the whole job.
                if is_complete and not job.finished:
                    signature = JobSignature.of(self.spec, job.contents)
                    keep_answers(self._engine.model_name, signature, self._tally.natural_answers)
            # After the inference, which may still end reservations while it is closed.
            if self._meter is not None:
                self._meter.close(is_complete=is_complete)

    async def _loop_through(self, job: Job, inference: Inference, order: LineOrder[Any] | None) -> None:
        started, model_before = self.clock.now(), self._stats.model_seconds
        sink = job.begin()
        self._forecast = RunForecast(job, self._engine, self.clock)
        self._recorder.begin()
        try:
            with sink, self._identical(job, sink) as identical:
                self._copies = identical
                self._loop = JobLoop(
                    job,
                    inference,
                    sink,
                    clock=self.clock,
                    defaults=self.spec.defaults,
                    on_progress=lambda: self._show_loop(job),
                    tally=self._tally,
                    order=order,
                    identical=identical,
                    cost_of=self._cost_of if self.terms is not None and self.terms.states_costs else None,
                    waits_for_batches=lambda: self._meter is not None and self._meter.waits_for_batches,
                    invalid=InvalidAnswers(self.spec.retry_invalid, self.spec.defaults)
                    if self.spec.retry_invalid
                    else None,
                    common=CommonFailure(self.spec.defaults)
                    if self.choice.is_live_elsewhere and not job.finished.succeeded
                    else None,
                    expected_tokens=self._forecast.expected_tokens,
                    records=self._records,
                    retries=None if self.choice.via == "live" else _IN_BATCHES,
                )
                await self._loop.run()
            self._show("finishing", job)
            job.end()
        except InputError as error:
            raise InputBroken(str(error)) from error
        finally:
            self._loop_seconds = self.clock.now() - started
            self._recorder.end({} if self._loop is None else self._loop.pacing)
            self._model_seconds = self._stats.model_seconds - model_before

    def _begin_reading_tokenizer(self, loaded: LoadedModels) -> asyncio.Future[Tokenizer | None]:
        """Begin to read the tokenizer that orders lines, and return its future; an engine of this process has one."""
        if loaded.has_generating_replicas and self.planned and self.given_inference is None:
            reading = asyncio.ensure_future(asyncio.to_thread(self.choice.tokenizer))
            # Where replicas cannot be opened, nobody awaits it, and asyncio would report an error that was not read.
            reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return reading
        known: asyncio.Future[Tokenizer | None] = asyncio.get_running_loop().create_future()
        known.set_result(None if self._engine is None else self._engine.core.tokenizer)
        return known

    def _order(self, inference: Inference, tokenizer: Tokenizer | None) -> LineOrder[Any] | None:
        """The order in which lines are started; None: that of the input."""
        if self.choice.is_live_elsewhere:
            return EndpointOrder() if self.planned else None
        stats = engine_stats_of(inference)
        if not self.planned or tokenizer is None or stats is None or not stats.max_num_seqs or not stats.block_size:
            return None
        replicas = max(1, stats.max_num_seqs // (self.choice.config.max_num_seqs or DEFAULT_MAX_NUM_SEQS))
        if self._engine is not None and self.given_engine is None:
            self._engine.core.scheduler.forget_answers()
        caches = Caches(1 if self._engine is not None else replicas, stats.kv_blocks, stats.block_size)
        return EngineOrder(stats.max_num_seqs, caches, tokenizer.encode, self.spec.defaults)

    def _identical(self, job: Job, sink: Sink) -> AbstractContextManager[IdenticalLines[Any] | None]:
        if self._repeats is None:
            return nullcontext()
        # Batches take hours, and reading must not pause meanwhile: lines that are not read are in no batch.
        most_waiting = memory_for_lines() / 2 if self.choice.via != "live" else None
        return IdenticalLines(self._repeats, sink, job.earlier_answers(), most_waiting=most_waiting)

    def _spent(self) -> float | None:
        """Dollars that all runs of the job cost so far; None if prices are not known."""
        return None if self._meter is None else in_dollars(self._meter.totals.spent)

    def _cost_of(self, call_id: str) -> float | None:
        cost = None if self._meter is None else self._meter.cost_of(call_id)
        return None if cost is None else in_dollars(cost)

    def _batch_job(self, job: Job) -> BatchJob | None:
        """The job for the batches of a provider; None if lines are computed in another way.

        Raises `InputError`, and `ResumeRefused` if earlier runs have left lines in batches.
        """
        if self.choice.via == "live":
            if not self.spec.to_stream and not self.spec.overwrite and may_be_paid(job.batches):
                raise ResumeRefused(
                    f"lines of this job are in batches of the provider, by {job.batches}, and requests would pay for "
                    "them again: go on with --via batch, or with --via auto --deadline 1s, which cancels the batches, "
                    "takes what they have and makes requests of the rest"
                )
            return None
        if self.spec.to_stream:
            raise InputError("batches need an output file, beside which they are noted: name one with -o")
        self._batches, prefix = BatchAccount(), request_prefix(job.key)
        return BatchJob(
            folder=job.batches,
            is_finished=lambda call_id: not call_id.startswith(prefix) or int(call_id[len(prefix) :]) in job.finished,
            forgets_failures=self.spec.retry_failed is not None,
            # Copies that wait for the answer to another line are not asked.
            lines_left=lambda: job.total - len(job.finished) - self._tally.lines_read - len(self._copies or ()),
            account=self._batches,
        )

    @property
    def _stats(self) -> EngineStats:
        """Statistics of the engine, or of those of all replicas; zeros if there is none."""
        from batchwright.engine.engine_stats import EngineStats

        if self._engine is not None:
            return self._engine.stats
        return (None if self._inference is None else engine_stats_of(self._inference)) or EngineStats()

    def _report(self, job: Job, *, interrupted: bool = False) -> RunReport:
        report = RunReport.of_run(
            self._tally,
            self._stats,
            loop_seconds=self._loop_seconds,
            model_seconds=self._model_seconds,
            output=self.spec.output,
            model=self.spec.model or self.spec.embedding_model or self.spec.backend or "",
            total=job.total,
            succeeded=job.finished.succeeded + self._tally.succeeded,
            failed=job.finished.failed + self._tally.failed,
            resumed=len(job.finished),
            failures=list(job.finished.failures + self._tally.failures),
            inputs=self.spec.shown_inputs,
            series=self._recorder.series(),
            lengths=self._recorder.lengths(),
            interrupted=interrupted,
            wall_seconds=self.clock.now() - self._started,
            load_seconds=self._load_seconds,
            rates_seconds=self._rates_seconds,
            pacing={} if self._loop is None else self._loop.pacing,
            spending=None if self._meter is None else Spending.of(self._meter),
            **(self._answer_lengths() if self.choice.backend is not None else {}),
            cut_off=0 if self._loop is None else sum(each.given_up for each in self._loop.pacing.values()),
            reordered_fields=job.field_reuse,
            batches=None if self._batches is None else self._batches.to_dict(),
            **self._rate(),
            **self._bound_figures(job, interrupted=interrupted),
        )
        if self.report_path is not None:
            report.save(self.report_path)
        if self.page_path is not None:
            save_page(report, self.page_path)
        return report

    def _bound_figures(self, job: Job, *, interrupted: bool) -> dict[str, Any]:
        if self._bound is None:
            return {"no_bound": self._no_bound}
        if interrupted or self._tally.succeeded + self._tally.failed != job.total:
            return {"no_bound": "the run ended before its job"}
        try:
            return self._bound.figures(self._loop_seconds)
        except NoBound as reason:
            return {"no_bound": str(reason)}

    def _answer_lengths(self) -> dict[str, int | None]:
        answers = self._tally.answers
        limit = min(answers.limits, default=LONGEST_COUNTED)
        is_known = limit < LONGEST_COUNTED and self._tally.longest_answer and not any(answers.cut)
        return {"longest_answer": self._tally.longest_answer, "unreached_limit": limit if is_known else None}

    def _rate(self) -> dict[str, float]:
        """The rate of the tokens that the engine generated, including those of lines that were not finished."""
        if self._engine is None or self._loop_seconds <= 0:
            return {}
        generated = self._engine.stats.generated_tokens - self._generated_before
        return {"generated_tokens_per_second": generated / self._loop_seconds}

    def _show_loop(self, job: Job) -> None:
        if self._loop is not None:
            for text in self._long_waits.news(self._loop.pacing, self.clock.now(), datetime.now()):
                reason = words_of_pause(self._loop.pacing.values())
                _log.warning("%s%s. The run waits; it can be stopped, and the same command goes on", text, reason)
        self._show("stopping" if self._loop is not None and self._loop.stopping else "running", job)

    def _show(self, phase: Phase, job: Job, detail: str | None = None) -> None:
        forecast = None
        if self._loop is not None and phase == "running" and self._batches is None:
            # Results of batches come in bursts, which say nothing about the time left.
            forecast = self._forecast.of(self._tally, len(self._loop))
        if self._loop is not None and phase in ("running", "stopping"):
            self._recorder.observe(len(self._loop), self._loop.pacing, forecast)
        generated = self._tally.generated_tokens
        if self._engine is not None:
            generated = self._engine.stats.generated_tokens - self._generated_before
        covered = None
        if self._meter is not None and phase == "running":
            covered = lines_covered(self._meter, job.total, lines_per_answer(self._tally, self._repeats, job.total))
        is_stopped = self._loop is not None and self._loop.is_stopped
        left = None if is_stopped or covered is not None else forecast
        self.progress(
            RunProgress(
                phase,
                detail,
                total=job.total,
                succeeded=job.finished.succeeded + self._tally.succeeded,
                failed=job.finished.failed + self._tally.failed,
                resumed=len(job.finished),
                running=0 if self._loop is None else len(self._loop),
                waiting=None if self._loop is None else self._loop.why_waiting,
                first_failure=self._tally.failures.first,
                seconds_left=None if left is None else left.seconds_left,
                seconds_left_between=None if left is None else self._forecast.between,
                fraction=None if forecast is None else forecast.fraction,
                prompt_tokens=self._tally.prompt_tokens,
                generated_tokens=generated,
                pacing={} if self._loop is None else self._loop.pacing,
                cost=self._spent(),
                unknown_requests=0 if self._meter is None else self._meter.totals.lost,
                budget=None if self._meter is None or self._meter.limit is None else in_dollars(self._meter.limit),
                budget_covers=covered,
            )
        )
