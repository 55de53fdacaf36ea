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
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from batchwright.engine_config import EngineConfig
from batchwright.errors import BatchwrightError
from batchwright.jobs.earlier_answers import LikelyLengths, Likeness, RunAnswers, likely_lengths
from batchwright.jobs.job_lengths import simulated_requests
from batchwright.jobs.lines import Line
from batchwright.jobs.spec import JobSpec
from batchwright.kept_costs import KeptCosts
from batchwright.planning.intervals import covering_error
from batchwright.request import SamplingParams
from batchwright.scheduling.sizes import EngineSizes
from batchwright.simulation.fleet import Fleet
from batchwright.simulation.job_time import MOST_STEPPED, job_seconds
from batchwright.simulation.requests import SimulatedRequest
from batchwright.wire.requests import ENCODER_URLS

_SAMPLED = 2048
"""Lines of a job that are simulated."""
_SAMPLED_BYTES = 2**26
_FIRST_PACE_ERROR = 0.2
"""Error of the law of steps that is assumed before enough runs have shown it."""

_ANY_LENGTH = 3.0
"""Logarithm of the factor by which answers may be shorter than their limits, of which nothing is known."""

LengthsKnownFrom: TypeAlias = Literal["lines", "limits"] | Likeness


@dataclass(frozen=True, slots=True)
class PlannedTime:
    """Seconds that a job is expected to take on this machine once its model is loaded."""

    seconds: float
    between: tuple[float, float]
    """The least and the most that it is in nine cases of ten."""
    lengths_from: LengthsKnownFrom
    """What the lengths of answers are known from: the lines themselves, runs of the same job, of others with the same
    templates, or of any with the same model; `limits`: each was taken to be as long as its line allows."""
    runs: int
    """Earlier runs whose answers were looked at."""


class TimePlanner:
    """Collects a sample of a job's lines, and tells the time of all of them."""

    def __init__(self, kept: KeptCosts, config: EngineConfig, runs: Sequence[RunAnswers], *, planned: bool) -> None:
        """`kept`: steps measured on this machine; `runs`: answers of earlier runs; `planned` as in `run`.

        Raises ValueError for options that do not fit the model.
        """
        self._sizes: EngineSizes = kept.facts.sizes(config)
        self._kept, self._config, self._runs = kept, config, runs
        self._planned = planned
        self._sample: list[Line] = []
        self._lines = self._others = 0
        self._bytes = 0
        self._draw = random.Random(0)

    def add(self, line: Line, size: int) -> None:
        """Add a line that will be computed, whose prompts have `size` bytes."""
        if line.endpoint in ENCODER_URLS:
            self._others += 1
            return
        # Each line is in the sample with the same probability (algorithm R, Vitter 1985).
        self._lines += 1
        if len(self._sample) < _SAMPLED and self._bytes + size <= _SAMPLED_BYTES:
            self._bytes += size
            self._sample.append(line)
        elif self._sample and (place := self._draw.randrange(self._lines)) < len(self._sample):
            self._sample[place] = line

    def result(self, spec: JobSpec, encode: Callable[[Any], list[int]]) -> PlannedTime | None:
        """Return the time of all lines; None if some are no work for an engine that generates, or none is.

        `encode` returns the tokens of a prompt.
        """
        requests = self._requests(spec, encode)
        if self._others or not requests:
            return None
        limits = Counter(each.limit for each in requests if each.expected_tokens is None)
        likely = likely_lengths(self._runs, spec, limits)
        total = max(len(requests), round(len(requests) * self._lines / len(self._sample)))
        fleet = Fleet(1, self._sizes, self._config, self._kept.costs, seed=None)

        def seconds(factor: float, most_stepped: int = MOST_STEPPED) -> float:
            drawn = _with_lengths(requests, likely, factor)
            return job_seconds(fleet, drawn, total, planned=self._planned, most_stepped=most_stepped)

        told = seconds(1.0)
        least = most = told
        if limits:
            error = _ANY_LENGTH if likely is None else likely.error
            least = min(told, seconds(math.exp(-error), MOST_STEPPED // 4))
            most = told if likely is None else max(told, seconds(math.exp(error), MOST_STEPPED // 4))
        pace_error = covering_error([abs(math.log(pace)) for pace in self._kept.paces], _FIRST_PACE_ERROR)
        known_from: LengthsKnownFrom = "lines" if not limits else "limits" if likely is None else likely.known_from
        return PlannedTime(
            told,
            (_beyond(told, least, -pace_error), _beyond(told, most, pace_error)),
            known_from,
            0 if likely is None else likely.runs,
        )

    def _requests(self, spec: JobSpec, encode: Callable[[Any], list[int]]) -> list[SimulatedRequest]:
        assert isinstance(spec.defaults, SamplingParams)
        found: list[SimulatedRequest] = []
        for line in self._sample:
            with suppress(BatchwrightError):  # it fails when it is computed
                found += simulated_requests(line, encode, spec.defaults, self._sizes.max_model_len)
        return found


def _with_lengths(
    requests: Sequence[SimulatedRequest], likely: LikelyLengths | None, factor: float
) -> list[SimulatedRequest]:
    """The requests with answers of likely lengths, each `factor` times as long, but those that are told."""
    # Evenly spaced shares, shuffled: every sample has its part of long answers.
    luck = [(place + 0.5) / len(requests) for place in range(len(requests))]
    random.Random(0).shuffle(luck)
    found = []
    for each, share in zip(requests, luck, strict=True):
        tokens = each.expected_tokens
        if tokens is None:
            tokens = round(factor * each.limit) if likely is None else likely.drawn(each.limit, share, factor)
        found.append(replace(each, output_tokens=max(1, min(each.limit, tokens)), max_tokens=each.limit))
    return found


def _beyond(told: float, bound: float, error: float) -> float:
    """Return the bound of an interval around `told` that allows for a further, independent error of its logarithm."""
    return told * math.exp(math.copysign(math.hypot(math.log(bound / told), error), error))
