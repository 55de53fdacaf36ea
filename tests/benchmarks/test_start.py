"""The benchmark of the start: what counts as a first line, and the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.starting import cli
from benchmarks.starting.cli import Measured, report
from benchmarks.starting.measure import Start, StartFailed, batch_lines, start
from benchmarks.starting.systems import INPUT, OUTPUT, System, ours, vllm
from benchmarks.throughput.process import ROOT
from typer.testing import CliRunner

ANSWER = """
import json, os, sys
with open(sys.argv[1]) as source, open(sys.argv[2], "w") as target:
    for line in map(json.loads, source):
        usage = {"completion_tokens": line["body"]["max_tokens"] - int(os.environ["LESS"])}
        print(json.dumps({"custom_id": line["custom_id"], "response": {"body": {"usage": usage}}}), file=target)
"""
LINES = batch_lines(3, "m", 4)


def system(script: str) -> System:
    return System("one", "1: a script", (sys.executable, "-c", script, INPUT, OUTPUT), {"LESS": "0"})


def test_lines_are_what_all_of_them_read() -> None:
    first, *_, last = map(json.loads, batch_lines(12, "m", 32).splitlines())
    assert (first["custom_id"], last["custom_id"]) == ("0", "11")
    assert first["url"] == "/v1/chat/completions"
    assert first["body"]["max_tokens"] == 32


def test_the_first_line_is_before_the_end() -> None:
    begun = start(system(ANSWER), LINES, {})
    assert 0.0 < begun.first <= begun.end


def test_too_few_tokens_are_no_answer() -> None:
    with pytest.raises(StartFailed, match="other numbers of tokens"):
        start(system(ANSWER), LINES, {"LESS": "1"})


def test_what_a_command_says_when_it_fails_is_told() -> None:
    with pytest.raises(StartFailed, match=r"(?s)status 3.*no model"):
        start(system("import sys; print('no model', file=sys.stderr); sys.exit(3)"), LINES, {})


def test_the_page_has_medians_and_says_whether_the_bar_is_met() -> None:
    ours_ = Measured(system(""), first_start=Start(9.0, 9.5), starts=[Start(x, x + 1) for x in (5.0, 4.0, 7.0)])
    page = report([ours_, Measured(system(""), starts=[Start(50.0, 51.0)])], model="m", lines=10, rounds=3)
    assert "| 5.0 (4.0..7.0) |" in page
    assert page.count(" 9.0 |") == 1
    assert "**Met.**" in page
    ours_.starts += [Start(8.0, 9.0)] * 3
    assert "**Missed.**" in report([ours_], model="m", lines=10, rounds=6)


def test_each_is_started_once_before_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = System("batchwright", "1: a script", system(ANSWER).arguments, {"LESS": "0"}, lambda folder: {})
    monkeypatch.setattr(cli, "ours", lambda *_: compiles)
    monkeypatch.setattr(cli, "transformers", lambda *_: system(ANSWER))
    page = tmp_path / "start.md"
    arguments = ["--peer", "transformers", "--rounds", "2", "--lines", "2", "--model", str(tmp_path)]
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    done = CliRunner().invoke(cli.app, [*arguments, "--save", str(page)], catch_exceptions=False)
    assert done.exit_code == 0
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        *("first start", "first start", "round 1 of 2", "round 1 of 2", "round 2 of 2", "round 2 of 2")
    ]
    assert "1: a script" in page.read_text()
    assert page.read_text() in done.stdout


def test_compiled_kernels_go_elsewhere_and_the_models_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    move = ours("m", 1).compiled_in
    assert move is not None
    assert move(tmp_path / "empty") == {"BATCHWRIGHT_CACHE": str(tmp_path / "empty")}
    assert (tmp_path / "empty" / "models").readlink() == tmp_path / "cache" / "models"


def test_without_its_environment_there_is_no_vllm(tmp_path: Path) -> None:
    assert vllm(tmp_path, tmp_path, "m", 1, {}) == []


def test_bad_usage_exits_with_2() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "start.py"), "--peer", "llama.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "must be vllm, transformers or none" in done.stderr
