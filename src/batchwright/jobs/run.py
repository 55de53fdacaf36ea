"""`batchwright.run`: a file of prompts through an engine, resumably."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchwright.clock import Clock, MonotonicClock
from batchwright.engine_config import EngineConfig, engine_options
from batchwright.errors import BatchwrightError, InputBroken, InputError
from batchwright.jobs.executor import Executor, load_engine
from batchwright.jobs.job import Job
from batchwright.jobs.loop import JobLoop, Tally
from batchwright.jobs.report import RunReport
from batchwright.jobs.spec import STREAM, JobSpec
from batchwright.models import DEFAULT_MODEL, fingerprint
from batchwright.request import SamplingParams

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

_ALWAYS_NAMED = ("dtype", "quantization", "deterministic", "max_model_len")
"""Of the engine's options, those that the identity of every job names; others that change results only when chosen."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Where a run stands."""

    phase: Literal["reading", "loading", "running", "finishing"]
    total: int = 0
    succeeded: int = 0
    """Those of earlier runs included, as in `failed`."""
    failed: int = 0
    resumed: int = 0
    running: int = 0
    """Requests that are with the engine."""
    prompt_tokens: int = 0
    generated_tokens: int = 0

    @property
    def done(self) -> int:
        return self.succeeded + self.failed


class RunInterrupted(KeyboardInterrupt):
    """A run was stopped by KeyboardInterrupt. All finished lines are in the output; `run` again goes on after them."""

    def __init__(self, report: RunReport, kept_input: Path | None) -> None:
        super().__init__("interrupted")
        self.report = report
        self.kept_input = kept_input
        """When the input was a stream: the file that holds what was read from it."""


def run(
    input: str | os.PathLike[str],  # noqa: A002 - the name that users expect
    output: str | os.PathLike[str],
    *,
    model: str = DEFAULT_MODEL,
    defaults: SamplingParams | None = None,
    input_format: str | None = None,
    prompt_template: str | None = None,
    chat: bool = False,
    system: str | None = None,
    ordered: bool = False,
    overwrite: bool = False,
    max_line_bytes: int = 2**20,
    report: str | os.PathLike[str] | None = None,
    progress: Callable[[RunProgress], None] | None = None,
    executor: Executor | None = None,
    clock: Clock | None = None,
    engine: EngineConfig | None = None,
    **engine_options: Any,
) -> RunReport:
    """Answer every line of `input` into `output`, and say how it went.

    Lines are OpenAI batch lines, `{"prompt": …}` or `{"messages": […]}` (`.jsonl`), plain prompts (`.txt`), or rows
    that `prompt_template` turns into prompts (`.csv`, `.tsv`, `.parquet`); `.gz` of the text forms too. `-` is standard
    input or output. Results are written in the form of OpenAI's batch output as they finish, or by the order
    of the input when `ordered`. A line that cannot be answered becomes a line with an error.

    A line may have `priority` (lower is sooner) and `deadline_ms` (or `deadline`, in seconds), counted from when the
    line is handed to the engine: one that is not finished by then becomes a line with the error `deadline_exceeded`.

    Stopped at any moment and called again with the same arguments, it goes on after the lines that are finished.

    - `defaults`: sampling parameters of lines that do not set them.
    - `chat`: makes plain prompts the user message of a chat, after `system` if that is given.
    - `overwrite`: starts over, in place of whatever `output` holds.
    - `max_line_bytes`: a longer line is an error line.
    - `report`: a file for the report as JSON.
    - `progress`: called between steps.
    - `engine`: how the engine computes; `engine_options` are fields of `EngineConfig` that go before it.
    - `executor`: something other than an engine made from `model` and that; it is not closed, and holds no
      request of this run afterwards.

    Raises `InputError` when the input cannot be read as it is said to be, `InputBroken` when that shows only after
    lines were answered, `ResumeRefused` when `output` belongs to another job or another run is writing it, whatever
    loading the model raises, OSError when results cannot be written, and `RunInterrupted` on KeyboardInterrupt. In each
    case the lines finished so far are kept.
    """
    try:
        config = (engine or EngineConfig()).with_options(**engine_options)
    except ValueError as error:
        raise InputError(str(error)) from error
    spec = JobSpec(
        input=os.fspath(input),
        output=os.fspath(output),
        model=executor.model_name if executor is not None else model,
        defaults=defaults if defaults is not None else SamplingParams(),
        input_format=input_format,
        prompt_template=prompt_template,
        chat=chat,
        system=system,
        ordered=ordered,
        overwrite=overwrite,
        max_line_bytes=max_line_bytes,
        engine_parameters=_parameters(config),
        model_files=_model_files(model) if executor is None else None,
    )
    report_path = None if report is None else Path(report)
    _check_report(report_path, spec)
    job_run = _Run(
        spec=spec,
        clock=clock or MonotonicClock(),
        load=lambda: load_engine(model, config),
        given=executor,
        progress=progress or (lambda _: None),
        report_path=report_path,
    )
    return job_run.carry_out()


