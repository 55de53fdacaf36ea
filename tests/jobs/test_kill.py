"""The real command with the real model, killed at random moments and run again: each id once, and the same texts."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .fakes import by_id, text_of

COMMAND = Path(sys.executable).with_name("batchwright")
LINES = 24
JOBS, KILLS = 5, 4
POLL_SECONDS = 0.005


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short prompts of uneven lengths, so that results come one after another, and two lines that fail."""
    path = tmp_path_factory.mktemp("kill") / "in.jsonl"
    lines = [
        {"id": f"q{number}", "prompt": f"Fact number {number} about the sea:", "max_tokens": 1 + number % 12}
        for number in range(LINES - 2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": "q0", "prompt": "again"}\nbad\n')
    return path


def start(source: Path, output: Path, model: Path, *more: str) -> subprocess.Popen[bytes]:
    options = [
        "--model",
        str(model),
        "--temperature",
        "0",
        "--dtype",
        "float32",
        "--max-num-seqs",
        "3",
        "--quiet",
        *more,
    ]
    return subprocess.Popen([COMMAND, "run", source, "-o", output, *options], stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate()
    assert process.returncode == 3, errors.decode()


def texts(output: Path) -> dict[str, str]:
    """By id, the text or the code of the error. `by_id` refuses an id that is there twice."""
    return {
        name: line["error"]["code"] if line["response"] is None else text_of(line)
        for name, line in by_id(output).items()
    }


@pytest.fixture(scope="module")
def whole(source: Path, smollm2_path: Path) -> tuple[dict[str, str], int]:
    """What a run that nothing stopped writes, and how many bytes that is."""
    output = source.with_name("whole.jsonl")
    finish(start(source, output, smollm2_path))
    return texts(output), output.stat().st_size


def kill_when_written(process: subprocess.Popen[bytes], path: Path, size: int) -> None:
    """SIGKILL as soon as `path` has `size` bytes. A run that ends before that is left to its end."""
    while process.poll() is None:
        if path.exists() and path.stat().st_size >= size:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(POLL_SECONDS)
    _, errors = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 3), errors.decode()


@pytest.mark.parametrize("seed", range(JOBS))
def test_killed_and_resumed(
    seed: int, source: Path, whole: tuple[dict[str, str], int], smollm2_path: Path, tmp_path: Path
) -> None:
    wanted, full_size = whole
    assert len(wanted) == LINES
    output = tmp_path / "out.jsonl"
    ordered = seed == JOBS - 1
    more = ["--ordered"] if ordered else []
    written = output.with_name("out.jsonl.partial") if ordered else output
    chance = random.Random(seed)
    kept: list[bytes] = []
    for _ in range(KILLS):
        # From where it stands, or from an empty file, to before the last line.
        size = chance.randrange(min(sum(map(len, kept)), full_size - 1), full_size)
        kill_when_written(start(source, output, smollm2_path, *more), written, size)
        # An ordered run may have moved its results to their place before the signal came.
        held = written if written.exists() else output
        lines = [line for line in held.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        assert set(kept) <= set(lines)
        kept = lines
    finish(start(source, output, smollm2_path, *more))
    assert texts(output) == wanted
    assert len(output.read_bytes().splitlines()) == LINES
    assert set(kept) <= set(output.read_bytes().splitlines(keepends=True))
    assert not (tmp_path / "out.jsonl.partial").exists()
