"""`batchwright run` from outside: its exit status, its output, and the low cost of usage errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from tests.jobs.fakes import FakeEngine
from typer.testing import CliRunner

from batchwright.cli.main import app, main
from batchwright.engine.engine import Engine
from batchwright.engine_config import EngineConfig
from batchwright.errors import InputError
from batchwright.jobs import loading
from batchwright.request import InferenceResponse

COMMAND = Path(sys.executable).with_name("batchwright")


def batchwright(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the installed command as a user does."""
    return subprocess.run([COMMAND, *arguments], input=stdin, capture_output=True, check=False)


class Echo(FakeEngine):
    """An engine that answers one request in each step."""

    def step(self, most: int = 1) -> list[InferenceResponse]:
        self.stats.steps += 1
        self.on_step(self.stats.steps)
        request, _ = self._running.pop(next(iter(self._running)))
        return [self._response(request)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(5)))
    return path


def use(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> list[EngineConfig]:
    """Have the command use `engine`, and return the options that it asks for."""
    asked: list[EngineConfig] = []

    def load(
        model: str, embedding_model: str | None, config: EngineConfig, *rest: object, **_: object
    ) -> tuple[Engine, None]:
        asked.append(config)
        return cast("Engine", engine), None

    monkeypatch.setattr(loading, "load_models", load)
    return asked


def test_success(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = use(monkeypatch, Echo())
    arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--report", str(tmp_path / "r.json")]
    options = ["--kv-memory", "1GiB", "--max-num-seqs", "7", "--no-prefix-caching", "--dtype", "float32"]
    options += ["--quantization", "int8", "--deterministic"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "Done: 5 of 5 lines, 0 failed" in result.stderr
    assert "loading the model: 0 of 5 lines done" in result.stderr
    changing: dict[str, Any] = {"dtype": "float32", "quantization": "int8", "deterministic": True}
    assert asked == [EngineConfig(kv_memory="1GiB", max_num_seqs=7, prefix_caching=False, **changing)]
    assert json.loads((tmp_path / "r.json").read_text())["succeeded"] == 5


def test_the_name_of_an_output_is_shown_as_it_is(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Echo())
    (tmp_path / "a[").mkdir()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        result = CliRunner().invoke(app, ["run", str(source), "-o", "a[/b].jsonl"])
        assert result.exit_code == 0, result.exception
    assert "a[/b].jsonl is complete: there was nothing left to do." in result.stderr


def test_forms_of_answers(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, output = Echo(), tmp_path / "out.csv"
    use(monkeypatch, engine)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "integer"}}}')

    def status(*flags: str) -> int:
        engine.submitted.clear()
        return CliRunner().invoke(app, ["run", str(source), "-o", str(output), "--overwrite", *flags]).exit_code

    def constraints() -> set[str]:
        return {request.constraint.text for request in engine.submitted if request.constraint}

    assert status("--json-schema", str(schema)) == 0
    assert constraints() == {'{"type":"object","properties":{"a":{"type":"integer"}}}'}
    assert "answer,a,finish_reason" in output.read_text().splitlines()[0]
    assert status("--choices", "yes, no") == 0
    assert constraints() == {'["yes","no"]'}
    assert status("--regex", "[0-9]+", "--retry-invalid", "2") == 0
    assert constraints() == {"[0-9]+"}
    assert status("--choices", "a", "--regex", "b") == status("--choices", "a,,b") == 2
    schema.write_text("[1]")
    for bad in (schema, tmp_path / "missing", tmp_path):
        result = CliRunner().invoke(app, ["run", str(source), "-o", str(output), "--json-schema", str(bad)])
        assert isinstance(result.exception, InputError)
        assert str(bad) in str(result.exception)


def test_a_form_that_cannot_be_kept_ends_the_run_before_any_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    engine, output = Echo(), tmp_path / "out.csv"
    use(monkeypatch, engine)
    schema = tmp_path / "schema.json"
    schema.write_text('{"properties": {"tags": {"uniqueItems": true}}}')
    for flags, said in (
        (["--json-schema", str(schema)], "--json-schema: #/properties/tags has keywords that are not supported"),
        (["--regex", "("], "--regex: '(' is no pattern: unclosed group"),
    ):
        for more in ([], ["--dry-run"]):
            result = CliRunner().invoke(app, ["run", str(source), "-o", str(output), *flags, *more])
            assert isinstance(result.exception, InputError)
            assert str(result.exception).startswith(said)
    assert not engine.submitted
    assert sorted(tmp_path.iterdir()) == sorted([source, schema])


def test_some_failed_and_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Echo())
    with source.open("a") as file:
        file.write("bad\n")
    arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--temperature", "0"]
    assert CliRunner().invoke(app, arguments).exit_code == 3
    # In a process of its own, which has no other executor: a complete job needs none.
    again = batchwright(*arguments)
    assert again.returncode == 3
    assert b"nothing left to do" in again.stderr
    refused = batchwright(*arguments, "--temperature", "0.5")
    assert refused.returncode == 2
    assert refused.stderr.count(b"error: ") == 1
    assert b"temperature (then 0.0, now 0.5)" in refused.stderr
    assert b"Traceback" not in refused.stderr