def _parameters(config: EngineConfig) -> dict[str, Any]:
    """What of the engine the results depend on. The rest decides only how fast, and where: a job may change it."""
    chosen = config.chosen()
    return {
        option.name: chosen.get(option.name)
        for option in engine_options()
        if option.changes_results and (option.name in _ALWAYS_NAMED or option.name in chosen)
    }


def _model_files(model: str) -> str | None:
    """None when there is no such model, which matters only if it is to be loaded."""
    try:
        return fingerprint(model)
    except (BatchwrightError, OSError):
        return None


def _check_report(path: Path | None, spec: JobSpec) -> None:
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"report {path}: must be a file in a folder that exists")
    others = [Path(name).absolute() for name in (spec.input, spec.output) if name != STREAM]
    if path.absolute() in others:
        raise InputError(f"report {path} is the input or the output: name another file")


@dataclass
class _Run:
    """One call of `run`."""

    spec: JobSpec
    clock: Clock
    load: Callable[[], Executor]
    given: Executor | None
    progress: Callable[[RunProgress], None]
    report_path: Path | None
    load_seconds: float = 0.0

    def carry_out(self) -> RunReport:
        self._started = self.clock.now()
        self.progress(RunProgress("reading"))
        with Job(self.spec, self.clock) as job:
            return self._finish(job) if job.complete else self._work(job)

    def _finish(self, job: Job) -> RunReport:
        """Nothing to compute: no model is loaded."""
        if not job.total:
            with job.begin():
                pass
        job.end()
        return self._report(job, Tally(), None, 0.0, 0.0)

    def _work(self, job: Job) -> RunReport:
        self.progress(self._standing("loading", job, Tally()))
        before = self.clock.now()
        # Before `begin`: a model that cannot be loaded leaves the output as it was.
        executor = self.given if self.given is not None else self.load()
        self.load_seconds = self.clock.now() - before
        try:
            return self._loop(job, executor)
        finally:
            if self.given is None:
                executor.close()

    def _loop(self, job: Job, executor: Executor) -> RunReport:
        started, model_before = self.clock.now(), executor.stats.model_seconds
        tally = Tally()
        interrupted = False

        def show() -> None:
            self.progress(self._standing("running", job, tally, executor))

        try:
            with job.begin() as sink:
                JobLoop(job, executor, sink, show, tally).run()
            self.progress(self._standing("finishing", job, tally, executor))
            job.end()
        except InputError as error:
            raise InputBroken(str(error)) from error
        except KeyboardInterrupt:
            interrupted = True
        loop_seconds = self.clock.now() - started
        model_seconds = executor.stats.model_seconds - model_before
        report = self._report(job, tally, executor.stats, loop_seconds, model_seconds, interrupted)
        if interrupted:
            raise RunInterrupted(report, job.kept_input)
        return report

    def _report(
        self,
        job: Job,
        tally: Tally,
        stats: EngineStats | None,
        loop_seconds: float,
        model_seconds: float,
        interrupted: bool = False,
    ) -> RunReport:
        from batchwright.engine.engine_stats import EngineStats

        report = RunReport.of_run(
            tally,
            stats or EngineStats(),
            loop_seconds=loop_seconds,
            model_seconds=model_seconds,
            output=self.spec.output,
            model=self.spec.model,
            total=job.total,
            succeeded=job.finished.succeeded + tally.succeeded,
            failed=job.finished.failed + tally.failed,
            resumed=len(job.finished),
            interrupted=interrupted,
            wall_seconds=self.clock.now() - self._started,
            load_seconds=self.load_seconds,
        )
        if self.report_path is not None:
            report.save(self.report_path)
        return report

    def _standing(
        self,
        phase: Literal["loading", "running", "finishing"],
        job: Job,
        tally: Tally,
        executor: Executor | None = None,
    ) -> RunProgress:
        return RunProgress(
            phase,
            total=job.total,
            succeeded=job.finished.succeeded + tally.succeeded,
            failed=job.finished.failed + tally.failed,
            resumed=len(job.finished),
            running=executor.unfinished if executor is not None else 0,
            prompt_tokens=tally.prompt_tokens,
            generated_tokens=executor.stats.generated_tokens if executor is not None else 0,
        )
