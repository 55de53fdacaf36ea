"""Time that a job will take on this machine, told before anything is computed.

A sample of its lines is simulated, as `batchwright simulate` does: with the scheduler of the engine, the order in which
a run takes lines up, and the law of steps that earlier runs have measured. How long answers will be is what lines say
themselves, else what answers of earlier runs were like, else as long as lines allow.
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
from batchwright.jobs.earlier_answers import LengthSource, LikelyLengths, RunAnswers, likely_lengths
from batchwright.jobs.job_lengths import simulated_requests
from batchwright.jobs.lines import Line
from batchwright.jobs.spec import JobSpec
from batchwright.kept_costs import KeptCosts
from batchwright.planning.intervals import covering_error
from batchwright.request import SamplingParams
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
    templates, or of any with the same model; `limits`: each was taken to be as long as its line allows."""
    runs: int
    """Number of earlier runs whose answers were looked at."""


@dataclass(frozen=True, slots=True)
class TimeBasis:
    """What is known of a model on this machine before a job."""

    kept: KeptCosts
    config: EngineConfig
    runs: Sequence[RunAnswers]
    """Answers of earlier runs of the model."""
    planned: bool = True
    """Whether lines are taken up in the planner's order."""


class LineSample:
    """Lines of a job by which its time is told."""

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

    def time(
        self, basis: TimeBasis, spec: JobSpec, encode: Callable[[Any], list[int]], prompt_tokens: float
    ) -> PlannedTime | None:
        """Return the time of all lines; None if none can be computed.

        `encode` returns the tokens of a prompt; `prompt_tokens`: those of all prompts that are not found in a cache.
        Raises ValueError for options that do not fit the model.
        """
        fleet = Fleet(1, basis.kept.facts.sizes(basis.config), basis.config, basis.kept.costs, seed=None)
        lines = self._sample.items
        requests = _computable(lines, spec, encode, fleet)
        if not requests or not self.is_usable:
            return None
        limits = Counter(each.limit for each in requests if each.expected_tokens is None)
        likely = likely_lengths(basis.runs, spec, limits)
        total = max(len(requests), round(len(requests) * self._sample.seen / len(lines)))

        def seconds(error: float, most_stepped: int = MOST_STEPPED // 4) -> float:
            drawn = _with_lengths(requests, likely, math.exp(error))
            planned = basis.planned
            return job_seconds(fleet, drawn, total, prompt_tokens, planned=planned, most_stepped=most_stepped)

        told = seconds(0.0, MOST_STEPPED)
        least = most = told
        if likely is not None:
            least, most = min(told, seconds(-likely.error)), max(told, seconds(likely.error))
        elif limits:
            least = min(told, seconds(-math.inf))
        cost_error = covering_error([abs(math.log(each)) for each in basis.kept.run_ratios], _FIRST_COST_ERROR)
        return PlannedTime(
            told,
            (_beyond(told, least, -cost_error), _beyond(told, most, cost_error)),
            "lines" if not limits else "limits" if likely is None else likely.source,
            0 if likely is None else likely.runs,
        )


def _computable(
    lines: Sequence[Line], spec: JobSpec, encode: Callable[[Any], list[int]], fleet: Fleet
) -> list[SimulatedRequest]:
    """The requests of `lines` that an engine would not refuse."""
    assert isinstance(spec.defaults, SamplingParams)
    scheduler, longest = fleet.sizes.scheduler(fleet.config), fleet.sizes.max_model_len
    found: list[SimulatedRequest] = []
    for line in lines:
        try:
            requests = [*simulated_requests(line, encode, spec.defaults, longest)]
        except Exception:  # it fails in a run, too: of what it asks, or of a tokenizer, which is foreign code
            continue
        found += (
            each
            for each in requests
            if each.prompt_tokens + each.limit <= longest and scheduler.refusal(each.prompt_tokens, each.limit) is None
        )
    return found


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
