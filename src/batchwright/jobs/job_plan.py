"""`JobPlan`: what a run of a job would compute, take and cost, found without running it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

from batchwright.clock import Clock
from batchwright.engine_config import DEFAULT_MAX_NUM_SEQS
from batchwright.errors import BatchwrightError
from batchwright.inference.inference import Inference
from batchwright.inference.loading import load_engine, measure_costs
from batchwright.jobs.answer_probe import SECONDS, ProbedAnswers, chosen_lines, probe_answers
from batchwright.jobs.answer_tables import TableColumns
from batchwright.jobs.dry_run import AnswersPlanned, EngineCapacity, LinePlanner, Plan
from batchwright.jobs.earlier_answers import JobSignature, earlier_answers, likely_lengths
from batchwright.jobs.event_loops import run_coroutine
from batchwright.jobs.input_names import STREAM
from batchwright.jobs.job import Job, local_output
from batchwright.jobs.job_run import RunProgress
from batchwright.jobs.lines import Line
from batchwright.jobs.loading import LoadedModels, ModelChoice
from batchwright.jobs.planned_time import LineSample, PlannedTime, SampledJob, SampledLine
from batchwright.jobs.report import RunReport
from batchwright.jobs.spec import JobSpec
from batchwright.jobs.spend_journal import SpendJournal, journal_path
from batchwright.jobs.spending import CostPlanner, SpendingTerms
from batchwright.kept_costs import KeptCosts, find_costs
from batchwright.request import SamplingParams
from batchwright.scheduling.sizes import BLOCK_SIZE
from batchwright.wire.identity import identity_of

if TYPE_CHECKING:
    from batchwright.encoder.texts import TextTokenizer
    from batchwright.engine.engine import Engine

_log = logging.getLogger(__name__)

_MODEL_FAILURES = (BatchwrightError, OSError, ValueError, RuntimeError)
"""Errors of a model that is wrong, or too large for the memory that is left; all but the time is planned without it."""
_NOT_MEASURED = (
    "this machine keeps no measurements of this model with these options, and without --probe nothing is measured"
)


class _NoTime(Exception):
    """The time of a job is not known, for a reason that is told; empty where nobody expects it to be."""


class _Probes:
    """What is measured of a model for a plan; it is loaded when the first of it is."""

    def __init__(self, model: str, choice: ModelChoice, progress: Callable[[str], None]) -> None:
        self._model, self._choice, self._progress = model, choice, progress
        self._engine: Engine | None = None

    def costs(self) -> KeptCosts:
        """Measure what steps take. Raises as `load_engine` and `measure_costs`."""
        return measure_costs(self._loaded(), self._progress)

    def answers(self, lines: Sequence[SampledLine], defaults: SamplingParams) -> ProbedAnswers:
        """Answer some of `lines` for some seconds, to see how long their answers are.

        Raises as `load_engine`, and `EngineClosed` if the engine fails.
        """
        engine, chosen = self._loaded(), chosen_lines(lines)
        self._progress(f"answering some of its lines for {SECONDS:.0f} s, to see how long answers are")
        engine.generate(["1"], SamplingParams(max_tokens=2))  # the first steps set up what later ones find
        engine.core.scheduler.record.clear()
        probed = run_coroutine(self._answered(engine, chosen, defaults))
        engine.keep_costs(is_run=False)
        return probed

    async def _answered(self, engine: Engine, lines: Sequence[SampledLine], defaults: SamplingParams) -> ProbedAnswers:
        inference = self._choice.renamed(LoadedModels(engine, None, owned=False).inference())
        try:
            return await probe_answers(inference, lines, defaults)
        finally:
            await inference.close()

    def _loaded(self) -> Engine:
        if self._engine is None:
            self._engine = load_engine(self._model, self._choice.config, self._progress)
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()


@dataclass
class JobPlan:
    """A job that is not run, as `run` with `dry_run` describes it."""

    spec: JobSpec
    clock: Clock
    choice: ModelChoice
    given_engine: Engine | None
    given_inference: Inference | None
    terms: SpendingTerms | None
    progress: Callable[[RunProgress], None]
    dedupe: bool = True
    planned: bool = True
    probes: bool = False
    """Whether the model is loaded to measure its steps and the lengths of answers, as far as they are not known."""

    def report(self) -> RunReport:
        """The report of a run that writes no result."""
        self.spec.check()
        # A stream as output keeps no state.
        spec = replace(self.spec, output=STREAM, columns=TableColumns(), ordered=False, retry_failed=None)
        with Job(spec, self.clock) as job:
            costs, sample, tokenizer = self._cost_planner(job), LineSample(), self._tokenizer()
            shares = self.dedupe and self.given_inference is None
            found = LinePlanner(
                job,
                tokenizer,
                partial(self.choice.prompts_of, defaults=self.spec.defaults),
                None if costs is None else costs.add,
                self._identity if shares else None,
                defaults=self.spec.defaults,
                context=self._context(tokenizer),
                capacity=self._capacity(),
                endpoint=None if self.choice.backend is None else self.choice.dialect,
                text_tokenizer=self._text_tokenizer,
                sample=sample if self._is_here else None,
            ).plan()
            time, no_time = self._time_or_reason(sample, tokenizer, found, JobSignature.of(self.spec, job.contents))
            return RunReport(
                output=self.spec.output,
                model=self.spec.model or self.spec.embedding_model or self.spec.backend or "",
                inputs=self.spec.shown_inputs,
                total=job.total,
                failed=job.total - found.valid,
                failures=list(found.failures),
                prompt_tokens=found.prompt_tokens,
                prompt_tokens_estimated=found.is_estimate,
                deduplicated=found.identical,
                saved_prompt_tokens=found.saved_prompt_tokens,
                first_requests=found.first,
                planned_cost=None if costs is None else costs.result(_cached_share(found)),
                planned_answers=self._with_expected(found.answers, time, job, found),
                planned_time=time,
                no_planned_time=no_time,
                reordered_fields=job.field_reuse,
                shared_prompts=found.shared if self._finds_shared else None,
            )

    def _identity(self, line: Line) -> bytes | None:
        here = self.choice.backend is None
        return identity_of(line.endpoint, line.body, self.spec.defaults, self.spec.model, here=here)

    @property
    def _is_here(self) -> bool:
        """Whether one engine in this process would compute the job, whose steps are those that are kept."""
        is_local = self.choice.backend is None and self.choice.processes is None and self.choice.ray is None
        return is_local and self.given_engine is None and self.given_inference is None

    def _time_or_reason(
        self, sample: LineSample, tokenizer: Any | None, found: Plan, signature: JobSignature
    ) -> tuple[PlannedTime | None, str]:
        """The time of the job; or None, and why it is not known."""
        try:
            return self._time(sample, tokenizer, found, signature), ""
        except _NoTime as reason:
            return None, str(reason)

    @property
    def _finds_shared(self) -> bool:
        """Whether what computes the job may reuse what prompts share: an endpoint, or a model with prefix caching."""
        config = self.choice.config if self.given_engine is None else self.given_engine.config
        return self.choice.backend is not None or config.prefix_caching

    def _time(self, sample: LineSample, tokenizer: Any | None, found: Plan, signature: JobSignature) -> PlannedTime:
        """The time of the job. Raises `_NoTime`, as where the model was never measured on this machine, nor is now."""
        if self.choice.processes is not None or self.choice.ray is not None:
            raise _NoTime("it is predicted for one engine in this process, not for replicas")
        if sample.has_others:
            raise _NoTime("some lines are for a model that does not generate, whose time is not predicted")
        model = self.choice.model
        if model is None or tokenizer is None or not sample.is_usable:
            raise _NoTime
        shared = found.shared.shared_tokens if self.planned else found.shared.shared_in_input_order
        if not self._finds_shared:
            shared = 0
        try:
            with _Probes(model, self.choice, self._loading) as probes:
                kept = find_costs(model, self.choice.config)
                if kept is None and self.probes:
                    kept = probes.costs()
                if kept is None:
                    raise _NoTime(_NOT_MEASURED)
                job = sample.job(kept, self.choice.config, self.spec, tokenizer.encode)
                if job is None:
                    raise _NoTime("none of the lines fits into the engine")
                likely = likely_lengths(earlier_answers(model), signature, job.limits)
                probed = None
                if self.probes and job.open_lines and (likely is None or likely.is_of_others):
                    probed = self._probed(probes, job)
        except _MODEL_FAILURES as error:
            raise _NoTime(str(error) or type(error).__name__) from error
        pace = 1.0
        if probed is not None:
            job = job.with_costs(find_costs(model, self.choice.config) or kept)
            if likely is not None:
                likely = replace(likely, beyond=probed.exceeded)
            likely = probed.likely(job.limits) or likely
            pace = job.pace([(each.line, each.tokens) for each in probed.answers], probed.seconds)
        return job.time(likely, max(0, found.prompt_tokens - shared), pace=pace, planned=self.planned)

    def _probed(self, probes: _Probes, job: SampledJob) -> ProbedAnswers | None:
        """Answers to some lines; None if there are none."""
        assert isinstance(self.spec.defaults, SamplingParams)
        try:
            return probes.answers(job.open_lines, self.spec.defaults)
        except _MODEL_FAILURES as error:
            _log.warning("no lines could be answered to see how long answers are: %s", error)
            return None

    def _loading(self, text: str) -> None:
        self.progress(RunProgress("loading", text))

    def _capacity(self) -> EngineCapacity | None:
        """What the engine holds at once, as far as that is known before it is loaded; None if there is none here."""
        if self.choice.backend is not None or self.given_inference is not None:
            return None
        if self.given_engine is not None:
            stats = self.given_engine.stats
            return EngineCapacity(stats.max_num_seqs, stats.kv_blocks * stats.block_size)
        replicas = self.choice.replicas if isinstance(self.choice.replicas, int) else 1
        places, kv_tokens = self.choice.config.max_num_seqs or DEFAULT_MAX_NUM_SEQS, None
        with suppress(*_MODEL_FAILURES):
            if self.choice.model is not None and (kept := find_costs(self.choice.model, self.choice.config)):
                sizes = kept.facts.sizes(self.choice.config)
                places, kv_tokens = sizes.max_num_seqs, sizes.num_blocks * BLOCK_SIZE * replicas
        return EngineCapacity(places * replicas, kv_tokens, replicas)

    def _context(self, tokenizer: Any | None) -> int | None:
        """The most tokens of a prompt and its answer, as far as that is known before the model is loaded."""
        if self.given_engine is not None:
            return self.given_engine.max_model_len
        is_loaded = self.choice.backend is None and self.given_inference is None
        known = (getattr(tokenizer, "context", None), self.choice.config.max_model_len if is_loaded else None)
        return min((each for each in known if each is not None), default=None)

    def _with_expected(
        self, answers: AnswersPlanned, time: PlannedTime | None, job: Job, found: Plan
    ) -> AnswersPlanned:
        """Say how long all answers are expected to be, if lines do not: by the planned time or the answers so far."""
        if answers.expected is not None:
            return answers
        if time is not None:
            return replace(answers, expected=time.answer_tokens)
        mean = None if self.terms is None else self._mean_answer(job)
        return replace(answers, expected=None if mean is None else round(mean * (found.valid - found.identical)))

    def _cost_planner(self, job: Job) -> CostPlanner | None:
        """What adds up the cost of the lines; None if no price is known."""
        if self.terms is None or not self.terms.book.has_any:
            return None
        return CostPlanner(self.terms.book, self.choice.model, self.spec.defaults, self._mean_answer(job))

    def _mean_answer(self, job: Job) -> float | None:
        """Mean tokens of the answers that the job has got from its endpoint; None: it has none."""
        journal = SpendJournal(None if self.spec.to_stream else journal_path(local_output(self.spec)), job.key)
        answers = journal.totals.answers
        return journal.totals.output_tokens / answers if answers else None

    def _tokenizer(self) -> Any | None:
        """The tokenizer of the model that generates; None if there is none on this machine."""
        if self.given_engine is not None:
            return self.given_engine.core.tokenizer
        return None if self.given_inference is not None else self.choice.tokenizer()

    def _text_tokenizer(self, endpoint: str) -> TextTokenizer | None:
        """The tokenizer of the embedding model that computes lines for `endpoint`; None if that is not known here.

        Which of several models computes a line, and whether a classifier does, is known only when it is routed.
        """
        is_given = self.given_engine is not None or self.given_inference is not None
        return None if is_given or endpoint not in self.choice.embedded else self._embedding_tokenizer

    @cached_property
    def _embedding_tokenizer(self) -> TextTokenizer | None:
        return self.choice.text_tokenizer()


def _cached_share(found: Plan) -> float:
    """Return the share of what a provider's cache keeps of the prompts that earlier ones have put into it."""
    return min(1.0, found.shared.provider_tokens / found.cacheable_tokens) if found.cacheable_tokens else 0.0
