"""The real command with the real model, killed at random moments and run again: each id once, and the same texts."""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import forked
from tests.long_form import examples

from .fakes import by_id, text_of

LINES = 24
JOBS = 2
KILLS = examples(2, long=8)
MOST_ATTEMPTS = 3 * KILLS + 1
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


def start(source: Path, output: Path, model: Path, *more: str) -> forked.Command:
    options = ["--temperature", "0", "--dtype", "float32", "--max-num-seqs", "3", "--kv-memory", "64MB", "--quiet"]
    return forked.start(["run", source, "-o", output, "--model", model, *options, *more], source.with_name("errors"))


def finish(command: forked.Command) -> None:
    assert command.wait() == 3, command.errors()


def texts(output: Path) -> dict[str, str]:
    """By id, the text or the code of the error. `by_id` refuses an id that is there twice."""
    return {
        name: line["error"]["code"] if line["response"] is None else text_of(line)
        for name, line in by_id(output).items()
    }


@dataclass(frozen=True)
class Whole:
    """A run that nothing stopped."""

    texts: dict[str, str]
    size: int
    """Bytes of its output."""
    seconds: float
    """From the start of the process to its end."""


@pytest.fixture(scope="module")
def whole(source: Path, shallow_path: Path) -> Whole:
    forked.prepare()
    output = source.with_name("whole.jsonl")
    before = time.perf_counter()
    finish(start(source, output, shallow_path))
    return Whole(texts(output), output.stat().st_size, time.perf_counter() - before)


def killed_when_written(command: forked.Command, path: Path, size: int) -> bool:
    """SIGKILL as soon as `path` has `size` bytes. False for a run that ended before that."""
    while command.process.is_alive():
        if path.exists() and path.stat().st_size >= size:
            command.process.kill()
            break
        time.sleep(POLL_SECONDS)
    return was_killed(command)


def killed_after(command: forked.Command, seconds: float) -> bool:
    """SIGKILL at a moment that the output does not choose. False for a run that ended before that."""
    command.process.join(seconds)
    command.process.kill()
    return was_killed(command)


def was_killed(command: forked.Command) -> bool:
    status = command.wait()
    assert status in (-signal.SIGKILL, 3), command.errors()
    return status == -signal.SIGKILL


def whole_lines(output: Path, written: Path) -> list[bytes]:
    """What a run that was killed has finished. An ordered one may have moved it to its place before."""
    held = written if written.exists() else output
    if not held.exists():
        return []
    return [line for line in held.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.mark.parametrize("seed", range(JOBS))
def test_killed_and_resumed(seed: int, source: Path, whole: Whole, shallow_path: Path, tmp_path: Path) -> None:
    assert len(whole.texts) == LINES
    output = tmp_path / "out.jsonl"
    ordered = seed == JOBS - 1
    more = ["--ordered"] if ordered else []
    written = output.with_name("out.jsonl.partial") if ordered else output
    chance = random.Random(seed)
    kept: list[bytes] = []

    def check_complete() -> None:
        content = output.read_bytes().splitlines(keepends=True)
        assert texts(output) == whole.texts
        assert len(content) == LINES
        assert set(kept) <= set(content)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.batchwright.json"]

    kills = 0
    for _ in range(MOST_ATTEMPTS):
        process = start(source, output, shallow_path, *more)
        if kills % 2:
            killed = killed_after(process, chance.random() * whole.seconds)
        else:
            # From where it stands, or from an empty file, to before the last line.
            size = chance.randrange(min(sum(map(len, kept)), whole.size - 1), whole.size)
            killed = killed_when_written(process, written, size)
        if killed:
            kills += 1
            lines = whole_lines(output, written)
            assert set(kept) <= set(lines)
            kept = lines
        else:
            # It was quicker than the signal: start over, so that the kills to come hit a job with work left.
            check_complete()
            output.unlink()
            kept = []
        if kills == KILLS:
            break
    assert kills == KILLS, "too many runs were quicker than the signal"
    finish(start(source, output, shallow_path, *more))
    check_complete()
