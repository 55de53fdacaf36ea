"""Time that a job will take on this machine, predicted before it runs.

A sample of its lines is simulated, as `batchwright simulate` does: with the scheduler of the engine, the order in which
a run starts lines, and the cost model of steps that earlier runs have measured. The lengths of answers are those that
lines state themselves, else those of earlier runs of such a job or of answers to some of its lines, else the most that
lines allow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from batchwright.engine_config import EngineConfig
from batchwright.jobs.block_sample import BlockSample
from batchwright.jobs.earlier_answers import LengthSource, LikelyLengths
from batchwright.jobs.job_lengths import simulated_requests, with_lengths
from batchwright.jobs.lines import Line
from batchwright.jobs.spec import JobSpec
from batchwright.kept_costs import KeptCosts
from batchwright.planning.intervals import covering_error
from batchwright.request import SamplingParams
from batchwright.scheduling.scheduler import Scheduler
from batchwright.simulation.fleet import Fleet, simulate
from batchwright.simulation.job_time import MOST_STEPPED, JobTime, job_time, lines_to_step
from batchwright.simulation.requests import SimulatedRequest
from batchwright.wire.requests import ENCODER_URLS

_SAMPLED, _SAMPLED_BYTES = 2048, 2**26
"""Most lines of a job that are simulated, and their bytes."""
_FIRST_COST_ERROR = 0.2
"""Error of the cost model that is assumed until enough runs have shown it."""
_UNSURE_SECONDS = 0.5
"""Length of a measurement whose pace counts half."""


@dataclass(frozen=True, slots=True)
class PlannedTime:
    """Seconds that a job takes on this machine once its model is loaded."""

    seconds: float
    """Expected seconds; the most, if nothing is known about the lengths of answers (`lengths_from` is `limits`)."""
    between: tuple[float, float]
    """The least and the most that it is in nine cases of ten; if nothing is known about lengths, the least is that of
    answers of a single token."""
    lengths_from: Literal["lines", "limits"] | LengthSource
    """Where the lengths of answers are known from: the lines themselves, runs of the same job, of others with the same
    templates, or of any with the same model; `probe`: some of its lines were answered; `limits`: each is assumed to be
    as long as its line allows."""
    runs: int
    """Number of earlier runs whose answers were used; for a probe: of lines that were answered at least in part."""
    answer_tokens: int | None = None
    """Approximate tokens of all answers, by the same lengths; None if nothing is known about them."""
    kv_tokens: int | None = None
    """Approximate most tokens in the KV cache at a time, by the same lengths, with shared prefixes held once; None if
    no lines were simulated."""


@dataclass(frozen=True, slots=True)
class SampledLine:
    """A line as an engine would compute it."""

    line: Line
    requests: Sequence[SimulatedRequest]
    """One for each of its answers, each as long as it allows. At least one."""

    @property
    def limit(self) -> int:
        """Most tokens of its first answer."""
        return self.requests[0].limit

    @property
    def is_open(self) -> bool:
        """Whether it does not say how long its answers will be."""
        return any(each.expected_tokens is None for each in self.requests)


@dataclass(frozen=True, slots=True)
class SampledJob:
    """Lines of a job as an engine would compute them, from which its time is predicted."""

    fleet: Fleet
    """The engine, with what its steps take."""
    lines: Sequence[SampledLine]
    """At least one."""
    total: int
    """Requests of the whole job."""
    cost_error: float
    """Logarithm of the factor within which the true time of all steps lies in nine cases of ten."""

    @property
    def open_lines(self) -> list[SampledLine]:
        """The lines that do not say how long their answers will be."""
        return [each for each in self.lines if each.is_open]

    @property
    def limits(self) -> Counter[int]:
        """Limits of the requests of `open_lines`."""
        return Counter(each.limit for line in self.lines for each in line.requests if each.expected_tokens is None)

    def with_costs(self, kept: KeptCosts) -> SampledJob:
        """The same job, with what is now known about the time of steps."""
        fleet = replace(self.fleet, costs=kept.costs)
        return replace(self, fleet=fleet, cost_error=_cost_error(kept))

    def pace(self, answered: Sequence[tuple[SampledLine, int]], seconds: float) -> float:
        """Return how long an engine took for answers, divided by what its steps should have taken for them.

        `answered`: lines, each with the tokens of its one answer; `seconds`: the time that all took. The result
        includes what the cost model lacks, such as drafts, and how fast the machine is now.
        """
        requests = [
            replace(line.requests[0], output_tokens=tokens, max_tokens=line.limit)
            for line, tokens in answered
            if tokens
        ]
        predicted = simulate(self.fleet, [], requests).seconds
        if not requests or predicted <= 0.0 or seconds <= 0.0:
            return 1.0
        # The shorter the time, the less it says.
        return float((seconds / predicted) ** (seconds / (seconds + _UNSURE_SECONDS)))

    def time(
        self, likely: LikelyLengths | None, prompt_tokens: float, *, pace: float = 1.0, planned: bool = True
    ) -> PlannedTime:
        """Return the time of all lines.

        `likely`: what is known about the answers to `open_lines`; `prompt_tokens`: those of all prompts that are not
        found in a cache; `pace`: as `pace` returns it; `planned`: whether lines are started in the planner's order.
        """
        requests = [each for line in self.lines for each in line.requests]

        def drawn(error: float) -> list[SimulatedRequest]:
            return with_lengths(requests, likely, math.exp(error))

        def taken(lines: Sequence[SimulatedRequest], stepped: int) -> JobTime:
            return job_time(self.fleet, lines, self.total, prompt_tokens, planned=planned, stepped=stepped)

        def seconds(lines: Sequence[SimulatedRequest], stepped: int) -> float:
            return pace * taken(lines, stepped).seconds

        is_open = any(line.is_open for line in self.lines)
        middle = drawn(0.0)
        all_stepped, stepped = (
            lines_to_step(self.fleet, middle, self.total, most) for most in (MOST_STEPPED, MOST_STEPPED // 4)
        )
        expected = taken(middle, all_stepped)
        predicted = pace * expected.seconds
        least = most = predicted
        if is_open:
            # Both ends are simulated with the same number of lines, and scaled like the middle with that many lines.
            scale = predicted / (predicted if stepped == all_stepped else seconds(middle, stepped))
            least = min(predicted, scale * seconds(drawn(-math.inf if likely is None else -likely.errors[0]), stepped))
            if likely is not None:
                most = max(predicted, scale * seconds(drawn(likely.errors[1]), stepped))
        else:
            likely = None
        return PlannedTime(
            predicted,
            (_beyond(predicted, least, -self.cost_error), _beyond(predicted, most, self.cost_error)),
            "lines" if not is_open else "limits" if likely is None else likely.source,
            0 if likely is None else likely.runs,
            None if is_open and likely is None else self._scaled(sum(each.output_tokens for each in middle)),
            expected.kv_tokens,
        )

    def _scaled(self, of_sample: int) -> int:
        """Return the number for the whole job that corresponds to `of_sample` in the sampled lines."""
        return round(of_sample * self.total / sum(len(line.requests) for line in self.lines))


class LineSample:
    """Lines of a job, drawn as they are read."""

    def __init__(self) -> None:
        self._sample = BlockSample[Line](_SAMPLED, _SAMPLED_BYTES)
        self.has_others = False
        """Whether there are lines for a model that does not generate."""

    @property
    def is_usable(self) -> bool:
        """Whether there are lines, and all are for a model that generates."""
        return bool(self._sample.seen) and not self.has_others

    def add(self, line: Line, size: int) -> None:
        """Count a line that will be computed, whose prompts have `size` bytes."""
        if line.endpoint in ENCODER_URLS:
            self.has_others = True
        elif self._sample.wants_next():
            self._sample.add(line, size)

    def job(
        self, kept: KeptCosts, config: EngineConfig, spec: JobSpec, encode: Callable[[Any], list[int]]
    ) -> SampledJob | None:
        """Return the job as an engine with the costs `kept` computes it; None if no line can be computed.

        `encode` returns the tokens of a prompt. Raises ValueError for options that do not fit the model.
        """
        assert isinstance(spec.defaults, SamplingParams)
        fleet = Fleet(1, kept.facts.sizes(config), config, kept.costs, seed=None)
        scheduler = fleet.sizes.scheduler(config)
        found = []
        for line in (sampled := self._sample.items):
            if requests := _computable(line, spec.defaults, encode, scheduler, fleet.sizes.max_model_len):
                found.append(SampledLine(line, requests))
        if not found or not self.is_usable:
            return None
        count = sum(len(each.requests) for each in found)
        total = max(count, round(count * self._sample.seen / len(sampled)))
        return SampledJob(fleet, found, total, _cost_error(kept))


def _cost_error(kept: KeptCosts) -> float:
    return covering_error([abs(math.log(each)) for each in kept.run_ratios], _FIRST_COST_ERROR)


def _computable(
    line: Line, defaults: SamplingParams, encode: Callable[[Any], list[int]], scheduler: Scheduler, longest: int
) -> list[SimulatedRequest]:
    """The requests of a line that an engine would not refuse."""
    try:
        requests = [*simulated_requests(line, encode, defaults, longest)]
    except Exception:  # it fails in a run, too: because of the request, or of a tokenizer, which is foreign code
        return []
    return [
        each
        for each in requests
        if each.prompt_tokens + each.limit <= longest and scheduler.refusal(each.prompt_tokens, each.limit) is None
    ]


def _beyond(middle: float, bound: float, error: float) -> float:
    """Return the bound of an interval around `middle` that allows for a further, independent error of its logarithm."""
    return middle * math.exp(math.copysign(math.hypot(math.log(bound / middle), error), error))
