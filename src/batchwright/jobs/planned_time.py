"""Time that a job will take on this machine, told before anything is computed.

A sample of its lines is simulated, as `batchwright simulate` does: with the scheduler of the engine, the order in which
a run takes lines up, and the law of steps that earlier runs have measured. How long answers will be is what lines say
themselves, else what answers of earlier runs of such a job were like, or those to some of its lines, else as long as
lines allow.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from batchwright.engine_config import EngineConfig
from batchwright.jobs.block_sample import BlockSample
from batchwright.jobs.earlier_answers import LengthSource, LikelyLengths
from batchwright.jobs.job_lengths import simulated_requests
from batchwright.jobs.lines import Line
from batchwright.jobs.spec import JobSpec
from batchwright.kept_costs import KeptCosts
from batchwright.planning.intervals import covering_error
from batchwright.request import SamplingParams
from batchwright.scheduling.scheduler import Scheduler
from batchwright.simulation.fleet import Fleet
from batchwright.simulation.job_time import MOST_STEPPED, job_seconds
from batchwright.simulation.requests import SimulatedRequest
from batchwright.wire.requests import ENCODER_URLS

_SAMPLED, _SAMPLED_BYTES = 2048, 2**26
"""Most lines of a job that are simulated, and their bytes."""
_FIRST_COST_ERROR = 0.2
"""Error of the law of steps that is assumed before enough runs have shown it."""


@dataclass(frozen=True, slots=True)
class PlannedTime:
    """Seconds that a job takes on this machine once its model is loaded."""

    seconds: float
    """Expected ones; the most, if nothing is known of the lengths of answers (`lengths_from` is `limits`)."""
    between: tuple[float, float]
    """The least and the most that it is in nine cases of ten; if nothing is known of lengths, the least is that of
    answers of a single token."""
    lengths_from: Literal["lines", "limits"] | LengthSource
    """What the lengths of answers are known from: the lines themselves, runs of the same job, of others with the same
    templates, or of any with the same model; `probe`: some of its lines were answered; `limits`: each was taken to be
    as long as its line allows."""
    runs: int
    """Number of earlier runs whose answers were looked at, or of lines that were answered."""


@dataclass(frozen=True, slots=True)
class SampledJob:
    """Lines of a job as an engine would compute them, by which its time is told."""

    fleet: Fleet
    """The engine, with what its steps take."""
    requests: Sequence[SimulatedRequest]
    """What the lines are, each as long as it allows. At least one."""
    open_lines: Sequence[Line]
    """Those lines that do not say how long their answers will be."""
    total: int
    """Requests of the whole job."""
    cost_error: float
    """Logarithm of the factor within which the time of all steps is true in nine cases of ten."""

    @property
    def limits(self) -> Counter[int]:
        """Limits of the requests of `open_lines`."""
        return Counter(each.limit for each in self.requests if each.expected_tokens is None)

    def with_costs(self, kept: KeptCosts) -> SampledJob:
        """The same job by what is known now of what steps take."""
        fleet = replace(self.fleet, costs=kept.costs)
        return replace(self, fleet=fleet, cost_error=_cost_error(kept))

    def time(self, likely: LikelyLengths | None, prompt_tokens: float, *, planned: bool = True) -> PlannedTime:
        """Return the time of all lines.

        `likely`: what is known of the answers to `open_lines`; `prompt_tokens`: those of all prompts that are not found
        in a cache; `planned`: whether lines are taken up in the planner's order.
        """

        def seconds(error: float, most_stepped: int = MOST_STEPPED // 4) -> float:
            drawn = _with_lengths(self.requests, likely, math.exp(error))
            return job_seconds(self.fleet, drawn, self.total, prompt_tokens, planned=planned, most_stepped=most_stepped)

        told = seconds(0.0, MOST_STEPPED)
        least = most = told
        if not self.open_lines:
            likely = None
        elif likely is not None:
            least, most = min(told, seconds(-likely.error)), max(told, seconds(likely.error))
        else:
            least = min(told, seconds(-math.inf))
        return PlannedTime(
            told,
            (_beyond(told, least, -self.cost_error), _beyond(told, most, self.cost_error)),
            "lines" if not self.open_lines else "limits" if likely is None else likely.source,
            0 if likely is None else likely.runs,
        )


class LineSample:
    """Lines of a job, drawn as they are read."""

    def __init__(self) -> None:
        self._sample = BlockSample[Line](_SAMPLED, _SAMPLED_BYTES)
        self._has_others = False

    @property
    def is_usable(self) -> bool:
        """Whether there are lines, and all are for a model that generates."""
        return bool(self._sample.seen) and not self._has_others

    def add(self, line: Line, size: int) -> None:
        """Count a line that will be computed, whose prompts have `size` bytes."""
        if line.endpoint in ENCODER_URLS:
            self._has_others = True
        elif self._sample.wants_next():
            self._sample.add(line, size)

    def job(
        self, kept: KeptCosts, config: EngineConfig, spec: JobSpec, encode: Callable[[Any], list[int]]
    ) -> SampledJob | None:
        """Return the job as an engine computes it, of which `kept` is known; None if no line can be computed.

        `encode` returns the tokens of a prompt. Raises ValueError for options that do not fit the model.
        """
        assert isinstance(spec.defaults, SamplingParams)
        fleet = Fleet(1, kept.facts.sizes(config), config, kept.costs, seed=None)
        scheduler = fleet.sizes.scheduler(config)
        requests: list[SimulatedRequest] = []
        open_lines = []
        for line in (lines := self._sample.items):
            of_line = _computable(line, spec.defaults, encode, scheduler, fleet.sizes.max_model_len)
            requests += of_line
            if any(each.expected_tokens is None for each in of_line):
                open_lines.append(line)
        if not requests or not self.is_usable:
            return None
        total = max(len(requests), round(len(requests) * self._sample.seen / len(lines)))
        return SampledJob(fleet, requests, open_lines, total, _cost_error(kept))


def _cost_error(kept: KeptCosts) -> float:
    return covering_error([abs(math.log(each)) for each in kept.run_ratios], _FIRST_COST_ERROR)


def _computable(
    line: Line, defaults: SamplingParams, encode: Callable[[Any], list[int]], scheduler: Scheduler, longest: int
) -> list[SimulatedRequest]:
    """The requests of a line that an engine would not refuse."""
    try:
        requests = [*simulated_requests(line, encode, defaults, longest)]
    except Exception:  # it fails in a run, too: of what it asks, or of a tokenizer, which is foreign code
        return []
    return [
        each
        for each in requests
        if each.prompt_tokens + each.limit <= longest and scheduler.refusal(each.prompt_tokens, each.limit) is None
    ]


def _with_lengths(
    requests: Sequence[SimulatedRequest], likely: LikelyLengths | None, factor: float
) -> list[SimulatedRequest]:
    """The requests with answers of likely lengths, each `factor` times as long, but those that are told."""
    # Evenly spaced shares, shuffled: every sample has its part of long answers.
    shares = [(place + 0.5) / len(requests) for place in range(len(requests))]
    random.Random(0).shuffle(shares)
    found = []
    for each, share in zip(requests, shares, strict=True):
        tokens = each.expected_tokens
        if tokens is None:
            tokens = round(factor * each.limit) if likely is None else likely.drawn(each.limit, share, factor)
        found.append(replace(each, output_tokens=max(1, min(each.limit, tokens)), max_tokens=each.limit))
    return found


def _beyond(told: float, bound: float, error: float) -> float:
    """Return the bound of an interval around `told` that allows for a further, independent error of its logarithm."""
    return told * math.exp(math.copysign(math.hypot(math.log(bound / told), error), error))
