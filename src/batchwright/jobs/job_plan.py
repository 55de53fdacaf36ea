"""`JobPlan`: what a run of a job would compute, take and cost, found without computing anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchwright.clock import Clock
from batchwright.engine_config import DEFAULT_MAX_NUM_SEQS
from batchwright.errors import BatchwrightError
from batchwright.inference.inference import Inference
from batchwright.jobs.answer_tables import TableColumns
from batchwright.jobs.dry_run import Capacity, plan
from batchwright.jobs.earlier_answers import earlier_answers
from batchwright.jobs.identical_lines import find_repeats
from batchwright.jobs.input_names import STREAM
from batchwright.jobs.job import Job, local_output
from batchwright.jobs.loading import ModelChoice
from batchwright.jobs.planned_time import TimePlanner
from batchwright.jobs.report import RunReport
from batchwright.jobs.spec import JobSpec
from batchwright.jobs.spend_journal import SpendJournal, journal_path
from batchwright.jobs.spending import CostPlanner, SpendingTerms
from batchwright.kept_costs import find_costs
from batchwright.lines.forecast import LONGEST_COUNTED

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine


@dataclass
class JobPlan:
    """A job that is not computed, as `run` with `dry_run` describes it."""

    spec: JobSpec
    clock: Clock
    choice: ModelChoice
    given_engine: Engine | None
    given_inference: Inference | None
    terms: SpendingTerms | None
    dedupe: bool = True
    planned: bool = True

    def report(self) -> RunReport:
        """The report of a run that computes nothing."""
        self.spec.check()
        # A stream as output keeps no state.
        spec = replace(self.spec, output=STREAM, columns=TableColumns(), ordered=False, retry_failed=None)
        with Job(spec, self.clock) as job:
            costs, time = self._cost_planner(job), self._time_planner()
            shares = self.dedupe and self.given_inference is None
            tokenizer = self._tokenizer()
            found = plan(
                job,
                tokenizer,
                partial(self.choice.prompts_of, defaults=self.spec.defaults),
                None if costs is None else costs.add,
                find_repeats(job, self.spec.defaults, self.spec.model, None) if shares else None,
                limit=getattr(self.spec.defaults, "max_tokens", LONGEST_COUNTED),
                capacity=self._capacity(),
                time=time,
            )
            return RunReport(
                output=self.spec.output,
                model=self.spec.model or self.spec.embedding_model or self.spec.backend or "",
                total=job.total,
                failed=job.total - found.valid,
                failures=list(found.failures),
                prompt_tokens=found.prompt_tokens,
                deduplicated=found.identical,
                saved_prompt_tokens=found.saved_prompt_tokens,
                first_requests=found.first,
                planned_cost=None if costs is None else costs.result(),
                planned_answers=found.answers,
                planned_time=None if time is None or tokenizer is None else time.result(self.spec, tokenizer.encode),
                reordered_fields=job.field_reuse,
                shared_prompts=found.shared,
            )

    def _capacity(self) -> Capacity | None:
        """What the engine holds at once, as far as that is known before it is loaded; None if there is none here."""
        if self.choice.backend is not None or self.given_inference is not None:
            return None
        if self.given_engine is not None:
            stats = self.given_engine.stats
            return Capacity(stats.max_num_seqs, stats.kv_blocks * stats.block_size)
        replicas = self.choice.replicas if isinstance(self.choice.replicas, int) else 1
        return Capacity((self.choice.config.max_num_seqs or DEFAULT_MAX_NUM_SEQS) * replicas, None)

    def _time_planner(self) -> TimePlanner | None:
        """What tells the time of the job; None if nothing of the model was measured on this machine."""
        model = self.choice.model
        is_here = self.choice.backend is None and self.choice.processes is None and self.choice.ray is None
        if model is None or not is_here or self.given_engine is not None or self.given_inference is not None:
            return None
        try:
            kept = find_costs(model, self.choice.config)
            return (
                None
                if kept is None
                else TimePlanner(kept, self.choice.config, earlier_answers(model), planned=self.planned)
            )
        except (BatchwrightError, OSError, ValueError):
            return None  # the plan needs no model, and a run says what is wrong with it

    def _cost_planner(self, job: Job) -> CostPlanner | None:
        """What adds up the cost of the lines; None if no price is known."""
        if self.terms is None or not self.terms.book.has_any:
            return None
        to_stream = self.spec.to_stream
        journal = SpendJournal(None if to_stream else journal_path(local_output(self.spec)), job.key)
        answers, tokens = journal.totals.answers, journal.totals.output_tokens
        mean = tokens / answers if answers else None
        return CostPlanner(self.terms.book, self.choice.model, self.spec.defaults, mean)

    def _tokenizer(self) -> Any | None:
        """The tokenizer of the model that generates; None if there is none on this machine."""
        if self.given_engine is not None:
            return self.given_engine.core.tokenizer
        return None if self.given_inference is not None else self.choice.tokenizer()
