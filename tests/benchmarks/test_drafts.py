"""The jobs of `benchmarks/drafting.py`: as many lines as are measured, the same each time, and the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.drafts.prompts import LINES, jobs


def test_each_job_has_its_lines_and_is_the_same_each_time() -> None:
    drawn = jobs(None)
    assert drawn == jobs(None)
    for prompts in drawn.values():
        assert len(prompts) == LINES
        assert len({json.dumps(prompt) for prompt in prompts}) > LINES // 2


def test_questions_of_a_file_are_one_more_job(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"question": f"How many is {number}?"}) + "\n" for number in range(LINES + 5)))
    prompts = jobs(file)["own.jsonl"]
    assert len(prompts) == LINES
    assert "How many is 95?" in json.dumps(prompts[-1])


def test_too_few_questions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"question": "Why?"}\n')
    with pytest.raises(ValueError, match=r"own\.jsonl: has 1 questions; give a file with at least 96"):
        jobs(file)
