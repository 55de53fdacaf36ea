"""A run that was stopped at any point goes on: each id once, and the same as without the stop."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.clock import ManualClock
from batchwright.engine.engine import Engine
from batchwright.engine_config import EngineConfig
from batchwright.errors import ModelNotFound, ResumeRefused
from batchwright.jobs import loading
from batchwright.jobs.job_run import RunInterrupted
from batchwright.jobs.run import run
from batchwright.jobs.sink import Sink
from batchwright.request import InferenceRequest, SamplingParams

from .fakes import by_id, fake, killed, read

LINES = [
    *({"prompt": f"question {i}", "id": f"q{i}"} for i in range(12)),
    {"prompt": "poison"},
    {"prompt": "again", "id": "q3"},
    {"messages": [{"role": "user", "content": "héllo"}]},
    {"prompt": "own", "id": "line-20"},
    {"prompt": ["a", "b"]},
    {"prompt": "x", "n": 0},
    *({"prompt": f"more {i}"} for i in range(6)),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + "not json")
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of a run that nothing stopped."""
    output = tmp_path_factory.mktemp("whole") / "out.jsonl"
    run(source, output, model=fake())
    return by_id(output)


def same_apart_from_keys(found: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> bool:
    """An ordered job is another job, so the ids made from its key differ."""

    def bare(lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {
            name: (line["error"], line["response"] and line["response"]["body"]["choices"])
            for name, line in lines.items()
        }

    return bare(found) == bare(wanted)


@settings(max_examples=examples(25, long=60))
@given(st.data())
@pytest.mark.parametrize("ordered", [False, True])
def test_an_output_cut_at_any_byte_is_completed(
    source: Path, whole: dict[str, Any], ordered: bool, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.jsonl"
        run(source, output, ordered=ordered, model=fake())
        content = output.read_bytes()
        kept = data.draw(st.integers(0, len(content)), label="bytes kept")
        output.write_bytes(content[:kept])
        engine = fake(slots=data.draw(st.integers(1, 9), label="slots"))
        report = run(source, output, ordered=ordered, model=engine)
        assert same_apart_from_keys(by_id(output), whole)
        assert report.resumed == content[:kept].count(b"\n")
        assert report.done == report.total == len(whole)
        assert sum(line["error"] is not None for line in read(output)) == report.failed
        if ordered:
            numbers = [int(line["id"].rsplit("_", 1)[1]) for line in read(output)]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 4, pytest.param(9, marks=pytest.mark.long)])
def test_a_killed_process_loses_nothing_finished(
    source: Path, whole: dict[str, Any], tmp_path: Path, step: int, ordered: bool
) -> None:
    output = tmp_path / "out.jsonl"
    killed(source, output, step, ordered=ordered)
    held = tmp_path / "out.jsonl.partial" if ordered else output
    finished = held.read_bytes().count(b"\n")
    report = run(source, output, ordered=ordered, model=fake())
    assert report.resumed == finished
    assert same_apart_from_keys(by_id(output), whole)
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_an_interruption_keeps_what_is_finished(source: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    def interrupt(number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted) as caught:
        run(source, output, model=fake(on_step=interrupt), report=tmp_path / "report.json")
    report = caught.value.report
    assert report.interrupted
    assert 0 < report.done == len(read(output)) < report.total
    assert json.loads((tmp_path / "report.json").read_text())["interrupted"]
    again = run(source, output, model=fake())
    assert again.resumed == report.done
    assert by_id(output) == whole


@pytest.mark.parametrize("raised", [KeyboardInterrupt, OSError])
def test_an_executor_can_be_used_again_after_a_stop(
    source: Path, whole: dict[str, Any], tmp_path: Path, raised: type[BaseException]
) -> None:
    def stop(number: int) -> None:
        if number == 5:
            raise raised

    engine = fake(on_step=stop)
    with pytest.raises(raised):
        run(source, tmp_path / "stopped.jsonl", model=engine)
    assert engine.unfinished == 0
    run(source, tmp_path / "out.jsonl", model=engine)
    assert by_id(tmp_path / "out.jsonl") == whole


def test_requests_of_others_in_the_executor_are_left_alone(source: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    engine = fake(slots=1)
    engine.submit(InferenceRequest([5, 6], request_id="other"))
    run(source, tmp_path / "out.jsonl", model=engine)
    assert by_id(tmp_path / "out.jsonl") == whole


def test_finished_lines_are_not_run_again(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(source, output, model=fake())
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(line for line in lines if b'"q5"' not in line))
    engine = fake()
    run(source, output, model=engine)
    assert engine.prompts == ["question 5"]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_complete_job_loads_no_model(
    source: Path, tmp_path: Path, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    loaded: list[str] = []

    def load(
        model: str, embedding_model: str | None, config: EngineConfig, *rest: object, **_: object
    ) -> tuple[Engine, None]:
        loaded.append(model)
        return fake(), None

    monkeypatch.setattr(loading, "load_models", load)
    first = run(source, output, ordered=ordered, model="m")
    content = output.read_bytes()
    again = run(source, output, ordered=ordered, model="m")
    assert loaded == ["m"]
    assert output.read_bytes() == content
    assert (again.succeeded, again.failed, again.resumed) == (first.succeeded, first.failed, again.total)


def test_a_model_that_cannot_be_loaded_leaves_everything_as_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"

    def load(
        model: str, embedding_model: str | None, config: EngineConfig, *rest: object, **_: object
    ) -> tuple[Engine, None]:
        raise ModelNotFound(model)

    monkeypatch.setattr(loading, "load_models", load)
    with pytest.raises(ModelNotFound):
        run(source, output, model="typo")
    assert [*tmp_path.iterdir()] == []
    output.write_text("precious")
    with pytest.raises(ModelNotFound):
        run(source, output, model="typo", overwrite=True)
    assert output.read_text() == "precious"


def test_other_input_or_parameters_are_refused_by_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_models", lambda *given, **_: (fake(), None))
    output = tmp_path / "out.jsonl"
    run(source, output, model=fake())
    content = output.read_bytes()
    with pytest.raises(ResumeRefused, match=r"temperature \(then 0.7, now 0.1\).*--overwrite"):
        run(source, output, model=fake(), defaults=SamplingParams(temperature=0.1))
    with pytest.raises(ResumeRefused, match=r"chat \(then false, now true\)"):
        run(source, output, model=fake(), chat=True)
    with pytest.raises(ResumeRefused, match="ordered"):
        run(source, output, model=fake(), ordered=True)
    with pytest.raises(ResumeRefused, match=r"model \(then \"fake-model\", now \"other\"\)"):
        run(source, output, model=fake(model_name="other"))
    with pytest.raises(ResumeRefused, match="dtype"):
        run(source, output, model="fake-model", dtype="bfloat16")
    with pytest.raises(ResumeRefused, match=r"quantization \(then null, now \"int8\"\)"):
        run(source, output, model="fake-model", quantization="int8")
    with pytest.raises(ResumeRefused, match=r"deterministic \(then null, now true\)"):
        run(source, output, model="fake-model", deterministic=True)
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(b"\n" + source.read_bytes())
    with pytest.raises(ResumeRefused, match="the content of the input"):
        run(changed, output, model=fake())
    assert output.read_bytes() == content
    # The same content under another name is the same job, and how fast it is run does not matter.
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(source.read_bytes())
    run(moved, output, model="fake-model", max_num_seqs=3, device="cpu", deterministic=False)
    assert output.read_bytes() == content


def test_overwrite_starts_over(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(source, output, model=fake())
    report = run(source, output, model=fake(model_name="b"), overwrite=True, ordered=True)
    assert report.resumed == 0
    assert {line["response"]["body"]["model"] for line in read(output) if line["response"]} == {"b"}
    report = run(source, output, model=fake(), overwrite=True)
    assert report.resumed == 0


def test_a_deleted_output_starts_over(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(source, output, model=fake())
    output.unlink()
    assert run(source, output, model=fake(), chat=True).resumed == 0


def test_files_of_others_are_never_written_to(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    with pytest.raises(ResumeRefused, match="does not belong"):
        run(source, output, model=fake())
    assert output.read_text() == "precious\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    output.write_text("")
    assert run(source, output, model=fake()).resumed == 0


def test_an_output_that_was_tampered_with_is_refused(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(source, output, model=fake())
    lines = output.read_bytes().splitlines(keepends=True)
    for damaged in ([b"hello\n", *lines], [*lines, lines[0]], [lines[0].replace(b"batch_req_", b"batch_req_0")]):
        output.write_bytes(b"".join(damaged))
        with pytest.raises(ResumeRefused, match="was not written by this job"):
            run(source, output, model=fake())


def test_one_run_at_a_time(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with (tmp_path / "out.jsonl.batchwright.json").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ResumeRefused, match="another run"):
            run(source, output, model=fake())
    assert run(source, output, model=fake()).done == len(LINES) + 1


def test_a_full_disk_is_named() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with (
        Sink(descriptor, "out.jsonl", ManualClock()) as sink,
        pytest.raises(OSError, match=r"No space.*out"),
    ):
        sink.write(b"x\n")
    os.close(descriptor)


def test_results_are_synced_about_every_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("batchwright.jobs.job.os.fsync", synced.append)
    clock = ManualClock()
    with Sink.append_to(tmp_path / "out", 0, clock) as sink:
        for _ in range(5):
            clock.advance(0.4)
            sink.write(b"x\n")
        assert len(synced) == 1
        assert (tmp_path / "out").read_bytes() == b"x\n" * 5
    assert len(synced) == 2
