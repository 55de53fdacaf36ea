"""Standard input and output, and pipes."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchwright.engine.engine import Engine
from batchwright.engine_config import EngineConfig
from batchwright.errors import InputError, ModelNotFound, ResumeRefused
from batchwright.jobs import loading
from batchwright.jobs.loading import ModelChoice
from batchwright.jobs.run import RunInterrupted, run

from .fakes import by_id, fake

CONTENT = b'{"prompt": "a"}\n{"prompt": "b"}\nbad\n{"prompt": "c"}\n'


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupt(number: int) -> None:
    if number == 3:
        raise KeyboardInterrupt


def test_standard_input_is_resumed_and_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    feed(monkeypatch, CONTENT)
    with pytest.raises(RunInterrupted) as caught:
        run("-", output, model=fake(slots=1, on_step=interrupt))
    assert caught.value.kept_input == tmp_path / "out.jsonl.input"
    assert caught.value.kept_input.read_bytes() == CONTENT

    feed(monkeypatch, CONTENT + b"x")
    with pytest.raises(ResumeRefused, match="content of the input"):
        run("-", output, model=fake())
    assert caught.value.kept_input.read_bytes() == CONTENT

    feed(monkeypatch, CONTENT)
    report = run("-", output, model=fake())
    assert report.resumed == caught.value.report.done
    assert by_id(output).keys() == {"line-1", "line-2", "line-3", "line-4"}
    assert files(tmp_path) == ["out.jsonl", "out.jsonl.batchwright.json"]


def test_the_kept_input_can_be_named_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    feed(monkeypatch, CONTENT)
    with pytest.raises(RunInterrupted) as caught:
        run("-", output, model=fake(slots=1, on_step=interrupt))
    kept = caught.value.kept_input
    assert kept is not None
    report = run(kept, output, input_format="jsonl", model=fake())
    assert report.resumed == caught.value.report.done
    assert len(by_id(output)) == 4


def test_nothing_is_left_of_a_stream_whose_job_did_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, embedding_model: str | None, config: EngineConfig) -> tuple[Engine, None]:
        raise ModelNotFound(model)

    monkeypatch.setattr(loading, "load_models", load)
    feed(monkeypatch, CONTENT)
    with pytest.raises(ModelNotFound):
        run("-", tmp_path / "out.jsonl")
    assert files(tmp_path) == []


def test_no_kept_input_is_told_of_before_the_work_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelChoice, "opened", opened)
    feed(monkeypatch, CONTENT)
    with pytest.raises(RunInterrupted) as caught:
        run("-", tmp_path / "out.jsonl", model=fake())
    assert caught.value.kept_input is None
    assert files(tmp_path) == []


def test_overwriting_touches_nothing_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    feed(monkeypatch, CONTENT)
    with pytest.raises(RunInterrupted):
        run("-", output, model=fake(slots=1, on_step=interrupt))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() >= {tmp_path / "out.jsonl.input"}

    def load(model: str, embedding_model: str | None, config: EngineConfig) -> tuple[Engine, None]:
        raise ModelNotFound(model)

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_models", load)
        feed(patch, b'{"prompt": "another"}\n')
        with pytest.raises(ModelNotFound):
            run("-", output, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before

    feed(monkeypatch, b'{"prompt": "another"}\n' * 12)
    with pytest.raises(RunInterrupted) as caught:
        run("-", output, overwrite=True, model=fake(slots=1, on_step=interrupt))
    assert caught.value.kept_input == tmp_path / "out.jsonl.input"
    assert caught.value.kept_input.read_bytes() == b'{"prompt": "another"}\n' * 12


@pytest.mark.parametrize("to_stream", [False, True])
@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_stream_that_is_not_read_to_its_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, to_stream: bool
) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell():
                raise raised
            return super().read(8)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=Broken(CONTENT)))
    with pytest.raises(type(raised)):
        run("-", "-" if to_stream else tmp_path / "out.jsonl", model=fake())
    assert files(tmp_path) == []


def test_a_named_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"one\ntwo\n",))
    writer.start()
    report = run(pipe, tmp_path / "out.jsonl", input_format="txt", model=fake())
    writer.join()
    assert report.succeeded == 2


def test_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    feed(monkeypatch, CONTENT)
    report = run("-", "-", model=fake())
    assert report.done == 4
    (tmp_path / "read").write_bytes(capfdbinary.readouterr().out)
    assert len(by_id(tmp_path / "read")) == 4


def test_what_streams_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--ordered"):
        run("-", "-", ordered=True)
    with pytest.raises(InputError, match="Parquet"):
        run("-", tmp_path / "out.jsonl", input_format="parquet")
