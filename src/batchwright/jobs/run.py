"""`batchwright.run`: a file of prompts through a model or an endpoint, resumably."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from batchwright.clock import Clock, MonotonicClock
from batchwright.durable_files import followed, is_special
from batchwright.engine_config import EngineConfig, engine_options
from batchwright.errors import BatchwrightError, BudgetExhausted, InputBroken, InputError, InvalidRequest, shown
from batchwright.inference.batches.account import BatchAccount
from batchwright.inference.batches.provider_batches import BatchJob
from batchwright.inference.endpoint_keys import EndpointKey, find_key
from batchwright.inference.inference import Inference
from batchwright.jobs.answer_tables import TableColumns
from batchwright.jobs.dry_run import plan
from batchwright.jobs.failures import Failure
from batchwright.jobs.frames import as_files
from batchwright.jobs.identical_lines import IdenticalLines, find_repeats
from batchwright.jobs.job import Job
from batchwright.jobs.job_meter import JobMeter
from batchwright.jobs.lines import check_body, check_sent_body
from batchwright.jobs.loading import LoadedModels, ModelChoice, NoModel, Via
from batchwright.jobs.loop import JobLoop, Tally
from batchwright.jobs.report import RunReport
from batchwright.jobs.run_forecast import RunForecast
from batchwright.jobs.sink import Sink
from batchwright.jobs.spec import STREAM, JobSpec, RetryFailed, expanded, require_local
from batchwright.jobs.spend_journal import SpendJournal, journal_path
from batchwright.jobs.spending import CostPlanner, Spending, SpendingTerms, exhausted
from batchwright.lines.batch_line import request_prefix
from batchwright.lines.forecast import LONGEST_COUNTED
from batchwright.models import fingerprint
from batchwright.pacing.limits import ToldLimit, told_limits
from batchwright.pacing.pacer import PacerFigures
from batchwright.planning.identical import Repeats
from batchwright.planning.prefix_order import PrefixOrder
from batchwright.pricing.rates import in_dollars
from batchwright.request import Prompt, SamplingParams
from batchwright.wire.dialects import Dialect, dialect_for
from batchwright.wire.requests import OPENAI_DEFAULTS

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine
    from batchwright.engine.engine_stats import EngineStats

_T = TypeVar("_T")

_ALWAYS_NAMED = ("dtype", "quantization", "deterministic", "max_model_len")
"""Options of the engine in the identity of every job; others that change results are in it only when chosen."""

_SAMPLING_NAMES = tuple(each.name for each in fields(SamplingParams))


Phase: TypeAlias = Literal["reading", "loading", "connecting", "running", "stopping", "finishing"]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run."""

    phase: Phase
    detail: str | None = None
    """What is done in a phase that takes long the first time."""
    total: int = 0
    succeeded: int = 0
    """Lines with a response, those of earlier runs included, as in `failed`."""
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
    pacing: Mapping[str, PacerFigures] = field(default_factory=dict)
    """What was found of the limits of an endpoint elsewhere, by model."""
    fraction: float | None = None
    """Share of the work of this run that is done, 0 to 1, in tokens as far as they are known; None like that."""
    cost: float | None = None
    """Dollars that the answers of all runs of the job cost so far; None if prices are not known."""
    budget: float | None = None
    """Dollars that all runs may cost; None if there is no budget."""

    @property
    def done(self) -> int:
        """Lines that ended in this run, with an answer or an error."""
        return self.succeeded + self.failed


class RunInterrupted(KeyboardInterrupt):
    """A run was stopped by KeyboardInterrupt. All finished lines are in the output; `run` again goes on after them."""

    def __init__(self, report: RunReport, kept_input: Path | None) -> None:
        super().__init__("interrupted")
        self.report = report
        self.kept_input = kept_input
        """File with the content of the input, if that is a stream; None otherwise."""


