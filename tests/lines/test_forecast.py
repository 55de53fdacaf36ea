"""Forecasts of the end of a job, against a simulated engine whose end is known."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from batchwright.lines.forecast import AnswerLengths, AnswerTally, Forecaster, WorkSoFar, default_limit
from batchwright.request import SamplingParams

OF_STEP, OF_TOKEN = 0.04, 0.0003


@dataclass
class Simulated:
    """An engine with `places`, whose lines have a prompt, an answer and a limit; none of a line that fails at once."""

    lines: list[tuple[int, int, int] | None]
    places: int = 32
    now: float = 0.0
    steps: int = 0
    prompt: int = 0
    generated: int = 0
    read: int = 0
    others: int = 0
    """Tokens of other work so far."""
    others_per_step: int = 0
    ended: list[int] = field(default_factory=lambda: [0] * 4096)
    cut: list[int] = field(default_factory=lambda: [0] * 4096)
    limits: Counter[int] = field(default_factory=Counter)

    def moments(self) -> Iterator[WorkSoFar]:
        queue = deque(self.lines)
        running: list[list[int]] = []
        while queue or running:
            prompt = 0
            while queue and len(running) < self.places:
                line = queue.popleft()
                self.read += 1
                if line is not None:
                    running.append([0, *line[1:]])
                    prompt += line[0]
            for each in running:
                each[0] += 1
            self.now += OF_STEP + OF_TOKEN * (prompt + len(running) + self.others_per_step)
            self.others += self.others_per_step
            self.prompt += prompt
            self.generated += len(running)
            self.steps += 1
            for each in [each for each in running if each[0] >= min(each[1], each[2])]:
                running.remove(each)
                (self.cut if each[0] == each[2] else self.ended)[each[0]] += 1
                self.limits[each[2]] += 1
            if self.steps % 10 == 0:
                yield self._moment([(each[0], each[2]) for each in running])

    def _moment(self, running: list[tuple[int, int]]) -> WorkSoFar:
        return WorkSoFar(
            at=self.now,
            weight_read=self.read,
            weight_total=len(self.lines),
            lines_read=self.read,
            lines_total=len(self.lines),
            steps=self.steps,
            prompt_tokens=self.prompt,
            generated_tokens=self.generated,
            step_tokens=self.prompt + self.generated + self.others,
            answers=AnswerTally(self.limits, _trimmed(self.ended), _trimmed(self.cut)),
            running=running,
            places=self.places,
        )


def _trimmed(counts: list[int]) -> list[int]:
    return counts[: max((index + 1 for index, count in enumerate(counts) if count), default=0)]


def chat(draw: random.Random) -> tuple[int, int, int]:
    return int(draw.lognormvariate(4, 1)) + 1, int(draw.lognormvariate(4.6, 0.8)) + 1, 512


def mixed(draw: random.Random) -> tuple[int, int, int]:
    return draw.choice([10, 100, 900]), 10**6, draw.choice([4, 32, 256])


def failing(draw: random.Random) -> tuple[int, int, int] | None:
    return None if draw.random() < 0.6 else chat(draw)


@pytest.mark.parametrize("others", [0, 40], ids=["alone", "with other work"])
@pytest.mark.parametrize(
    ("kind", "lines"), [(chat, 300), (chat, 3000), (mixed, 20), (mixed, 300), (failing, 1000), (failing, 3000)]
)
def test_the_end_is_foreseen(
    kind: Callable[[random.Random], tuple[int, int, int] | None], lines: int, others: int
) -> None:
    draw = random.Random(lines)
    engine = Simulated([kind(draw) for _ in range(lines)], others_per_step=others)
    forecaster = Forecaster()
    told = []
    for moment in engine.moments():
        forecast = forecaster.observe(moment)
        told.append((moment.prompt_tokens + moment.generated_tokens, moment.at, forecast))
    work = engine.prompt + engine.generated
    later = [(at, forecast) for done, at, forecast in told if done >= 0.2 * work]
    near = sum(
        forecast is not None and abs(at + forecast.seconds_left - engine.now) <= 0.15 * engine.now
        for at, forecast in later
    )
    assert near >= 0.9 * len(later)
    assert all(forecast is None or 0.0 <= forecast.fraction <= 1.0 for _, _, forecast in told)


def test_unfinished_answers_count() -> None:
    """Of two hundred answers the short half ended: the others are known to be longer than that."""
    ended = [0] * 11
    ended[10] = 100
    lengths = AnswerLengths(ended, [], [(90, 100)] * 100, {100: 200})
    assert 50 <= lengths.mean <= 56
    assert 900 <= lengths.left <= 1000
    assert lengths.longest_left == 10
    assert AnswerLengths([], [], [(1, 64)] * 5, {64: 5}).mean > 40
    assert AnswerLengths([], [], [], {}).left == 0.0


def test_a_limit_that_the_job_gives_is_known_whatever_computes_it() -> None:
    assert default_limit(SamplingParams(max_tokens=50)) == 50
    assert default_limit({"max_tokens": 50}) == 50
    assert default_limit({}) is None