def test_how_long_a_line_may_be(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Echo())
    with source.open("a") as file:
        file.write(json.dumps({"prompt": "long" * 10}) + "\n")
    output = tmp_path / "out.jsonl"
    arguments = ["run", str(source), "-o", str(output), "--max-line-bytes"]
    assert CliRunner().invoke(app, [*arguments, "40"]).exit_code == 3
    errors = [line["error"]["message"] for line in map(json.loads, output.read_text().splitlines()) if line["error"]]
    assert errors == ["This line has more than 40 bytes, the limit (max_line_bytes): shorten it, or raise the limit."]
    assert CliRunner().invoke(app, [*arguments, "80", "--overwrite"]).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "0"]).exit_code == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    number: signal.Signals,
    status: int,
) -> None:
    def stop(step: int) -> None:
        # Twice: the second time, lines under way are not waited for.
        if step in (3, 4):
            os.kill(os.getpid(), number)

    use(monkeypatch, Echo(on_step=stop))
    # A process in the background of a shell starts with SIGINT ignored, and the tests would inherit that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    before = signal.getsignal(signal.SIGTERM)
    arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl")]
    monkeypatch.setattr("sys.argv", ["/usr/bin/batchwright", *arguments])
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status
    assert "Interrupted: 3 of 5 lines are finished and kept" in result.stderr
    assert f"To go on: batchwright run {source} -o {tmp_path / 'out.jsonl'}" in result.stderr.replace("\n", "")
    assert signal.getsignal(signal.SIGTERM) == before
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 3
    use(monkeypatch, Echo())
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_ctrl_c_before_the_first_line(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(
        model: str, embedding_model: str | None, config: EngineConfig, *rest: object, **_: object
    ) -> tuple[Engine, None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_models", load)
    assert CliRunner().invoke(app, ["run", str(source), "-o", str(tmp_path / "out.jsonl")]).exit_code == 130


def test_usage_errors_are_one_line_and_status_2(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "in.csv"
    table.write_text("city,year\nOslo,1950\n")
    utf16 = tmp_path / "wide.txt"
    utf16.write_bytes("text".encode("utf-16"))
    precious = tmp_path / "precious"
    precious.write_text("precious")
    out = tmp_path / "out.jsonl"
    cases: list[tuple[list[str | Path], str]] = [
        ([tmp_path / "none.jsonl", "-o", out], "does not exist"),
        ([tmp_path, "-o", out], "is a folder"),
        ([source, "-o", tmp_path], "is a folder"),
        ([source, "-o", tmp_path / "no" / "out"], "folder does not exist"),
        ([source, "-o", source], "is the input itself"),
        ([source, "-o", precious], "does not belong"),
        ([precious, "-o", out], "--input-format"),
        ([source, "-o", tmp_path / "out.xlsx"], "extension"),
        ([source, "-o", out, "--keep", "a"], "for outputs that are tables"),
        ([source, "-o", out, "--retry-failed", "--overwrite"], "starts over"),
        ([source, "-o", out, "--retry-failed=some"], "must be 'passing' or 'all'"),
        (["nosuch://bucket/a.csv", "-o", out], "no driver for nosuch://"),
        ([table, "-o", out, "--prompt-template", "@nowhere"], "nowhere"),
        ([source, "-o", out, "--input-format", "xml"], "must be one of"),
        ([source, "-o", out, "--prompt-template", "{a}"], "no column 'a'"),
        ([table, "-o", out], "--prompt-template"),
        ([table, "-o", out, "--prompt-template", "{town}"], "no column 'town'"),
        ([table, "-o", out, "--prompt-template", "{city"], "'{city'"),
        ([utf16, "-o", out], "UTF-16"),
        ([source, "-o", out, "--system", "x"], "--chat"),
        ([source, "-o", out, "--report", tmp_path], "report"),
        ([source, "-o", out, "--temperature", "2.5"], "temperature"),
        ([source], "--output"),
    ]
    before = sorted(tmp_path.iterdir())
    for arguments, says in cases:
        monkeypatch.setattr("sys.argv", ["batchwright", "run", "-q", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert ended.value.code == 2, arguments
        assert says in shown.err.replace("\n", " "), (arguments, shown.err)
        assert shown.out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_an_input_that_changes_meanwhile_is_not_bad_usage(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(step: int) -> None:
        with source.open("a") as file:
            file.write('{"prompt": "new"}\n')

    use(monkeypatch, Echo(slots=1, on_step=change))
    monkeypatch.setattr(
        "sys.argv", ["batchwright", "run", "-q", "--no-plan", str(source), "-o", str(tmp_path / "out.jsonl")]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "changed while it was being read" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "closed", "says"),
    [("in.jsonl -o -", ">&-", b"standard output is closed"), ("- -o out.jsonl", "<&-", b"standard input is closed")],
)
def test_closed_streams(source: Path, arguments: str, closed: str, says: bytes) -> None:
    shell = f'exec "$0" run {arguments} {closed}'
    ended = subprocess.run(["sh", "-c", shell, COMMAND], cwd=source.parent, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_help_and_version_need_no_torch() -> None:
    code = "import sys, batchwright.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert batchwright("--help").returncode == 0
    assert b"--prompt-template" in batchwright("run", "--help").stdout
    assert batchwright("--version").stdout.startswith(b"batchwright 0")


def test_a_key_of_a_further_endpoint_that_is_missing_is_told_with_its_flag(source: Path, tmp_path: Path) -> None:
    arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--backend", "http://127.0.0.1:9/v1"]
    also = "http://127.0.0.1:8/v1 NO_SUCH_KEY"
    result = CliRunner().invoke(app, [*arguments, "--also", also])
    assert result.exit_code != 0
    assert f"--also {also!r}: NO_SUCH_KEY: there is no such environment" in f"{result.output}{result.exception}"


@pytest.mark.parametrize("also", ["", "  ", "http://127.0.0.1:9/v1 KEY OTHER"])
def test_a_further_endpoint_that_is_none_is_told(source: Path, tmp_path: Path, also: str) -> None:
    arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--backend", "http://127.0.0.1:9/v1"]
    result = CliRunner().invoke(app, [*arguments, "--also", also])
    assert result.exit_code != 0
    assert f"--also {also!r}: must be an address" in f"{result.output}{result.exception}"
    assert not (tmp_path / "out.jsonl").exists()
