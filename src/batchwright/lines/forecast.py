"""Forecast of when a job will be done, from the tokens that it has computed and those that it still needs. Pure.

Nobody knows when answers will end, so the work that is left is not known. Their lengths are estimated by the
product-limit estimator (Kaplan and Meier, 1958), which learns from unfinished answers as well: those that end first are
the short ones, and their average alone would be too optimistic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from batchwright.decayed_rate import DecayedRate
from batchwright.fitting import FadedFit
from batchwright.lines.batch_line import token_count
from batchwright.request import SamplingParams
from batchwright.wire.fields import stated_limit

_STEPS_REMEMBERED = 1000.0
"""Steps over which other work is averaged."""
_FITTED = 64
"""Measurements of seconds that are remembered."""
_FIRST_ENDED = 3
"""Answers that must have ended before lengths are estimated, unless no line is left to start."""
LONGEST_COUNTED = 2**17
"""Tokens of an answer that longer answers count as having."""

_Array: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"
_Counted: TypeAlias = "Sequence[int] | _Array"
_Counts: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


class AnswerLengths:
    """Estimated distribution of the numbers of tokens that answers would have without limits, and have with them."""

    def __init__(
        self,
        ended: _Counted,
        cut: _Counted,
        running: Sequence[tuple[int, int]],
        limits: Mapping[int, int],
        *,
        prior: float = 0.5,
    ) -> None:
        """`ended` and `cut`: how many answers ended by themselves, and by their limit, with each number of tokens (by
        index). `running`: tokens of each unfinished answer so far, and its limit. `limits`: how many lines have each
        limit. `prior`: weight, as a number of answers, of the possibility that answers go on beyond the longest that
        ended, before any was seen to do so.
        """
        self._limits = limits
        cap = max((*limits, *(limit for _, limit in running), len(ended), len(cut), 1))
        self._tokens, self._running_limits = _columns(running)
        top = max(len(ended), len(cut), int(self._tokens.max(initial=0)) + 1)
        ends, seen = np.zeros(top + 1), np.bincount(self._tokens, minlength=top + 1).astype(float)
        ends[: len(ended)] = ended
        seen[: len(cut)] += cut
        seen += ends
        at_risk = np.cumsum(seen[::-1])[::-1]
        survival = np.cumprod(1.0 - np.divide(ends, at_risk, out=np.zeros_like(ends), where=at_risk > 0))
        # Beyond the longest that was seen, answers end at the mean rate. Before any ended, most reach their limit.
        rate = (float(ends.sum()) + prior) / max(1.0, float(np.dot(np.arange(top + 1), seen)) + prior * cap)
        last = survival[-1] if survival[-1] > 0 else prior / max(1.0, float(at_risk[0]))
        tail = last * np.exp(-rate * np.arange(1, max(0, cap - top) + 1))
        self._survival: _Array = np.concatenate([np.maximum(survival, last), tail, [0.0]])
        """Probability that an answer has more tokens than the index."""
        self._sums: _Array = np.concatenate([[0.0], np.cumsum(self._survival)])
        """Sum of the probabilities before an index: the expected tokens of an answer with that limit."""

    @property
    def mean(self) -> float:
        """Expected tokens of an answer that has not begun."""
        return self._mean_of(self._sums)

    def expected(self, limit: int) -> float:
        """Return the expected tokens of an answer that has not begun and may have `limit` tokens."""
        return float(self._sums[min(limit, len(self._sums) - 1)])

    def drawn(self, luck: float, beyond: int = 0) -> int:
        """Return the tokens that a share `luck` of answers without a limit exceeds, and no larger share does.

        `beyond`: only answers with more tokens than this count.
        """
        return int(self.drawn_each(np.array([luck]), beyond)[0])

    def drawn_each(self, luck: _Array, beyond: int = 0) -> _Counts:
        """Return `drawn` for each of several shares."""
        share = luck * self._survival[min(beyond, len(self._survival) - 1)]
        exceeded: _Counts = np.searchsorted(self._survival[::-1], share, side="right")
        return len(self._survival) - exceeded

    @property
    def left(self) -> float:
        """Expected number of tokens that the unfinished answers still get, in total."""
        more = self._sums[self._running_limits] - self._sums[np.minimum(self._tokens, self._running_limits)]
        return float(np.sum(more / self._survival[self._tokens]))

    @property
    def longest_left(self) -> float:
        """Median of the most tokens that any unfinished answer still gets."""

        def all_end_within(more: int) -> float:
            after = self._tokens + more
            goes_on = self._survival[np.minimum(after, len(self._survival) - 1)] / self._survival[self._tokens]
            return float(np.prod(np.where(after >= self._running_limits, 1.0, 1.0 - np.minimum(1.0, goes_on))))

        return _first(len(self._survival), all_end_within)

    def longest_residual(self, answers: int) -> float:
        """Median of the most tokens that any of so many answers still gets, seen at a random moment of its growth."""
        whole = self._residual(0)
        return _first(len(self._survival), lambda more: (1.0 - min(1.0, self._residual(more) / whole)) ** answers)

    @property
    def mean_residual(self) -> float:
        """Expected tokens that an answer still gets, observed at a random moment of its growth."""
        # The mean of the square over twice the mean.
        positions = np.arange(len(self._survival)) * self._survival
        sums = np.concatenate([[0.0], np.cumsum(positions)])
        return self._mean_of(sums) / max(1e-9, self.mean)

    def _mean_of(self, by_limit: _Array) -> float:
        limits = [*self._limits]
        return float(np.average(by_limit[limits], weights=[*self._limits.values()])) if limits else 0.0

    def _residual(self, more: int) -> float:
        return self._mean_of(np.maximum(0.0, self._sums - self._sums[min(more, len(self._sums) - 1)]))


def _columns(running: Sequence[tuple[int, int]]) -> tuple[_Counts, _Counts]:
    pairs = np.asarray(running, dtype=np.int64).reshape(-1, 2)
    return np.minimum(pairs[:, 0], pairs[:, 1]), pairs[:, 1]


def _first(end: int, probability: Callable[[int], float]) -> float:
    """The first number from which on a rising probability is at least one half."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if probability(middle) < 0.5 else (low, middle)
    return float(low)


