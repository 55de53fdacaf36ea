"""Figures of a run over time, and expected and actual lengths of answers, in bounded memory. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from batchwright.lines.batch_line import token_count
from batchwright.lines.forecast import AnswerTally

MOST_POINTS = 480
"""Most points that are kept of a run, however long it takes."""
_FIRST_INTERVAL = 0.1
"""Seconds between points, until there are too many."""
_MOST_PAIRS = 400
_MOST_BARS = 40
_DECIMALS = {"seconds": 3, "seconds_left": 2, "cost": 9}


@dataclass(frozen=True, slots=True)
class RunPoint:
    """The figures of a run at one moment. All except the last five are counts since its beginning."""

    seconds: float
    """Seconds since the loop began."""
    lines: int
    """Lines that ended, with an answer or an error."""
    prompt_tokens: int
    """Prompt tokens of the lines that ended."""
    cached_tokens: int
    """The part of them that was found in a cache of prompts."""
    computed_prompt_tokens: int | None
    """Prompt tokens computed, recomputed ones counted again; None without an engine, as below."""
    generated_tokens: int
    """Tokens of answers: with an engine, those of unfinished answers too."""
    steps: int | None
    sequences: int | None
    """Sum over steps of the sequences in the step."""
    model_seconds: float | None
    preemptions: int | None
    sent: int | None
    """Requests sent to an endpoint, including failed tries; None if there is none."""
    refused: int | None
    """The part of them that was refused for a limit."""
    cost: float | None
    """Dollars; None if prices are not known."""
    running: int
    """Lines being computed now."""
    kv_blocks: int | None
    """KV blocks in use now."""
    seconds_left: float | None
    """Forecast of the time until the end; None while too little is known."""
    work_left: float | None
    """Forecast of the tokens left, or of the lines where no tokens are known."""
    work_done: float | None
    """Tokens, or lines, computed by then, in the same unit."""


COLUMNS = tuple(each.name for each in fields(RunPoint))
_PEAKS = frozenset({"running", "kv_blocks"})
"""Figures of which a point that merges several has the largest."""


class RunSeries:
    """Points of a run at intervals that double whenever there are too many."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        if most < 2:
            raise ValueError(f"most={most}: must be ≥ 2")
        self._most = most
        self._points: list[RunPoint] = []
        self._interval = _FIRST_INTERVAL
        self._next = 0.0

    def __len__(self) -> int:
        return len(self._points)

    def is_due(self, seconds: float) -> bool:
        """Whether a point is wanted at this time."""
        return seconds >= self._next

    def add(self, point: RunPoint) -> None:
        """Keep a point, which must not be before the last one."""
        self._points.append(point)
        if len(self._points) > self._most:
            # Counts lose only resolution by this. The first point and the newest one stay.
            first, *rest = self._points
            pairs = zip(rest[0::2], rest[1::2], strict=False)
            self._points = [first, *(_merged(one, other) for one, other in pairs), *rest[len(rest) // 2 * 2 :]]
            self._interval *= 2
        self._next = point.seconds + self._interval

    def to_dict(self) -> dict[str, list[float | None]]:
        """Return the values of each figure over all points, by name; unknown figures are left out."""
        found: dict[str, list[float | None]] = {}
        for name in COLUMNS:
            values = [_rounded(name, getattr(point, name)) for point in self._points]
            if any(value is not None for value in values):
                found[name] = values
        return found


def _merged(one: RunPoint, later: RunPoint) -> RunPoint:
    values = {name: getattr(later, name) for name in COLUMNS}
    for name in _PEAKS:
        values[name] = max((value for value in (getattr(one, name), values[name]) if value is not None), default=None)
    return RunPoint(**values)


def _rounded(name: str, value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else round(value, _DECIMALS.get(name, 1))


class LengthSample:
    """A uniform sample of lines with the expected and the actual number of tokens of their answers."""

    def __init__(self, most: int = _MOST_PAIRS) -> None:
        self._most = most
        self._seen = 0
        self._pairs: list[tuple[float, int]] = []
        self._random = random.Random(0)

    def add(self, expected: float, answer: Mapping[str, Any]) -> None:
        """Count the body of a response; each of its texts was `expected` to have that many tokens before it began."""
        choices = answer.get("choices")
        texts = len(choices) if isinstance(choices, list) and choices else 1
        real = token_count(answer, "completion_tokens") // texts
        self._seen += 1
        if len(self._pairs) < self._most:
            self._pairs.append((round(expected, 1), real))
        elif (place := self._random.randrange(self._seen)) < self._most:
            self._pairs[place] = round(expected, 1), real

    @property
    def pairs(self) -> Sequence[tuple[float, int]]:
        """The sample."""
        return self._pairs


def lengths_of(answers: AnswerTally, sample: LengthSample) -> dict[str, Any]:
    """Return a histogram of the lengths of answers with at most forty bars, and the sample; empty without answers."""
    top = max(len(answers.ended), len(answers.cut))
    if top == 0:
        return {}
    width = -(-top // _MOST_BARS)
    count = sum(answers.ended) + sum(answers.cut)
    tokens = sum(length * number for counts in (answers.ended, answers.cut) for length, number in enumerate(counts))
    return {
        "width": width,
        "ended": _bars(answers.ended, width, top),
        "cut": _bars(answers.cut, width, top),
        "mean": round(tokens / max(1, count), 2),
        "pairs": [list(pair) for pair in sample.pairs],
    }


def _bars(counts: Sequence[int], width: int, top: int) -> list[int]:
    return [sum(counts[start : start + width]) for start in range(0, top, width)]
