"""The command `plan`: what it prints, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchwright.cli.main import app

ELSEWHERE = ["--backend", "http://127.0.0.1:9/v1", "--model", "paid"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    parts = [{"type": "text", "text": "Name a river"}, {"type": "text", "text": " in Asia."}]
    lines = [{"messages": [{"role": "user", "content": parts}]}, {"prompt": 5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("command", [["plan"], ["run", "--dry-run"]], ids=" ".join)
def test_the_plan_is_on_standard_output(command: list[str], source: Path) -> None:
    done = CliRunner().invoke(app, [*command, str(source), *ELSEWHERE])
    assert done.exit_code == 3, done.stderr
    assert done.stdout.startswith("Plan: 2 lines, 1 of them would fail; about 6 prompt tokens in the others.")
    assert "Failed lines, with an example of each kind" in done.stdout
    assert done.stderr == ""


def test_a_path_that_is_given_twice_is_read_once(source: Path) -> None:
    pattern = str(source.with_name("[i]n.jsonl"))
    done = CliRunner().invoke(app, ["plan", str(source), str(source), pattern, *ELSEWHERE])
    assert done.stdout.startswith("Plan: 2 lines")


def test_only_json_is_there_where_that_is_asked_for(source: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(source), *ELSEWHERE, "--json"])
    assert (done.exit_code, done.stderr) == (3, "")
    plan = json.loads(done.stdout)
    assert (plan["total"], plan["failed"], plan["failures"][0]["param"]) == (2, 1, "prompt")
    assert plan["inputs"] == [str(source)]
    both = CliRunner().invoke(app, ["run", str(source), "--dry-run", *ELSEWHERE, "--report", "-"])
    assert json.loads(both.stdout)["failed"] == 1
    assert both.stderr.startswith("Plan: 2 lines")