@dataclass(slots=True)
class AnswerTally:
    """Lengths of the answers of a job, and the limits of the lines that got them."""

    limits: Counter[int] = field(default_factory=Counter)
    """Numbers of lines that succeeded, by the most tokens that they ask for."""
    ended: list[int] = field(default_factory=list)
    """Numbers of answers that ended by themselves, by their tokens (the index)."""
    cut: list[int] = field(default_factory=list)
    """Numbers of answers that were ended by their limit, in the same way."""

    def count(self, answer: Mapping[str, Any], limit: int) -> None:
        """Count the answers in the body of a response, each of which could have had `limit` tokens."""
        self.limits[limit] += 1
        choices = [answer] if isinstance(answer.get("output"), list) else answer.get("choices")
        if not isinstance(choices, list) or not choices:
            return
        each = min(token_count(answer, "completion_tokens") // len(choices), LONGEST_COUNTED)
        for choice in choices:
            # A response, which counts as a single choice, is incomplete when its limit ended it.
            is_cut = isinstance(choice, dict) and (
                choice.get("finish_reason") == "length" or choice.get("status") == "incomplete"
            )
            counts = self.cut if is_cut else self.ended
            if each >= len(counts):
                counts.extend([0] * (each + 1 - len(counts)))
            counts[each] += 1


def default_limit(defaults: SamplingParams | Mapping[str, Any]) -> int | None:
    """Return the most tokens of an answer to a line that names no limit; None if the endpoint decides."""
    return defaults.max_tokens if isinstance(defaults, SamplingParams) else defaults.get("max_tokens")


def answer_limit(body: Mapping[str, Any], default: int) -> int:
    """Return the `allowed_tokens` of a line with this body, for counts by length: up to `LONGEST_COUNTED`."""
    return min(allowed_tokens(body, default), LONGEST_COUNTED)


def allowed_tokens(body: Mapping[str, Any], default: int) -> int:
    """Return the most tokens of an answer to a line with this body; `default` if it names no limit."""
    stated = stated_limit(body)
    return default if stated is None else max(1, stated)  # 0: a prompt that is only scored has no answer


def goes_on_to_its_limit(body: Mapping[str, Any], defaults: SamplingParams | Mapping[str, Any]) -> bool:
    """Return whether the answer to a line with this body ignores the end of its text, and only its limit ends it."""
    given = body.get("ignore_eos")
    if given is None:
        given = defaults.ignore_eos if isinstance(defaults, SamplingParams) else defaults.get("ignore_eos")
    return given is True


@dataclass(frozen=True, slots=True)
class WorkSoFar:
    """What a job has computed at one moment, and what it holds."""

    at: float
    """Seconds of any clock."""
    weight_read: float
    """Part of the input that was taken up, in any unit; `weight_total` is all of it."""
    weight_total: float
    lines_read: int
    """Lines that were taken up, including those that failed at once."""
    lines_total: int
    steps: int
    step_tokens: int
    """Tokens of prompts and answers that those steps computed, including other work."""
    prompt_tokens: int
    """Prompt tokens computed."""
    generated_tokens: int
    answers: AnswerTally
    running: Sequence[tuple[int, int]] = ()
    """Tokens of each unfinished answer so far, and its limit."""
    prompt_tokens_left: int = 0
    """Prompt tokens of unfinished answers that are not computed yet."""
    places: int = 1
    """Answers that are computed at once."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is left of a job."""

    seconds_left: float
    tokens_done: float
    """Tokens computed. A run that does not know them has lines instead, here and below."""
    tokens_left: float

    @property
    def fraction(self) -> float:
        """Share of the work that is done, 0 to 1."""
        return min(1.0, self.tokens_done / max(1e-9, self.tokens_done + self.tokens_left))


@dataclass(slots=True)
class Forecaster:
    """Learns from `WorkSoFar`s how long steps and tokens take, and forecasts the end of the job."""

    _cost: FadedFit = field(default_factory=lambda: FadedFit(2, _FITTED))
    _others: DecayedRate = field(default_factory=lambda: DecayedRate(_STEPS_REMEMBERED))
    """Tokens of other work per step."""
    _before: WorkSoFar | None = None
    lengths: AnswerLengths | None = None
    """The lengths of answers as of the latest forecast; None before any."""

    def observe(self, now: WorkSoFar) -> Forecast | None:
        """Return the forecast at this moment; None while too little is known."""
        before = self._before
        if before is None or now.steps > before.steps:
            self._before = now
            if before is not None:
                self._learn(before, now)
        ended, cut = now.answers.ended, now.answers.cut
        answers = sum(ended) + sum(cut)
        if not self._cost.observations or (answers < _FIRST_ENDED and now.lines_read < now.lines_total):
            return None
        limits = now.answers.limits + Counter(limit for _, limit in now.running)
        lengths = self.lengths = AnswerLengths(ended, cut, now.running, limits)
        answers_per_line = (answers + len(now.running)) / max(1, now.lines_read)
        unread = answers_per_line * (now.lines_total - now.lines_read)
        prompt_rate = (now.prompt_tokens + now.prompt_tokens_left) / max(1e-9, now.weight_read)
        prompt_left = now.prompt_tokens_left + prompt_rate * max(0.0, now.weight_total - now.weight_read)
        left = lengths.left + unread * lengths.mean
        steps = self._steps(now, lengths, unread, left)
        # A token costs the same in a prompt and in an answer. A batch that is always full would not separate the cost
        # of answer tokens from that of steps, but prompts do.
        others = max(0.0, self._others.rate)
        of_step, of_token = self._cost.coefficients
        seconds = float(of_step * steps + of_token * (prompt_left + left + others * steps))
        done = now.prompt_tokens + now.generated_tokens
        return Forecast(max(0.0, seconds), float(done), float(prompt_left + left))

    def interrupted(self) -> None:
        """Note that the time until the next observation says nothing about the work."""
        self._before = None

    def _learn(self, before: WorkSoFar, now: WorkSoFar) -> None:
        steps = now.steps - before.steps
        prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generated_tokens - before.generated_tokens
        tokens = now.step_tokens - before.step_tokens
        if now.at > before.at:
            self._cost.observe((1.0, tokens / steps), (now.at - before.at) / steps, is_larger=False)
            self._others.elapse(steps)
            self._others.add(tokens - (prompt + generated))

    def _steps(self, now: WorkSoFar, lengths: AnswerLengths, unread: float, left: float) -> float:
        """Steps that are left: while places are full, as many as the tokens need; then those of the longest answer."""
        waiting = unread + max(0, len(now.running) - now.places)
        if waiting < 1.0:
            return lengths.longest_left
        places = min(now.places, int(waiting + len(now.running)))
        at_the_end = min(left, places * lengths.mean_residual)
        return (left - at_the_end) / places + lengths.longest_residual(places)