def run(
    input: str | os.PathLike[str] | Sequence[Any] | Any,  # noqa: A002 - the name that users expect
    output: str | os.PathLike[str] | None = None,
    *,
    model: str | Engine | None = None,
    embedding_model: str | None = None,
    backend: str | None = None,
    backend_api_key: str | EndpointKey | None = None,
    backend_dialect: str | None = None,
    also: Sequence[tuple[str, str | EndpointKey | None]] = (),
    backend_concurrency: int | None = None,
    rpm: float | None = None,
    tpm: float | None = None,
    served_model_names: Sequence[str] = (),
    dedupe: bool = True,
    budget: float | str | None = None,
    price: str | None = None,
    prices: str | os.PathLike[str] | None = None,
    cost: bool = False,
    via: Via = "live",
    deadline: str | None = None,
    batch_window: str = "24h",
    defaults: SamplingParams | Mapping[str, Any] | None = None,
    input_format: str | None = None,
    prompt_template: str | None = None,
    system_template: str | None = None,
    messages_template: str | None = None,
    chat: bool = False,
    system: str | None = None,
    id_column: str | None = None,
    keep: Sequence[str] | None = None,
    output_column: str = "answer",
    limit: int | None = None,
    sample: int | None = None,
    sample_seed: int = 0,
    retry_failed: RetryFailed | bool = False,
    dry_run: bool = False,
    ordered: bool = False,
    overwrite: bool = False,
    max_line_bytes: int = 2**20,
    report: str | os.PathLike[str] | None = None,
    progress: Callable[[RunProgress], None] | None = None,
    inference: Inference | None = None,
    clock: Clock | None = None,
    engine: EngineConfig | None = None,
    **engine_options: Any,
) -> RunReport:
    """Answer every line of `input` into `output`, and return a report.

    `input` is a path, several, a pattern such as `data/*.csv`, or a data frame. Lines are OpenAI batch lines for chats,
    completions and embeddings, `{"prompt": …}` or `{"messages": […]}` (`.jsonl`, or one array in `.json`), or plain
    prompts (`.txt`). Rows of a table (`.csv`, `.tsv`, `.parquet`, and with a template any JSON objects) are turned into
    requests by templates. The text forms may be compressed (`.gz`, `.zst`). `-` is standard input or output.

    The name of `output` says what it contains. For a table, and in `.csv`, `.tsv` and `.parquet`, that is a table made
    when all lines are finished: the columns of the input, the answer, its finish reason, the error and the numbers of
    tokens. Otherwise results are written in the form of OpenAI's batch output as they finish, or by the order of the
    input when `ordered` (`.jsonl`, `.jsonl.gz`, `.jsonl.zst`). A line that cannot be answered becomes a line with an
    error.

    A line may have `priority` (lower is sooner) and `deadline_ms` (or `deadline`, in seconds), counted from when the
    line is handed to the model: one that is not finished by then becomes a line with the error `request_timeout`.

    Stopped at any moment and called again with the same arguments, it goes on after the lines that are finished. Lines
    that were appended to the input since are computed then.

    - `model`: the model that generates: a name, a path, or an `Engine`, which is not closed and holds no request of
      this run afterwards. Default: smollm2-135m, or with `backend` the first that it lists.
    - `embedding_model`: the model for lines for `/v1/embeddings`.
    - `backend`: the address of an endpoint, such as `https://host/v1`, which computes in place of models in this
      process. `backend_dialect`: the form of its requests and answers, `"openai"` or `"anthropic"`; by default that of
      its host. `backend_api_key`: its key; by default the one in the environment, see docs/endpoints.md.
      `backend_concurrency`: how many requests it is given at once, by default as many as deliver the most. `rpm` and
      `tpm`: its limits of requests and tokens a minute; those that its answers state, and those that show by refusals,
      are found and kept without being told.
    - `also`: further endpoints with their keys, or further keys of the same, which share the lines by what each has
      room for; they must have the same models and dialect.
    - `served_model_names`: further names that lines may give as `model`, `*` for any; else a line that names a model
      that is not there fails.
    - `dedupe`: with `backend`, asks identical requests once for all lines, if their answer is the same each time: text
      at temperature 0 or with a seed, and embeddings. False asks each.
    - `budget`: dollars that all runs of the job with a `backend` may cost, as a number or a text such as `"5.00"`.
    - `price`: what its models cost, in dollars per million tokens: `"input=2.50,cached=1.25,output=10.00"`, also
      `cache_write` and `batch` (the part of it that batches cost); or `"openai/gpt-4o-mini"` for published prices. By
      default those of the provider whose address `backend` is. `prices`: a file with such prices by model (TOML, JSON).
    - `cost`: says in the `usage` of each answer what it cost, in dollars.
    - `via`: `"batch"` has the provider compute the lines in its own batches, at its price for these. `"auto"` does so
      as far as they will be done by `deadline`, a duration such as `"6h"` from the first start of the job, and has the
      rest computed as requests; with `"batch"`, lines that are not done by `deadline` fail. `batch_window`: the
      completion window of the batches.
    - `defaults`: sampling parameters of lines that do not set them, all or some by name. For the rest the default is
      that of `SamplingParams`, or with `backend` whatever the endpoint takes.
    - `prompt_template`, `system_template`: texts with `{column}` in them, for the prompt and the system message before
      it; by default the prompt is the column `prompt`. `messages_template`: a Jinja template of the whole chat as JSON.
      A cell that is empty or null is empty text; a row with nothing in any column of the templates fails.
    - `id_column`: the column with the custom ids of rows.
    - `keep`: columns of the input that a table as output keeps, instead of all; `output_column`: that of the answers.
    - `limit`: computes only the first lines; `sample`: only so many, drawn with `sample_seed`.
    - `retry_failed`: tries failed lines of earlier runs again: those whose error may pass (True), or `"all"`.
    - `dry_run`: computes and writes nothing. The report then has the lines that would fail, the tokens of all prompts
      and the first requests as they would be sent; `output` may be left out.
    - `chat`: makes plain prompts the user message of a chat, after `system` if that is given.
    - `overwrite`: starts over, in place of whatever `output` holds.
    - `max_line_bytes`: a longer line is an error line.
    - `report`: a file for the report as JSON; `-` is standard output.
    - `progress`: called after lines have ended, and about ten times a second.
    - `engine`: how the engine computes; `engine_options` are fields of `EngineConfig` that go before it.
    - `inference`: what computes, in place of all of these; it is not closed.

    Raises `InputError` when the input cannot be read as it is said to be, `InputBroken` when that shows only after
    lines were answered, `ResumeRefused` when `output` belongs to another job or another run is writing it, whatever
    loading the model raises, OSError when results cannot be written, `RunFailed` when the endpoint did not answer for
    an hour, `BudgetExhausted` when what is left of `budget` does not cover the next request, and `RunInterrupted` on
    KeyboardInterrupt. In each case the lines finished so far are kept.
    """
    _check_keywords(engine_options)
    try:
        config = (engine or EngineConfig()).with_options(**engine_options)
    except ValueError as error:
        raise InputError(str(error)) from error
    given = None if model is None or isinstance(model, str) else model
    if inference is not None or given is not None:
        whole = "an inference" if inference is not None else "an Engine as model"
        not_live = None if via == "live" else via
        others = {"embedding_model": embedding_model, "backend": backend, "via": not_live, **config.chosen()}
        for name, value in ({"model": model} | others if inference is not None else others).items():
            if value is not None:
                raise InputError(f"{name}={shown(value)} has no effect beside {whole}: leave one of them out")
    dialect = dialect_for(backend_dialect, backend or "")
    choice = ModelChoice.of(
        model if isinstance(model, str) else None,
        embedding_model,
        backend,
        config=config,
        key=_key(backend, backend_api_key, dialect),
        others=tuple((address, _key(address, key, dialect)) for address, key in also),
        dialect=dialect,
        concurrency=backend_concurrency,
        told=_told(rpm, tpm),
        served_model_names=tuple(served_model_names),
        via=via,
        deadline=deadline,
        batch_window=batch_window,
    )
    terms = SpendingTerms.of(
        backend, budget=budget, price=price, prices=None if prices is None else Path(prices), tells_costs=cost
    )
    if terms is not None and choice.model is not None:
        terms.require_price(choice.model)
    if output is None and not dry_run:
        raise InputError("no output: name a file, such as answers.csv")
    name = inference.models[0] if inference is not None else given.model_name if given is not None else choice.model
    with as_files(input) as names:
        spec = JobSpec(
            inputs=expanded(names),
            output=STREAM if output is None else os.fspath(output),
            model=name,
            embedding_model=choice.embedding_model,
            backend=backend,
            dialect=backend_dialect,
            served_model_names=choice.served_model_names,
            defaults=defaults if isinstance(defaults, SamplingParams) else sampling_defaults(backend, defaults or {}),
            input_format=input_format,
            prompt_template=prompt_template,
            system_template=system_template,
            messages_template=messages_template,
            chat=chat,
            system=system,
            id_column=id_column,
            limit=limit,
            sample=sample,
            sample_seed=sample_seed,
            columns=TableColumns(None if keep is None else tuple(keep), output_column),
            retry_failed="passing" if retry_failed is True else retry_failed or None,
            ordered=ordered,
            overwrite=overwrite,
            max_line_bytes=max_line_bytes,
            engine_parameters=_parameters(config),
            model_files=_model_files(choice) if given is None and inference is None else None,
        )
        if report is not None:
            require_local("report", os.fspath(report))
        report_path = None if report is None else Path(report)
        _check_report(report_path, spec)
        if cost and spec.writes_rows:
            raise InputError("cost is for result lines, which have a usage: the output is a table; leave it out")
        show = progress or (lambda _: None)
        job_run = _Run(spec, clock or MonotonicClock(), choice, given, inference, show, report_path, terms, dedupe)
        return job_run.plan() if dry_run else job_run.carry_out()


