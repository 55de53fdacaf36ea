"""Answers to some lines of a job, and what they say of the others."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchwright.errors import EngineClosed, InvalidRequest
from batchwright.inference.inference import Call, Inference, WorkUnderWay
from batchwright.jobs.answer_probe import ProbedAnswer, ProbedAnswers, chosen_lines, probe_answers
from batchwright.jobs.earlier_answers import LikelyLengths
from batchwright.jobs.lines import Line
from batchwright.jobs.planned_time import SampledLine
from batchwright.request import SamplingParams
from batchwright.simulation.requests import SimulatedRequest


def lines(count: int, limit: int = 500, **body: Any) -> list[SampledLine]:
    request = SimulatedRequest(prompt_tokens=5, output_tokens=limit)
    return [
        SampledLine(Line(number, None, "/v1/completions", {"prompt": str(number)} | body), [request])
        for number in range(count)
    ]


def answers(tokens: Sequence[int], limit: int = 500, *, has_ended: bool = True) -> list[ProbedAnswer]:
    line = lines(1, limit)[0]
    return [ProbedAnswer(line, min(each, limit), has_ended) for each in tokens]


def likely(found: list[ProbedAnswer], limits: dict[int, int], *, repeats: bool = False) -> LikelyLengths:
    told = ProbedAnswers(found, 1.0, repeats).likely(Counter(limits))
    assert told is not None
    return told


def mean(told: LikelyLengths, limit: int) -> float:
    return sum(told.drawn(limit, (place + 0.5) / 1000) for place in range(1000)) / 1000


class Slow(Inference):
    """Answers with as many tokens as the prompt says, but those from 100 on never."""

    models = ("m",)
    wants = 1
    fails = False

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.defaults: list[Any] = []

    async def answer(self, call: Call) -> dict[str, Any]:
        self.bodies.append(call.body)
        self.defaults.append(call.defaults)
        tokens = int(call.body["prompt"])
        if self.fails:
            raise EngineClosed("the device failed")
        if tokens == 13:
            raise InvalidRequest("unlucky")
        if tokens >= 100:
            await asyncio.Event().wait()
        return {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": tokens}}

    async def work_of(self, prefix: str) -> WorkUnderWay:
        running = ((77, 500),) if prefix == "probe-14-" else ()
        return WorkUnderWay(0, 0, running, 0, 0, 1, 500)

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError

    async def close(self) -> None: ...


def test_what_has_ended_and_what_has_not_is_counted() -> None:
    asked = lines(14) + lines(102)[100:]
    found = asyncio.run(probe_answers(Slow(), asked, SamplingParams(), seconds=0.05))
    assert [each.tokens for each in found.answers] == [*range(13), 77], "one fails, and one has not begun"
    assert found.ended == 13
    assert not found.are_repeatable
    for told in ({"temperature": 0}, {"seed": 5}):
        again = asyncio.run(probe_answers(Slow(), lines(2, **told), SamplingParams(), seconds=0.05))
        assert again.are_repeatable


def test_each_line_is_asked_for_one_answer() -> None:
    inference = Slow()
    asyncio.run(probe_answers(inference, lines(1, n=4, prompt=["7", "8"]), SamplingParams(n=2), seconds=0.05))
    assert inference.bodies == [{"prompt": "7"}]
    assert inference.defaults == [SamplingParams(n=1)], "defaults may ask for several too"


def test_an_engine_that_fails_is_told() -> None:
    inference = Slow()
    inference.fails = True
    with pytest.raises(EngineClosed):
        asyncio.run(probe_answers(inference, lines(3), SamplingParams(), seconds=0.05))


def test_unfinished_answers_make_the_others_longer() -> None:
    ended = likely(answers([10] * 20), {500: 50})
    more = likely(answers([10] * 20) + answers([60] * 20, has_ended=False), {500: 50})
    assert mean(ended, 500) == 10.0
    assert mean(more, 500) > 35.0
    assert more.errors[0] > ended.errors[0]


def test_too_few_answers_say_nothing() -> None:
    assert ProbedAnswers(answers([5] * 3 + [60] * 20), 1.0, False).likely({}) is None, "no line is open"
    few = answers([5] * 3) + answers([60] * 20, has_ended=False)
    assert ProbedAnswers(few, 1.0, False).likely({500: 9}) is None


def test_short_answers_stay_short_under_a_large_limit() -> None:
    told = likely(answers([1] * 32, 4096), {4096: 100})
    assert mean(told, 4096) == 1.0
    assert 0.0 < told.errors[0] < 0.1
    assert 0.0 < told.errors[1] < 0.5


def test_limits_are_looked_at_apart() -> None:
    found = answers([2] * 20, 8) + answers([100, 300, 500, 700] * 3, 1000) + answers([1000], 1000)
    told = likely(found, {8: 900, 1000: 100})
    assert mean(told, 8) == 2.0
    assert mean(told, 1000) == pytest.approx(446, rel=0.05)
    assert told.drawn(50, 0.5) <= 50, "of a limit that none of them had"
    # Of too few with a limit, others tell, and little.
    few = likely(answers([2] * 20, 8) + answers([60] * 4, 1000, has_ended=False), {8: 900, 1000: 100})
    assert mean(few, 1000) > mean(few, 8)
    assert min(few.errors) > 0.3


@pytest.mark.parametrize("repeats", [False, True])
def test_the_mean_is_within_its_error_nine_times_of_ten(repeats: bool) -> None:
    draw, held = np.random.default_rng(0), 0

    def answered(of_lines: Any) -> Any:
        # Half of the variance of an answer is that of its line.
        luck = np.zeros(80) if repeats else draw.normal(0, 0.5, 80)
        return np.minimum(400, 1 + np.exp(of_lines + luck).astype(int))

    for _ in range(200):
        of_lines = draw.normal(3.5, 0.5, 80)
        seen = draw.permutation(80)[:32]
        told = likely(answers([int(each) for each in answered(of_lines)[seen]], 400), {400: 80}, repeats=repeats)
        held += -told.errors[0] < math.log(answered(of_lines).mean() / told.lengths.mean) < told.errors[1]
    assert 165 <= held <= 197


@pytest.mark.parametrize("repeats", [False, True])
def test_a_few_answers_that_go_on_to_their_limit_are_allowed_for(repeats: bool) -> None:
    """One in twenty repeats itself without an end: often, none of those is among the lines that were answered."""
    draw, longer, held = np.random.default_rng(1), 0, 0
    for _ in range(200):
        lengths = np.where(draw.random(80) < 0.05, 256, draw.integers(5, 40, 80))
        seen = draw.permutation(80)[:32]
        told = likely(answers([int(each) for each in lengths[seen]], 256), {256: 80}, repeats=repeats)
        again = lengths if repeats else np.where(draw.random(80) < 0.05, 256, draw.integers(5, 40, 80))
        error = math.log(again.mean() / told.lengths.mean)
        longer += error > told.errors[1]
        held += -told.errors[0] < error < told.errors[1]
    assert longer <= 20
    assert held >= 165


def test_answers_of_which_none_has_ended_are_longer_than_they_are() -> None:
    running = ProbedAnswers(answers([*range(40, 72)], has_ended=False), 1.0, False)
    assert running.likely({500: 9}) is None
    assert 40 <= running.exceeded <= 43
    assert ProbedAnswers(answers([50] * 7, has_ended=False), 1.0, False).exceeded == 0, "too few"
    earlier = likely(answers([10] * 90 + [100] * 10), {500: 9})
    assert mean(earlier, 500) < 20
    assert mean(replace(earlier, beyond=running.exceeded), 500) == 100


def test_all_lines_of_a_job_that_repeats_its_answers_leave_no_error() -> None:
    told = likely(answers([5, 10, 20, 40] * 8), {500: 32}, repeats=True)
    assert told.errors == (0.0, 0.0)
    empty = likely(answers([0] * 32), {500: 32}, repeats=True)
    assert empty.errors == (0.0, 0.0), "answers without a token count as one, as in the job's time"
    assert told.lengths.mean == pytest.approx(18.75)


def test_lines_are_drawn_from_all() -> None:
    many = lines(1000)
    chosen = chosen_lines(many)
    assert len(chosen) == 32
    assert max(each.line.number for each in chosen) > 800
    assert chosen == chosen_lines(many), "always the same"
    assert sorted(each.line.number for each in chosen_lines(many[:5])) == [0, 1, 2, 3, 4]
