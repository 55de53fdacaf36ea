"""`read_results`: the results of runs beside their prompts, in whichever order, and files that no run wrote."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from batchwright.errors import InputError
from batchwright.jobs import reading
from batchwright.jobs.reading import read_results
from batchwright.jobs.run import run

from .fakes import fake

OURS = {"id": "batch_req_ab12_1", "custom_id": "a", "response": None, "error": {"code": "bad", "message": "no"}}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("most_held", [1, 2**24])
def test_results_in_any_order_have_their_prompts(
    tmp_path: Path, most_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST_HELD", most_held)
    prompts = [f"p{number} \N{GREEK SMALL LETTER PI}" for number in range(9)]
    source = written(tmp_path / "in.jsonl", *({"id": each, "prompt": each} for each in prompts), "no JSON")
    output = tmp_path / "out.jsonl"
    run(source, output, model=fake())
    results = output.read_text().splitlines()
    written(output, {**OURS, "id": "batch_req_ab12_99"}, *results[::-1])
    found = {each.name: each.prompt for each in read_results(output)}
    assert found == {each: each for each in prompts} | {"line-10": None, "a": None}
    source.unlink()
    assert {each.prompt for each in read_results(output)} == {None}


def test_prompts_that_wait_for_their_results_are_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_HELD", 2**16)
    length, number = 2**18, 32
    source = written(tmp_path / "in.jsonl", *({"prompt": f"{each}".ljust(length)} for each in range(number)))
    output = tmp_path / "out.jsonl"
    run(source, output, model=fake())
    written(output, *output.read_text().splitlines()[::-1])
    tracemalloc.start()
    try:
        sizes = [len(each.prompt or "") for each in read_results(output)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sizes == [length] * number
    assert peak < 12 * length


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({**OURS, "id": "batch_req_67ab"}, "no run wrote this result, whose id is 'batch_req_67ab'"),
        ({**OURS, "id": None}, "whose id is None"),
        ({**OURS, "id": "batch_req_ab12_" + "9" * 5000}, "no run wrote this result"),
        ({**OURS, "error": "no"}, "no run wrote this result"),
        ("{not json", "not parseable"),
        ("[]", "must be an object"),
    ],
)
def test_results_of_others_are_refused_by_line(tmp_path: Path, line: Any, told: str) -> None:
    path = written(tmp_path / "out.jsonl", OURS, line)
    results = read_results(path)
    assert next(results).error == "bad: no"
    with pytest.raises(InputError, match=f"out.jsonl, line 2: .*{told}"):
        next(results)


def test_a_column_of_tokens_has_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "out.csv", "answer,error,completion_tokens", "yes,,3", "no,,many")
    results = read_results(path)
    assert next(results).tokens == 3
    with pytest.raises(InputError, match="row 2: completion_tokens is 'many', not a number; name the output of `batch"):
        next(results)
