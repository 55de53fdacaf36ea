"""A probe of answers: some lines of a job are answered for some seconds, to learn how long its answers will be."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BatchwrightError, EngineClosed
from batchwright.inference.inference import Call, Inference, work_of
from batchwright.jobs.earlier_answers import LikelyLengths
from batchwright.jobs.planned_time import SampledLine
from batchwright.lines.batch_line import token_count
from batchwright.lines.forecast import AnswerLengths
from batchwright.request import SamplingParams
from batchwright.wire.identity import identity_of

SECONDS = 5.0
"""Most seconds of a probe."""
_LINES = 32
"""Most lines that are answered: few enough to take only seconds."""
_LEAST_ENDED = 4
"""Answers that must have ended before anything is said about the others."""
_SHORTEST = 0.1
"""Share of answers that may be shorter than what nearly all exceed."""
_LEAST_ALIKE = 8
"""Number of answers with the same limit from which they are considered separately."""
_NORMAL_QUANTILE = 1.645
"""Standard deviations within which a normal variable lies in nine cases of ten."""
_DRAWS = 500
_UNSEEN_WEIGHT = 0.5
"""Weight of answers of a kind that was not seen, as a number of answers (Jeffreys' prior)."""
_UNSEEN_LENGTH = 8
"""How many times as long as the longest seen they may be: a model that repeats itself goes on to the limit."""


@dataclass(frozen=True, slots=True)
class ProbedAnswer:
    """The answer to one line, as far as it came."""

    line: SampledLine
    tokens: int
    has_ended: bool
    """Whether it ended by itself or by its limit; False: the end of the probe cut it off."""


@dataclass(frozen=True, slots=True)
class ProbedAnswers:
    """Answers to some lines of a job."""

    answers: Sequence[ProbedAnswer]
    seconds: float
    """Time in which they were computed."""
    are_repeatable: bool
    """Whether the same lines get the same answers in the job."""

    @property
    def ended(self) -> int:
        """Number of answers that have ended."""
        return sum(each.has_ended for each in self.answers)

    def likely(self, limits: Mapping[int, int]) -> LikelyLengths | None:
        """Return what they say about the answers to lines, counted by limit in `limits`; None if too few ended.

        Lines that may have long answers mostly get different ones from those that may not, so limits with enough
        answers are considered separately.
        """
        if self.ended < _LEAST_ENDED or not limits:
            return None
        alike = Counter(each.line.limit for each in self.answers if each.has_ended)
        apart = sorted(limit for limit in limits if alike[limit] >= _LEAST_ALIKE)
        groups = [_Group.of(self.answers, {limit: limits[limit]}) for limit in apart]
        if rest := {limit: count for limit, count in limits.items() if limit not in apart}:
            groups.append(_Group.of(self.answers, rest))
        by_limit = {limit: group.lengths for group in groups for limit in group.limits}
        below, above = self._predicted(groups)
        error = self._error(groups)
        errors = max(error, below), max(error, above)
        return LikelyLengths(groups[-1].lengths, errors, "probe", len(self.answers), by_limit)

    @property
    def exceeded(self) -> int:
        """Tokens that nearly all answers exceed, 0 if they are too few to show it; for when too few have ended."""
        if len(self.answers) < _LEAST_ALIKE:
            return 0
        return max(0, int(np.quantile([each.tokens for each in self.answers], _SHORTEST)) - 1)

    def _predicted(self, groups: Sequence[_Group]) -> tuple[float, float]:
        """Logarithms of how far below and above its expectation all answers together are in nine cases of ten."""
        random = np.random.default_rng(0)
        total = sum(group.totals(random, repeats=self.are_repeatable) for group in groups)
        low, high = np.quantile(total, (0.05, 0.95)) / sum(group.tokens for group in groups)
        return -math.log(low), math.log(high)

    def _error(self, groups: Sequence[_Group]) -> float:
        """Half the width of the interval of nine in ten around the logarithm of the mean.

        Answers that repeat are part of the job, so only those to other lines are uncertain (the finite population
        correction). Half of the variance of answers that are drawn anew is assumed to be between lines and half within
        each, so the answers to the same lines are as uncertain as those to others.
        """
        total = sum(group.tokens for group in groups)
        variance = sum(
            (group.tokens * group.variation) ** 2
            * max(0.0, 1.0 / group.ended - (1.0 / group.lines if self.are_repeatable else 0.0))
            for group in groups
        )
        # About Student's t; and one answer more could be unlike all others.
        quantile = _NORMAL_QUANTILE * (1.0 + 1.3 / (self.ended - 1))
        unseen = 0.0 if self.are_repeatable and self.ended >= sum(each.lines for each in groups) else 1.0
        return max(quantile * math.sqrt(variance) / total, unseen / (self.ended + 1))


@dataclass(frozen=True, slots=True)
class _Group:
    """Lines whose answers are assumed to be alike."""

    lengths: AnswerLengths
    limits: Mapping[int, int]
    """Numbers of lines of the job by their limits."""
    own: Sequence[ProbedAnswer]
    """Answers to such lines."""
    known: Sequence[ProbedAnswer]
    """Those answers, or all if too few of these ended, by which their lengths are known."""

    @classmethod
    def of(cls, answers: Sequence[ProbedAnswer], limits: Mapping[int, int]) -> _Group:
        """The group of lines with `limits`, by the answers to such lines, or by all if too few of these ended."""
        alike = [each for each in answers if each.line.limit in limits]
        known = alike if sum(each.has_ended for each in alike) >= _LEAST_ENDED else answers
        ended, cut, running = Counter[int](), Counter[int](), []
        for each in known:
            if not each.has_ended:
                running.append((each.tokens, each.line.limit))
            else:
                (cut if each.tokens >= each.line.limit else ended)[each.tokens] += 1
        lengths = AnswerLengths(_counts(ended), _counts(cut), running, limits, prior=0.0)
        return cls(lengths, limits, alike, known)

    @property
    def ended(self) -> int:
        """Number of answers to such lines that have ended; at least 1."""
        return max(1, sum(each.has_ended for each in self.own))

    @property
    def lines(self) -> int:
        return sum(self.limits.values())

    @property
    def tokens(self) -> float:
        """Expected tokens of all its answers."""
        return max(1.0, self.lengths.mean) * self.lines

    @property
    def variation(self) -> float:
        """Coefficient of variation of its answers."""
        drawn = np.array([max(1, self.lengths.drawn((place + 0.5) / _DRAWS)) for place in range(_DRAWS)], dtype=float)
        of_limits = [(np.minimum(drawn, limit), count) for limit, count in self.limits.items()]
        mean = sum(float(each.mean()) * count for each, count in of_limits) / self.lines
        square = sum(float((each**2).mean()) * count for each, count in of_limits) / self.lines
        return math.sqrt(max(0.0, square - mean**2)) / mean

    def totals(self, random: np.random.Generator, *, repeats: bool) -> NDArray[np.float64]:
        """Tokens of all its answers in `_DRAWS` equally likely cases, with answers of a kind that was not seen.

        The shares of the lengths are drawn by the Bayesian bootstrap (Rubin, 1981). `repeats`: whether the job gets the
        answers of the probe again.
        """
        seen = np.array([self._whole(each, random) for each in self.known]).T
        unseen = np.full((_DRAWS, 1), _UNSEEN_LENGTH * max(each.tokens for each in self.known))
        lengths = np.concatenate([seen, unseen], axis=1)
        weights = np.concatenate(
            [random.standard_exponential(seen.shape), random.gamma(_UNSEEN_WEIGHT, size=(_DRAWS, 1))], axis=1
        )
        weights /= weights.sum(axis=1, keepdims=True)
        fixed = [self._whole(each, random) for each in self.own] if repeats else []
        answered = Counter(each.line.limit for each in self.own) if repeats else Counter[int]()
        total = np.sum(fixed, axis=0) if fixed else np.zeros(_DRAWS)
        for limit, lines in self.limits.items():
            left = max(0, lines - answered[limit])
            allowed = np.minimum(lengths, limit)
            mean = (weights * allowed).sum(axis=1)
            variance = np.maximum(0.0, (weights * allowed**2).sum(axis=1) - mean**2)
            total += np.maximum(left, left * mean + np.sqrt(left * variance) * random.standard_normal(_DRAWS))
        return total

    def _whole(self, answer: ProbedAnswer, random: np.random.Generator) -> NDArray[np.float64]:
        """Tokens of an answer, at least 1, in `_DRAWS` cases; one that was cut off goes on as others have."""
        if answer.has_ended and answer.tokens < answer.line.limit:
            return np.full(_DRAWS, float(max(1, answer.tokens)))
        limit = answer.line.limit if answer in self.own else max(self.limits)
        goes_on: NDArray[np.float64] = self.lengths.drawn_each(random.random(_DRAWS), answer.tokens).astype(float)
        return np.clip(goes_on, 1.0, limit)


def chosen_lines(lines: Sequence[SampledLine]) -> list[SampledLine]:
    """Return the lines that are answered, drawn from all."""
    return random.Random(0).sample(list(lines), min(_LINES, len(lines)))


async def probe_answers(
    inference: Inference, lines: Sequence[SampledLine], defaults: SamplingParams, seconds: float = SECONDS
) -> ProbedAnswers:
    """Answer `lines`, and cut off answers that have not ended after `seconds`. A line that fails counts for nothing.

    Raises `EngineClosed` if what computes fails.
    """
    clock, single = asyncio.get_running_loop().time, replace(defaults, n=1)
    calls = [
        Call(each.line.endpoint, _single(each.line.body), f"probe-{number}-", "batch", defaults=single)
        for number, each in enumerate(lines)
    ]

    async def answer(call: Call) -> int | None:
        try:
            return token_count(await inference.answer(call), "completion_tokens")
        except EngineClosed:
            raise
        except BatchwrightError:
            return None

    began = clock()
    tasks = [asyncio.ensure_future(answer(call)) for call in calls]
    answers = []
    try:
        await asyncio.wait(tasks, timeout=seconds)
        took = clock() - began
        for line, call, task in zip(lines, calls, tasks, strict=True):
            if not task.done():
                work = await work_of(inference, call.request_id)
                if work is not None and work.running and work.running[0][0]:
                    answers.append(ProbedAnswer(line, work.running[0][0], has_ended=False))
            elif (tokens := task.result()) is not None:
                answers.append(ProbedAnswer(line, tokens, has_ended=True))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    same = all(identity_of(each.line.endpoint, each.line.body, defaults) is not None for each in lines)
    return ProbedAnswers(answers, took, same)


def _single(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a request for one answer, if it asks for several."""
    single = {name: value for name, value in body.items() if name not in ("n", "best_of")}
    prompt = single.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        single["prompt"] = prompt[0]
    return single


def _counts(tokens: Counter[int]) -> list[int]:
    return [tokens[each] for each in range(max(tokens, default=-1) + 1)]
