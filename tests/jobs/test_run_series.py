"""Figures of a run over time: bounded, and true at every point that is kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.jobs.run_series import COLUMNS, LengthSample, RunPoint, RunSeries, lengths_of
from batchwright.lines.forecast import AnswerTally

START = RunPoint(**(dict.fromkeys(COLUMNS) | {"seconds": 0.0, "lines": 0, "running": 0}))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(0.001, 50.0), st.integers(0, 9)), max_size=300), st.integers(2, 12))
def test_points_are_few_and_true(steps: list[tuple[float, int]], most: int) -> None:
    series = RunSeries(most)
    series.add(START)
    told = {0.0: 0}
    for seconds, lines in accumulate(steps, lambda before, step: (before[0] + step[0], before[1] + step[1])):
        if series.is_due(seconds):
            series.add(replace(START, seconds=seconds, lines=lines))
            told[round(seconds, 3)] = lines
        assert len(series) <= most
    found = series.to_dict()
    assert found["seconds"][0] == 0.0
    assert all(later > before for before, later in pairwise(found["seconds"]))  # type: ignore[operator]
    assert all(told[seconds] == lines for seconds, lines in zip(found["seconds"], found["lines"], strict=True))  # type: ignore[index]
    assert found["seconds"][-1] == max(told)


def test_a_long_run_has_as_many_points_as_a_short_one_and_keeps_its_peaks() -> None:
    series = RunSeries(100)
    for tenth in range(1_000_000):
        if series.is_due(tenth / 10):
            series.add(replace(START, seconds=tenth / 10, lines=tenth, kv_blocks=7 if 2 < tenth < 9 else 1))
    found = series.to_dict()
    assert 50 <= len(series) <= 100
    assert 7 in found["kv_blocks"]
    gaps = [later - before for before, later in pairwise(found["seconds"])]  # type: ignore[operator]
    assert max(gaps) <= 2 * min(gaps[1:-1]) + 0.2


def test_what_is_not_known_is_left_out() -> None:
    series = RunSeries()
    series.add(START)
    assert series.to_dict().keys() == {"seconds", "lines", "running"}
    series.add(replace(START, seconds=1.0, cost=0.1234567891234))
    assert series.to_dict()["cost"] == [None, 0.123456789]
    with pytest.raises(ValueError, match="most=1: must be ≥ 2"):
        RunSeries(1)


def body(tokens: int, choices: int = 1) -> dict[str, object]:
    return {"choices": [{"finish_reason": "stop"}] * choices, "usage": {"completion_tokens": tokens}}


def test_a_sample_of_lengths_is_bounded_and_of_the_whole_run() -> None:
    sample = LengthSample(50)
    for number in range(1000):
        sample.add(number + 0.04, body(2 * number, choices=2))
    assert len(sample.pairs) == 50
    assert all(expected == real for expected, real in sample.pairs)
    assert sum(real > 500 for _, real in sample.pairs) > 10


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=60))
def test_a_histogram_has_all_answers(answers: list[tuple[int, bool]]) -> None:
    tally = AnswerTally()
    for tokens, is_cut in answers:
        end = "length" if is_cut else "stop"
        tally.count({"choices": [{"finish_reason": end}], "usage": {"completion_tokens": tokens}}, 5000)
    found = lengths_of(tally, LengthSample())
    if not answers:
        assert found == {}
        return
    assert len(found["ended"]) == len(found["cut"]) <= 40
    assert sum(found["cut"]) == sum(is_cut for _, is_cut in answers)
    assert sum(found["ended"]) + sum(found["cut"]) == len(answers)
    longest = max(tokens for tokens, _ in answers)
    last = max(bar for bar, both in enumerate(zip(found["ended"], found["cut"], strict=True)) if any(both))
    assert last * found["width"] <= longest < (last + 1) * found["width"]
