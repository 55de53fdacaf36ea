"""Inputs longer than the windows of an order, whose lines are read in an order of the whole file."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pytest
from tests.jobs.fakes import FakeEngine, by_id, codes, killed, read, text_of

from batchwright.clock import MonotonicClock
from batchwright.errors import InputError
from batchwright.jobs.job import Job
from batchwright.jobs.line_orders import EngineOrder
from batchwright.jobs.lines import BadLine
from batchwright.jobs.ordered_records import ordered_records
from batchwright.jobs.run import run
from batchwright.jobs.spec import JobSpec
from batchwright.planning.file_order import FileOrder

DOCUMENTS, QUESTIONS = 20, 4
TEXTS = [f"{number:03}" + f" what document {number} says" * 12 for number in range(DOCUMENTS)]
ROWS = [(text, f"question {question}") for question in range(QUESTIONS) for text in TEXTS]
"""All documents with the first question, then all with the second, …"""
_MANY = 2**30


def write_jsonl(path: Path) -> Path:
    lines = [
        json.dumps({"id": f"{number}", "prompt": f"{text} {question}"}) for number, (text, question) in enumerate(ROWS)
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines[:7], "", "  ", *lines[7:]]).encode())
    return path


def write_csv(path: Path) -> Path:
    path.write_text("text,question\n" + "".join(f'"{text}","{question}"\n' for text, question in ROWS))
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts, questions = zip(*ROWS, strict=True)
    pq.write_table(pa.table({"text": texts, "question": questions}), path)
    return path


def write_gzip(path: Path) -> Path:
    path.write_bytes(gzip.compress(write_jsonl(path.with_suffix(".plain")).read_bytes()))
    return path


INPUTS: dict[str, Callable[[Path], Path]] = {
    "in.jsonl": write_jsonl,
    "in.csv": write_csv,
    "in.parquet": write_parquet,
    "in.jsonl.gz": write_gzip,
    "in.jsonl.GZ": write_gzip,
}


def spec_of(path: Path) -> JobSpec:
    template = None if "jsonl" in path.name else "{text} {question}"
    return JobSpec(inputs=(str(path),), output=str(path.with_name("out.jsonl")), model=None, prompt_template=template)


def small_windows(monkeypatch: pytest.MonkeyPatch, lines: int = 10) -> None:
    monkeypatch.setattr(EngineOrder, "window", (lines, _MANY))


@pytest.mark.parametrize("name", INPUTS)
def test_records_of_any_input_are_read_in_the_order_of_the_whole_file(tmp_path: Path, name: str) -> None:
    with Job(spec_of(INPUTS[name](tmp_path / name)), MonotonicClock()) as job:
        as_they_are = {record.number: record for record in job.source.records()}
        with ordered_records(job, 10, _MANY) as records:
            assert records is not None
            found = [*records]
        assert {record.number: record for record in found} == as_they_are
        assert len(found) == len(as_they_are)
        lines = [job.parser.parse(record) for record in found]
        prompts = [line.body["prompt"] for line in lines if not isinstance(line, BadLine)]
        assert sum(one[:3] != other[:3] for one, other in pairwise(prompts)) == DOCUMENTS - 1
        with ordered_records(job, len(ROWS), _MANY) as records:
            assert records is None


def test_a_copy_that_cannot_be_written_leaves_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = list[Any]()

    def full(*given: Any, **more: Any) -> IO[bytes]:
        files.append(os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb"))
        return files[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with (
        Job(spec_of(write_csv(tmp_path / "in.csv")), MonotonicClock()) as job,
        ordered_records(job, 10, _MANY) as records,
    ):
        assert records is None
    assert files[0].closed
    assert "No space left on device" in caplog.text


def test_lines_that_begin_alike_meet_though_windows_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_windows(monkeypatch, 40)
    source = write_jsonl(tmp_path / "in.jsonl")
    engine = FakeEngine(slots=2)
    engine.stats.kv_blocks = 200
    report = run(source, tmp_path / "out.jsonl", model=engine)  # type: ignore[arg-type]
    assert report.succeeded == len(ROWS)
    documents = [prompt[:3] for prompt in engine.prompts]
    assert sum(one != other for one, other in pairwise(documents)) == DOCUMENTS - 1
    plain = FakeEngine(slots=2)
    run(source, tmp_path / "plain.jsonl", model=plain, planned=False)  # type: ignore[arg-type]
    assert {name: text_of(line) for name, line in by_id(tmp_path / "out.jsonl").items()} == {
        name: text_of(line) for name, line in by_id(tmp_path / "plain.jsonl").items()
    }


def test_urgent_lines_come_first(tmp_path: Path) -> None:
    lines = [{"prompt": f"{text} {question}"} for text, question in ROWS]
    lines[33]["priority"], lines[71]["deadline"] = 0, 30.0  # type: ignore[assignment]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Job(spec_of(source), MonotonicClock()) as job, ordered_records(job, 10, _MANY) as records:
        assert records is not None
        assert {next(records).number, next(records).number} == {34, 72}
        assert next(records).number == 1


def test_lines_that_are_too_long_fail_wherever_they_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{text} {question}"}) for text, question in ROWS]
    lines[20] = '{"prompt": "' + "x" * 3000 + '"}'
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    short = replace(spec_of(source), max_line_bytes=2000)
    with Job(short, MonotonicClock()) as job, ordered_records(job, 10, _MANY) as records:
        assert records is not None
        bad = [record for record in records if not isinstance(record.content, bytes)]
    assert [record.number for record in bad] == [21]


def test_an_input_that_changes_between_two_passes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, order = write_jsonl(tmp_path / "in.jsonl"), FileOrder.order

    def found(lines: FileOrder, *window: int) -> Any:
        whole = source.read_bytes()
        source.write_bytes(whole[: len(whole) // 2])
        return order(lines, *window)

    monkeypatch.setattr(FileOrder, "order", found)
    with (
        Job(spec_of(source), MonotonicClock()) as job,
        pytest.raises(InputError, match="changed"),
        ordered_records(job, 10, _MANY),
    ):
        pass


def test_of_two_lines_with_one_id_the_first_in_the_file_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_windows(monkeypatch)
    lines = [{"id": f"{number}", "prompt": f"{text} {question}"} for number, (text, question) in enumerate(ROWS)]
    lines[60]["id"] = "5"  # which is read with document 0, and so before line 5
    lines[61]["prompt"] = 7  # type: ignore[assignment]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + "not JSON\n")
    report = run(source, tmp_path / "out.jsonl", model=FakeEngine(slots=2))  # type: ignore[arg-type]
    assert codes(report) == {"duplicate_custom_id": 1, "invalid_request": 1, "invalid_json_line": 1}
    found = by_id(tmp_path / "out.jsonl")
    assert found["5"]["response"] is not None
    assert found["line-61"]["error"]["line"] == 61


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.long), 9])
def test_a_run_in_the_order_of_the_whole_file_goes_on_where_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    small_windows(monkeypatch)
    source, output = write_jsonl(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    killed(source, output, step, window=10)
    before = len(read(output))
    report = run(source, output, model=FakeEngine())  # type: ignore[arg-type]
    assert (report.total, report.done, report.resumed) == (len(ROWS), len(ROWS), before)
    assert len(by_id(output)) == len(read(output)) == len(ROWS)
