"""Answers to some lines of a job, and what they say of the others."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from batchwright.errors import InvalidRequest
from batchwright.inference.inference import Call, Inference, WorkUnderWay
from batchwright.jobs.answer_probe import ProbedAnswers, chosen_lines, probe_answers
from batchwright.jobs.lines import Line
from batchwright.lines.forecast import AnswerTally
from batchwright.request import SamplingParams


def lines(count: int, **body: Any) -> list[Line]:
    return [
        Line(number, f"line-{number}", "/v1/completions", {"prompt": str(number)} | body) for number in range(count)
    ]


def probed(lengths: list[int], running: list[tuple[int, int]] = [], *, repeats: bool = False) -> ProbedAnswers:  # noqa: B006
    answers = AnswerTally()
    for each in lengths:
        choice = {"finish_reason": "stop"}
        answers.count({"choices": [choice], "usage": {"completion_tokens": each}}, 100)
    return ProbedAnswers(answers, running, repeats, len(lengths) + len(running))


class Slow(Inference):
    """Answers with as many tokens as the prompt says, but those from 100 on never."""

    models = ("m",)
    wants = 1

    async def answer(self, call: Call) -> dict[str, Any]:
        tokens = int(call.body["prompt"])
        if tokens == 13:
            raise InvalidRequest("unlucky")
        if tokens >= 100:
            await asyncio.Event().wait()
        return {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": tokens}}

    async def work_of(self, prefix: str) -> WorkUnderWay:
        assert prefix == "probe-"
        return WorkUnderWay(0, 0, ((100, 500),), 0, 0, 1, 500)

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError

    async def close(self) -> None: ...


def test_what_has_ended_and_what_has_not_is_counted() -> None:
    asked = lines(14) + lines(101)[100:]
    found = asyncio.run(probe_answers(Slow(), asked, SamplingParams(max_tokens=500), seconds=0.05))
    assert sum(found.answers.ended) == 13, "one fails, and one has not ended"
    assert found.running == ((100, 500),)
    assert (found.are_repeatable, found.lines) == (False, 15)
    greedy = asyncio.run(probe_answers(Slow(), lines(2, temperature=0), SamplingParams(), seconds=0.05))
    assert greedy.are_repeatable


def test_unfinished_answers_make_the_others_longer() -> None:
    limits = Counter({100: 50})
    ended, more = probed([10] * 20).likely(limits), probed([10] * 20, [(60, 100)] * 20).likely(limits)
    assert ended is not None
    assert more is not None
    assert ended.lengths.mean == pytest.approx(10, rel=0.2)
    assert more.lengths.mean > 35
    assert probed([], [(60, 100)]).likely(limits) is None, "none ended"
    assert probed([5]).likely({}) is None, "no line is open"


@pytest.mark.parametrize("repeats", [False, True])
def test_the_mean_is_within_its_error_nine_times_of_ten(repeats: bool) -> None:
    draw, held = np.random.default_rng(0), 0

    def answered(lines: Any) -> Any:
        # Half of the variance of an answer is that of its line.
        luck = np.zeros(80) if repeats else draw.normal(0, 0.5, 80)
        return np.minimum(400, 1 + np.exp(lines + luck).astype(int))

    for _ in range(200):
        of_lines = draw.normal(3.5, 0.5, 80)
        seen = draw.permutation(80)[:32]
        likely = probed([int(each) for each in answered(of_lines)[seen]], repeats=repeats).likely(Counter({400: 80}))
        assert likely is not None
        held += abs(math.log(answered(of_lines).mean() / likely.lengths.mean)) < likely.error
    assert 165 <= held <= 197


def test_all_lines_of_a_job_that_repeats_its_answers_leave_no_error() -> None:
    likely = probed([5, 10, 20, 40] * 8, repeats=True).likely(Counter({100: 32}))
    assert likely is not None
    assert likely.error == 0.0
    assert likely.lengths.mean == pytest.approx(18.75, rel=0.05)


def test_lines_are_drawn_from_all() -> None:
    many = lines(1000)
    chosen = chosen_lines(many)
    assert len(chosen) == 32
    assert max(each.body["prompt"] for each in chosen) > "9"
    assert chosen == chosen_lines(many), "always the same"
    assert chosen_lines(many[:5]) != []
