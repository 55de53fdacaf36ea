"""`batchwright models`: what stands on stdout, what on stderr, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchwright.cli.main import main
from batchwright.cli.models import app
from batchwright.models import resolve
from batchwright.models.catalog import BuiltinModel

runner = CliRunner()


def fails(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit status of a command that fails."""
    monkeypatch.setattr("sys.argv", ["batchwright", "models", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_pull_prints_the_path_alone_on_stdout(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchwright.cli.models.prepare_kernels", lambda progress: progress("compiling kernels"))
    result = runner.invoke(app, ["pull", "tiny"])
    assert result.exit_code == 0
    assert result.stdout == f"{resolve('tiny')}\n"
    assert result.stderr.splitlines() == ["storing tiny in the cache", "compiling kernels"]


def test_path_before_and_after_the_pull(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(monkeypatch, "path", "tiny") == 2
    before = capsys.readouterr()
    assert before.err == "error: tiny is not in the cache; fetch it with: batchwright models pull tiny\n"
    assert before.out == ""
    folder = resolve("tiny")
    after = runner.invoke(app, ["path", "tiny"])
    assert (after.exit_code, after.stdout, after.stderr) == (0, f"{folder}\n", "")


def test_list_shows_what_is_there(tiny: BuiltinModel) -> None:
    folder = resolve("tiny")
    table = runner.invoke(app, ["list"], env={"COLUMNS": "200"}).stdout.splitlines()
    assert table[0].split() == ["name", "kind", "size", "licence", "in", "cache", "description"]
    assert [line.split()[0] for line in table[1:]] == ["smollm2-135m", "minilm", "tiny"]
    assert " yes " in table[3]
    models = json.loads(runner.invoke(app, ["list", "--json"]).stdout)
    assert [model["state"] for model in models] == ["absent", "absent", "cached"]
    assert models[2]["path"] == str(folder)


@pytest.mark.parametrize("command", ["pull", "path"])
def test_an_unknown_name_is_one_line_and_status_2_as_in_every_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(monkeypatch, command, "gpt-17") == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: no model is called 'gpt-17'")
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_what_fails_though_asked_for_rightly_is_status_1(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_WHEELS", str(tmp_path))
    assert fails(monkeypatch, "pull", "tiny") == 1
    assert capsys.readouterr().err.count("error: ") == 1


def test_bad_usage_is_status_2() -> None:
    assert runner.invoke(app, ["pull"]).exit_code == 2
