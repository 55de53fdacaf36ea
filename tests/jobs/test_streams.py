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
from batchwright.jobs.job_run import RunInterrupted
from batchwright.jobs.loading import ModelChoice
from batchwright.jobs.run import run

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

    feed(monkeypatch, b"x" + CONTENT)
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
    def load(
        model: str, embedding_model: str | None, config: EngineConfig, *rest: object, **_: object
    ) -> tuple[Engine, None]:
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

    def load(
        model: str, embedding_model: str | None, config: EngineConfig, *rest: object, **_: object
    ) -> tuple[Engine, None]:
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
    with pytest.raises(InputError, match="parquet cannot be read from a stream"):
        run("-", tmp_path / "out.jsonl", input_format="parquet")


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(CONTENT)
    read: dict[str, bytes] = {}
    threads = []
    for name in ("out", "report"):
        os.mkfifo(tmp_path / name)
        reader = lambda name=name: read.update({name: (tmp_path / name).read_bytes()})  # noqa: E731
        threads.append(threading.Thread(target=reader, daemon=True))
        threads[-1].start()
    run(tmp_path / "in.jsonl", tmp_path / "out", model=fake(), report=tmp_path / "report")
    for thread in threads:
        thread.join()
    assert read["out"].count(b"\n") == 4
    assert b'"succeeded": 3' in read["report"]
    assert files(tmp_path) == ["in.jsonl", "out", "report"]
    assert (tmp_path / "out").is_fifo()
    assert run(tmp_path / "in.jsonl", "/dev/null", model=fake(), report="/dev/null").done == 4
    assert Path("/dev/null").is_char_device()


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(CONTENT)
    (tmp_path / "there").mkdir()
    for name in ("out", "report"):
        (tmp_path / name).symlink_to(Path("there") / name)
    run(tmp_path / "in.jsonl", tmp_path / "out", model=fake(), report=tmp_path / "report", ordered=True)
    assert files(tmp_path / "there") == ["out", "out.batchwright.json", "report"]
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "report").is_symlink()
    (tmp_path / "report").unlink()
    (tmp_path / "report").symlink_to("in.jsonl")
    with pytest.raises(InputError, match="is the input or the output"):
        run(tmp_path / "in.jsonl", tmp_path / "out", model=fake(), report=tmp_path / "report")


def test_the_report_goes_to_standard_output(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "in.jsonl").write_bytes(CONTENT)
    with pytest.raises(OSError, match=r"No space.*full"):
        run(tmp_path / "in.jsonl", tmp_path / "out", model=fake(), report="/dev/full")
    run(tmp_path / "in.jsonl", tmp_path / "out", model=fake(), report="-")
    assert b'"succeeded": 3' in capsysbinary.readouterr().out
    with pytest.raises(InputError, match="both standard output"):
        run(tmp_path / "in.jsonl", "-", model=fake(), report="-")
