"""Start a system, and wait for its first line and for its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.starting.systems import System
from benchmarks.throughput.process import ROOT

_BETWEEN_LOOKS = 0.005
_QUESTIONS = (
    "What is the capital of Norway, and what is it known for?",
    "Why does the sea look blue on a clear day?",
    "Which planet of the solar system has the most moons?",
    "How does a sundial tell the time of the day?",
    "What do bees do with the nectar that they find?",
    "Who wrote the first dictionary of the English language?",
    "How many legs does a spider have, and why not six?",
    "What is the difference between a lake and a pond?",
    "Why do leaves turn red and yellow in the autumn?",
    "What makes bread rise while it is in the oven?",
)


class StartFailed(Exception):
    """A command failed, or did not answer as requested; the message says which."""


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds since the process was started."""

    first: float
    """Until the first whole line was in the output file."""
    end: float
    """Until the process had ended."""


def batch_lines(count: int, model: str, tokens: int) -> str:
    """An input of `count` short chats, each to be answered greedily with exactly `tokens` tokens."""
    lines = []
    for number in range(count):
        message = {"role": "user", "content": _QUESTIONS[number % len(_QUESTIONS)]}
        body = {"model": model, "messages": [message], "temperature": 0.0}
        body |= {"max_tokens": tokens, "ignore_eos": True}
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def start(system: System, lines: str, environment: Mapping[str, str]) -> Start:
    """Run `system` over `lines`, with `environment` besides its own.

    Raises `StartFailed` if it fails, or leaves a line without the requested number of tokens.
    """
    with tempfile.TemporaryDirectory(prefix="batchwright-start-") as folder, tempfile.TemporaryFile("w+") as log:
        source, target = Path(folder) / "input.jsonl", Path(folder) / "output.jsonl"
        source.write_text(lines, encoding="utf-8")
        began = time.perf_counter()
        process = subprocess.Popen(
            system.command(source, target),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | dict(system.environment) | dict(environment),
            start_new_session=True,  # a group of its own, for the signal
        )
        try:
            first = None
            while process.poll() is None:
                if first is None and _has_line(target):
                    first = time.perf_counter()
                time.sleep(_BETWEEN_LOOKS)
            ended = time.perf_counter()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            log.seek(0)
            raise StartFailed(f"{system.name} ended with status {process.returncode}:\n{log.read()[-3000:]}")
        _check(system, lines, target)
        return Start((first or ended) - began, ended - began)


def _has_line(path: Path) -> bool:
    try:
        return b"\n" in path.read_bytes()
    except FileNotFoundError:
        return False


def _check(system: System, asked: str, target: Path) -> None:
    wanted = {line["custom_id"]: line["body"]["max_tokens"] for line in map(json.loads, asked.splitlines())}
    got = {}
    for line in map(json.loads, target.read_text(encoding="utf-8").splitlines()):
        if line.get("error"):
            raise StartFailed(f"{system.name} answered line {line['custom_id']} with an error: {line['error']}")
        got[line["custom_id"]] = line["response"]["body"]["usage"]["completion_tokens"]
    if got != wanted:
        raise StartFailed(f"{system.name} generated other numbers of tokens than it was asked to: {got}")
