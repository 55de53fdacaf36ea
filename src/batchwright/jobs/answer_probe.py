"""A probe of answers: some lines of a job are answered for some seconds, to learn how long its answers will be."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchwright.errors import BatchwrightError
from batchwright.inference.inference import Call, Inference, work_of
from batchwright.jobs.earlier_answers import LikelyLengths
from batchwright.jobs.lines import Line
from batchwright.lines.forecast import LONGEST_COUNTED, AnswerLengths, AnswerTally, answer_limit
from batchwright.request import SamplingParams

_LINES = 32
"""Most lines that are answered: enough for a mean within a sixth, few enough for seconds."""
_SECONDS = 5.0
_PREFIX = "probe-"
"""Beginning of the ids of their requests."""
_Z = 1.645
"""Standard deviations of a normal variable within which it is in nine cases of ten."""
_DRAWS = 500


@dataclass(frozen=True, slots=True)
class ProbedAnswers:
    """Answers to some lines of a job, those that ended and those that the end of the probe cut off."""

    answers: AnswerTally
    running: Sequence[tuple[int, int]] = ()
    """Tokens of each unfinished answer, and its limit."""
    are_repeatable: bool = False
    """Whether the same lines get the same answers in the job."""
    lines: int = 0
    """Lines that were asked."""

    def likely(self, limits: Mapping[int, int]) -> LikelyLengths | None:
        """Return what they say of the answers to lines with these limits, each of so many; None if none ended."""
        ended = sum(self.answers.ended) + sum(self.answers.cut)
        if not ended or not limits:
            return None
        counts = [np.asarray(each, dtype=float) for each in (self.answers.ended, self.answers.cut)]
        lengths = AnswerLengths(counts[0], counts[1], self.running, limits)
        return LikelyLengths(lengths, self._error(lengths, limits, ended), "probe", self.lines)

    def _error(self, lengths: AnswerLengths, limits: Mapping[int, int], ended: int) -> float:
        """The standard error of the mean, as that of a logarithm, for nine cases of ten.

        The answers that were seen are part of a job that repeats them: only the others are uncertain. Of answers that
        are drawn anew, about half of the variance is taken to be between lines, and half within each.
        """
        drawn = np.array([lengths.drawn((place + 0.5) / _DRAWS) for place in range(_DRAWS)], dtype=float)
        of_limits = [(np.minimum(drawn, limit), count) for limit, count in limits.items()]
        total = sum(limits.values())
        mean = sum(float(each.mean()) * count for each, count in of_limits) / total
        square = sum(float((each**2).mean()) * count for each, count in of_limits) / total
        variation = math.sqrt(max(0.0, square - mean**2)) / mean
        known = 1.0 / max(ended, total) if self.are_repeatable else 0.0
        return _Z * variation * math.sqrt(max(0.0, 1.0 / ended - known))


def chosen_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that are answered, drawn from all."""
    return random.Random(0).sample(list(lines), min(_LINES, len(lines)))


async def probe_answers(
    inference: Inference, lines: Sequence[Line], defaults: SamplingParams | Mapping[str, Any], seconds: float = _SECONDS
) -> ProbedAnswers:
    """Answer `lines`, and give up after `seconds` those that are not answered then. A line that fails tells nothing."""
    calls = [
        Call(line.endpoint, line.body, f"{_PREFIX}{number}", "batch", defaults=defaults)
        for number, line in enumerate(lines)
    ]
    default = getattr(defaults, "max_tokens", LONGEST_COUNTED)
    answers = AnswerTally()

    async def answer(call: Call) -> None:
        with suppress(BatchwrightError):
            answers.count(await inference.answer(call), answer_limit(call.body, default))

    tasks = [asyncio.ensure_future(answer(call)) for call in calls]
    running: Sequence[tuple[int, int]] = ()
    try:
        await asyncio.wait(tasks, timeout=seconds)
        work = await work_of(inference, _PREFIX)
        running = () if work is None else work.running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    given = [line.body.get("temperature", getattr(defaults, "temperature", None)) for line in lines]
    return ProbedAnswers(answers, running, all(each == 0 for each in given), len(lines))