def _told(rpm: float | None, tpm: float | None) -> tuple[ToldLimit, ...]:
    try:
        return told_limits(rpm, tpm)
    except ValueError as error:
        raise InputError(str(error)) from None


def _key(backend: str | None, given: str | EndpointKey | None, dialect: Dialect) -> EndpointKey:
    """The key of the endpoint; one that was not given is taken from the environment."""
    if backend is None or isinstance(given, EndpointKey):
        return given if isinstance(given, EndpointKey) else EndpointKey()
    return find_key(backend, dialect, os.environ) if given is None else EndpointKey(given)


def _check_keywords(given: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that are no options of the engine, but parameters of sampling."""
    options = [option.name for option in engine_options()]
    for name in given:
        meant = get_close_matches(name, [*_SAMPLING_NAMES, *options], 1, 0.8)
        if name not in options and meant and meant[0] in _SAMPLING_NAMES:
            raise TypeError(f"run() has no argument {name!r}: did you mean defaults={{{meant[0]!r}: …}}?")


def sampling_defaults(backend: str | None, given: Mapping[str, Any]) -> SamplingParams | Mapping[str, Any]:
    """The sampling parameters of lines that do not set them: those given, and the defaults for the rest.

    With `backend`, the rest is left to the endpoint. Raises `InvalidRequest`.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"defaults={shown(given)}: must be SamplingParams, or some of its fields by name")
    for name in given:
        if name not in _SAMPLING_NAMES:
            raise InvalidRequest(
                f"defaults have no {shown(name)}: choose from {', '.join(_SAMPLING_NAMES)}", param=name
            )
    params = replace(SamplingParams() if backend is None else OPENAI_DEFAULTS, **given)
    return params if backend is None else given


