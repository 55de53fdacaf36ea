"""Lengths of answers that are kept of runs, and what they say about other jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batchwright.jobs.earlier_answers import JobSignature, RunAnswers, earlier_answers, keep_answers, likely_lengths
from batchwright.jobs.spec import JobSpec
from batchwright.lines.forecast import AnswerTally
from batchwright.models import DEFAULT_MODEL
from batchwright.request import SamplingParams


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    return tmp_path


def job(content: str = "some lines", template: str | None = None, name: str = "in.jsonl", **more: Any) -> JobSignature:
    spec = JobSpec(inputs=(name,), output="out.jsonl", model=DEFAULT_MODEL, prompt_template=template, **more)
    return JobSignature.of(spec, [content])


def answers(ended: Mapping[int, int], cut: Mapping[int, int] = {}) -> AnswerTally:
    tally = AnswerTally()
    for counts, given in ((tally.ended, ended), (tally.cut, cut)):
        for tokens, number in given.items():
            counts.extend([0] * (tokens + 1 - len(counts)))
            counts[tokens] += number
    return tally


def test_runs_of_the_same_job_count_alone() -> None:
    keep_answers(DEFAULT_MODEL, job("other.jsonl"), answers({90: 40}))
    keep_answers(DEFAULT_MODEL, job(), answers({10: 20, 30: 20}))
    runs = earlier_answers(DEFAULT_MODEL)
    assert len(runs) == 2
    mine = likely_lengths(runs, job(), {100: 5})
    assert mine is not None
    assert (mine.source, mine.runs) == ("same job", 1)
    assert mine.lengths.mean == pytest.approx(20.0, rel=0.05)
    assert {mine.drawn(100, luck) for luck in (0.1, 0.4, 0.6, 0.9)} == {10, 30}
    assert mine.drawn(15, 0.1) == 15
    assert mine.drawn(100, 0.9, 2.0) == 20
    other = likely_lengths(runs, job("third.jsonl"), {100: 5})
    assert other is not None
    assert (other.source, other.runs) == ("earlier runs", 2)
    assert other.lengths.mean == pytest.approx(55.0, rel=0.05)
    assert other.errors[1] > mine.errors[1]


def test_templates_tell_more_than_other_jobs() -> None:
    keep_answers(DEFAULT_MODEL, job("a.csv", "Sum up {text}"), answers({50: 20}))
    keep_answers(DEFAULT_MODEL, job("b.csv", "Is {text} good?"), answers({2: 20}))
    found = likely_lengths(earlier_answers(DEFAULT_MODEL), job("c.csv", "Is {text} good?"), {100: 5})
    assert found is not None
    assert (found.source, found.runs) == ("same templates", 1)
    assert found.lengths.mean == pytest.approx(2.0, rel=0.1)


def source_of(asked: JobSignature) -> str | None:
    found = likely_lengths(earlier_answers(DEFAULT_MODEL), asked, {100: 5})
    return None if found is None else found.source


def test_a_job_is_known_by_what_it_asks_whatever_the_name_of_its_input() -> None:
    keep_answers(DEFAULT_MODEL, job("some lines", name="in.jsonl"), answers({20: 40}))
    assert source_of(job("some lines", name="in.jsonl")) == "same job"
    assert source_of(job("some lines", name="-")) == "same job"
    assert source_of(job("other lines", name="in.jsonl")) == "earlier runs"
    assert source_of(job(limit=10)) == "earlier runs"
    assert source_of(job(sample=10)) == "earlier runs"


def test_parameters_on_which_lengths_depend_make_another_job() -> None:
    keep_answers(DEFAULT_MODEL, job(template="Sum up {text}", name="a.csv"), answers({20: 40}))

    def source(**params: Any) -> str | None:
        return source_of(job(template="Sum up {text}", name="a.csv", defaults=SamplingParams(**params)))

    assert source() == "same job"
    assert source(max_tokens=5, seed=7, n=2) == "same job"
    assert source(temperature=0.0) == "same templates"
    assert source(min_tokens=9) == "same templates"
    assert source(choices=("yes", "no")) == "earlier runs"
    assert source(schema=dict[str, int]) == "earlier runs"


def test_answers_that_were_cut_are_longer_than_they_look() -> None:
    keep_answers(DEFAULT_MODEL, job(), answers({10: 20}, {20: 20}))
    found = likely_lengths(earlier_answers(DEFAULT_MODEL), job(), {200: 5})
    assert found is not None
    assert found.lengths.mean > 25.0
    assert found.drawn(200, 0.3) > 20


def test_the_error_is_that_of_the_runs_among_themselves() -> None:
    for number in range(20):
        length = round(40 * math.exp(0.1 * (-1) ** number))
        keep_answers(DEFAULT_MODEL, job(f"{number}.jsonl"), answers({length: 20}))
    found = likely_lengths(earlier_answers(DEFAULT_MODEL), job(), {400: 5})
    assert found is not None
    assert 0.05 < found.errors[1] < 0.2


def test_nothing_is_known_without_runs_or_limits(cache: Path) -> None:
    assert likely_lengths((), job(), {100: 5}) is None
    keep_answers(DEFAULT_MODEL, job(), answers({10: 3}))
    assert not earlier_answers(DEFAULT_MODEL), "a few answers say nothing"
    keep_answers(DEFAULT_MODEL, job(), answers({10: 30}))
    assert likely_lengths(earlier_answers(DEFAULT_MODEL), job(), {}) is None
    [path] = cache.rglob("answers/*.json")
    path.write_text("{")
    assert not earlier_answers(DEFAULT_MODEL)
    keep_answers(DEFAULT_MODEL, job(), answers({10: 30}))
    assert len(earlier_answers(DEFAULT_MODEL)) == 1


def test_histograms_stay_small() -> None:
    kept = RunAnswers.of(job(), answers(dict.fromkeys(range(1, 20000), 1)))
    assert len(kept) == 19_999
    assert len(kept.ended) < 1100
    assert kept.lengths({2**17: 1}).mean == pytest.approx(10_000, rel=0.02)


def test_what_cannot_be_kept_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "answers").write_text("in the way")
    keep_answers(DEFAULT_MODEL, job(), answers({10: 30}))
    assert "not kept" in caplog.text
