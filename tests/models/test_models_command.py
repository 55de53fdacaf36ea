"""`batchwright models`: what stands on stdout, what on stderr, and the exit status."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from batchwright.cli.models import app
from batchwright.models import resolve
from batchwright.models.catalog import BuiltinModel

runner = CliRunner()


def test_pull_prints_the_path_alone_on_stdout(tiny: BuiltinModel) -> None:
    result = runner.invoke(app, ["pull", "tiny"])
    assert result.exit_code == 0
    assert result.stdout == f"{resolve('tiny')}\n"
    assert result.stderr == "storing tiny in the cache\n"


def test_path_before_and_after_the_pull(tiny: BuiltinModel) -> None:
    before = runner.invoke(app, ["path", "tiny"])
    assert (before.exit_code, before.stdout) == (1, "")
    assert before.stderr == "error: tiny is not in the cache; fetch it with: batchwright models pull tiny\n"
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


def test_errors_are_one_line_and_status_1() -> None:
    result = runner.invoke(app, ["pull", "gpt-17"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: no model is called 'gpt-17'")
    assert result.stderr.count("\n") == 1


def test_bad_usage_is_status_2() -> None:
    assert runner.invoke(app, ["pull"]).exit_code == 2