def _parameters(config: EngineConfig) -> dict[str, Any]:
    """Options of the engine that results depend on. A job may change the others, which only affect speed and place."""
    chosen = config.chosen()
    return {
        option.name: chosen.get(option.name)
        for option in engine_options()
        if option.changes_results and (option.name in _ALWAYS_NAMED or option.name in chosen)
    }


def _model_files(choice: ModelChoice) -> str | None:
    """The fingerprints of the models; None if they are elsewhere, or missing, which matters only if they are loaded."""
    if choice.backend is not None:
        return None
    try:
        return " ".join(fingerprint(name) for name in (choice.model, choice.embedding_model) if name is not None)
    except (BatchwrightError, OSError):
        return None


def _check_report(path: Path | None, spec: JobSpec) -> None:
    if path is None:
        return
    if str(path) == STREAM:
        if spec.output == STREAM:
            raise InputError("report and output are both standard output: name a file for one of them")
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"report {path}: must be a file in a folder that exists")
    others = [Path(name).resolve() for name in (*spec.inputs, spec.output) if name != STREAM]
    if path.resolve() in others and not is_special(path):
        raise InputError(f"report {path} is the input or the output: name another file")


@dataclass
class _Run:
    """A call of `run`."""

    spec: JobSpec
    clock: Clock
    choice: ModelChoice
    given_engine: Engine | None
    given_inference: Inference | None
    progress: Callable[[RunProgress], None]
    report_path: Path | None
    terms: SpendingTerms | None
    dedupe: bool = True

    def carry_out(self) -> RunReport:
        self._started = self.clock.now()
        self._load_seconds = self._loop_seconds = self._model_seconds = 0.0
        self._tally = Tally()
        self._engine = self.given_engine
        self._generated_before = self._stats.generated_tokens
        self._loop: JobLoop | None = None
        self._meter: JobMeter | None = None
        self._batches: BatchAccount | None = None
        self.progress(RunProgress("reading"))
        with Job(self.spec, self.clock) as job:
            self._meter = None if self.terms is None else self.terms.meter(job)
            if not job.complete:
                return self._work(job)
            # No model is loaded.
            if not job.total:
                with job.begin():
                    pass
            job.end()
            return self._report(job)

    def plan(self) -> RunReport:
        """The report of a run that computes nothing."""
        self.spec.check()
        # A stream as output keeps no state.
        spec = replace(self.spec, output=STREAM, columns=TableColumns(), ordered=False, retry_failed=None)
        with Job(spec, self.clock) as job:
            costs = self._cost_planner(job)
            planned = plan(job, self._tokenizer(), self._check, None if costs is None else costs.add)
            report = RunReport(
                output=self.spec.output,
                model=self.spec.model or self.spec.embedding_model or self.spec.backend or "",
                total=job.total,
                failed=job.total - planned.valid,
                failures=list(planned.failures),
                prompt_tokens=planned.prompt_tokens,
                first_requests=planned.first,
                planned_cost=None if costs is None else costs.result(),
            )
        if self.report_path is not None:
            report.save(self.report_path)
        return report

    def _check(self, endpoint: str, body: Mapping[str, Any]) -> Sequence[Prompt]:
        """The prompts in a body, after a check of what can be checked here. Raises `InvalidRequest`."""
        if self.choice.backend is None:
            return check_body(endpoint, body, self.spec.defaults)
        return check_sent_body(self.choice.dialect, endpoint, body, self.spec.defaults)

    def _cost_planner(self, job: Job) -> CostPlanner | None:
        """What adds up the cost of the lines; None if no price is known."""
        if self.terms is None or not self.terms.book.has_any:
            return None
        to_stream = self.spec.to_stream
        journal = SpendJournal(None if to_stream else journal_path(followed(Path(self.spec.output))), job.key)
        answers, tokens = journal.totals.answers, journal.totals.output_tokens
        mean = tokens / answers if answers else None
        return CostPlanner(self.terms.book, self.choice.model, self.spec.defaults, mean)

    def _tokenizer(self) -> Any | None:
        """The tokenizer of the model that generates; None if there is none on this machine."""
        if self.given_engine is not None:
            return self.given_engine.core.tokenizer
        return None if self.given_inference is not None else self.choice.tokenizer()

    def _work(self, job: Job) -> RunReport:
        before = self.clock.now()
        # Before `begin`: a model that cannot be loaded leaves the output as it was.
        loaded = self._loaded(job)
        self._repeats = self._found_repeats(job)
        self._load_seconds = self.clock.now() - before
        try:
            _run_coroutine(self._compute(job, loaded))
        except KeyboardInterrupt:
            raise RunInterrupted(self._report(job, interrupted=True), job.kept_input) from None
        except BudgetExhausted as error:
            if self._meter is None:
                raise
            raise exhausted(error, self._meter, self._report(job).done, job.total) from error
        return self._report(job)

    def _loaded(self, job: Job) -> LoadedModels:
        if self.given_engine is not None:
            return LoadedModels(self.given_engine, None, owned=False)
        if self.given_inference is not None:
            return LoadedModels(None, None)
        # An endpoint knows best what it takes.
        if self.choice.backend is None and not job.has_valid_line():
            self.given_inference = NoModel()
            return LoadedModels(None, None)
        self._show("loading" if self.choice.backend is None else "connecting", job)
        endpoints = job.endpoints() if self.choice.embedding_model is not None else ()
        loaded = self.choice.load(endpoints, lambda text: self._show("loading", job, text))
        self._engine = loaded.engine
        return loaded

    def _found_repeats(self, job: Job) -> Repeats | None:
        """The lines that are asked once with others; None if each is asked."""
        if self.choice.backend is None or not self.dedupe:
            return None
        self._show("reading", job)
        return find_repeats(job, self.spec.defaults, self.spec.model)

    async def _compute(self, job: Job, loaded: LoadedModels) -> None:
        given = None if self.given_inference is None else nullcontext(self.choice.renamed(self.given_inference))
        async with given or self.choice.opened(loaded, self._meter, self._batch_job(job)) as inference:
            if self.terms is not None and inference.models:
                self.terms.require_price(self.choice.model or inference.models[0])
            started, model_before = self.clock.now(), self._stats.model_seconds
            sink = job.begin()
            self._forecast = RunForecast(job, self._engine, self.clock)
            try:
                with sink, self._identical(job, sink) as identical:
                    self._loop = JobLoop(
                        job,
                        inference,
                        sink,
                        clock=self.clock,
                        defaults=self.spec.defaults,
                        on_progress=lambda: self._show_loop(job),
                        tally=self._tally,
                        order=PrefixOrder() if self.choice.is_live_elsewhere else None,
                        identical=identical,
                        cost_of=self._cost_of if self.terms is not None and self.terms.tells_costs else None,
                    )
                    await self._loop.run()
                self._show("finishing", job)
                job.end()
            except InputError as error:
                raise InputBroken(str(error)) from error
            finally:
                if self._meter is not None:
                    self._meter.close()
                self._loop_seconds = self.clock.now() - started
                self._model_seconds = self._stats.model_seconds - model_before

    def _identical(self, job: Job, sink: Sink) -> AbstractContextManager[IdenticalLines[Any] | None]:
        if self._repeats is None:
            return nullcontext()
        return IdenticalLines(self._repeats, sink, job.earlier_answers())

    def _cost_of(self, call_id: str) -> float | None:
        cost = None if self._meter is None else self._meter.cost_of(call_id)
        return None if cost is None else in_dollars(cost)

    def _batch_job(self, job: Job) -> BatchJob | None:
        """The job for the batches of a provider; None if lines are computed otherwise. Raises `InputError`."""
        if self.choice.via == "live":
            return None
        if self.spec.to_stream:
            raise InputError("batches need an output file, beside which they are noted: name one with -o")
        self._batches, prefix = BatchAccount(), request_prefix(job.key)
        return BatchJob(
            folder=job.batches,
            is_finished=lambda call_id: not call_id.startswith(prefix) or int(call_id[len(prefix) :]) in job.finished,
            forgets_failures=self.spec.retry_failed is not None,
            lines_left=lambda: job.total - len(job.finished) - self._tally.lines_read,
            account=self._batches,
        )

    @property
    def _stats(self) -> EngineStats:
        """Statistics of the engine; zeros if there is none."""
        from batchwright.engine.engine_stats import EngineStats

        return EngineStats() if self._engine is None else self._engine.stats

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
            interrupted=interrupted,
            wall_seconds=self.clock.now() - self._started,
            load_seconds=self._load_seconds,
            pacing={} if self._loop is None else self._loop.pacing,
            spending=None if self._meter is None else Spending.of(self._meter),
            **(self._answer_lengths() if self.choice.backend is not None else {}),
            batches=None if self._batches is None else self._batches.to_dict(),
            **self._rate(),
        )
        if self.report_path is not None:
            report.save(self.report_path)
        return report

    def _answer_lengths(self) -> dict[str, int | None]:
        answers = self._tally.answers
        limit = min(answers.limits, default=LONGEST_COUNTED)
        is_known = limit < LONGEST_COUNTED and self._tally.longest_answer and not any(answers.cut)
        return {"longest_answer": self._tally.longest_answer, "unreached_limit": limit if is_known else None}

    def _rate(self) -> dict[str, float]:
        """The rate of the tokens that the engine generated, those of lines that were not finished included."""
        if self._engine is None or self._loop_seconds <= 0:
            return {}
        generated = self._engine.stats.generated_tokens - self._generated_before
        return {"generated_tokens_per_second": generated / self._loop_seconds}

    def _show_loop(self, job: Job) -> None:
        self._show("stopping" if self._loop is not None and self._loop.stopping else "running", job)

    def _show(self, phase: Phase, job: Job, detail: str | None = None) -> None:
        forecast = None
        if self._loop is not None and phase == "running" and self._batches is None:
            # Results of batches come in bursts, which say nothing about the time left.
            forecast = self._forecast.of(self._tally, len(self._loop))
        generated = self._tally.generated_tokens
        if self._engine is not None:
            generated = self._engine.stats.generated_tokens - self._generated_before
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
                seconds_left=None if forecast is None else forecast.seconds_left,
                fraction=None if forecast is None else forecast.fraction,
                prompt_tokens=self._tally.prompt_tokens,
                generated_tokens=generated,
                pacing={} if self._loop is None else self._loop.pacing,
                cost=None if self._meter is None else in_dollars(self._meter.totals.spent),
                budget=None if self._meter is None or self._meter.limit is None else in_dollars(self._meter.limit),
            )
        )


def _run_coroutine(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` on an event loop of its own: in another thread if this one runs a loop, as in notebooks.

    KeyboardInterrupt cancels it, and is raised when it has ended.
    """
    if not _in_event_loop():
        return asyncio.run(work)
    stop: list[Callable[[], object]] = []

    async def cancellable() -> _T:
        task = asyncio.current_task()
        assert task is not None
        stop.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await work

    with ThreadPoolExecutor(1, thread_name_prefix="batchwright-run") as thread:
        result = thread.submit(asyncio.run, cancellable())
        try:
            return result.result()
        except KeyboardInterrupt:
            for each in stop:
                each()
            raise


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
