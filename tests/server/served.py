"""`batchwright serve` as a process, in front of an endpoint that answers when it is told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, Protocol

from tests import forked

LIMIT = 60.0


class Endpoint(ThreadingHTTPServer):
    """An endpoint that answers when it is told to."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.asked = Event()
        self.answer = Event()
        self.answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "far"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.set()
        self.server.answer.wait(LIMIT)
        choice = {"index": 0, "text": "done", "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self._send({"id": "x", "object": "text_completion", "created": 1, "model": "far", "choices": [choice],
                    "usage": usage})  # fmt: skip

    def _send(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        pass


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "batchwright", "serve", *flags]


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    return kept | {"BATCHWRIGHT_DATA": str(folder), "XDG_CONFIG_HOME": str(folder), "BATCHWRIGHT_LOG_FORMAT": "json"}


class Process(Protocol):
    """What `subprocess.Popen` and `forked.Command` have in common."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@contextmanager
def serving(folder: Path, *flags: str, fork: bool = False) -> Iterator[tuple[Process, str, list[dict[str, Any]]]]:
    """Run the service, and yield the process, its address, and its log as it grows.

    `fork`: without Python's start and without the imports, which take most of the time.
    """
    with tempfile.TemporaryDirectory() as beside:
        process, lines = (_forked if fork else _started)(folder, Path(beside), flags)
        log: list[dict[str, Any]] = []
        try:
            for line in lines:
                log.append(json.loads(line))
                if log[-1]["event"] == "serving":
                    break
            reader = Thread(target=lambda: log.extend(map(json.loads, lines)), daemon=True)
            reader.start()
            yield process, log[-1]["url"], log
            process.wait(LIMIT)
            reader.join(LIMIT)
        finally:
            process.kill()
            process.wait()
            lines.close()


def _started(folder: Path, beside: Path, flags: Sequence[str]) -> tuple[Process, IO[str]]:
    process = subprocess.Popen(
        command("--port", "0", *flags), stderr=subprocess.PIPE, text=True, env=environment(folder)
    )
    assert process.stderr is not None
    return process, process.stderr


def _forked(folder: Path, beside: Path, flags: Sequence[str]) -> tuple[Process, IO[str]]:
    pipe = beside / "log"
    os.mkfifo(pipe)
    process = forked.start(["serve", "--port", "0", *flags], pipe, output=pipe, environment=environment(folder))
    return process, pipe.open()


def ended(folder: Path, *flags: str) -> tuple[int, str]:
    """Run the service, forked, and return its exit status and what it printed, once it has ended by itself."""
    with tempfile.TemporaryDirectory() as beside:
        printed = Path(beside) / "printed"
        process = forked.start(["serve", *flags], printed, output=printed, environment=environment(folder))
        return process.wait(LIMIT), printed.read_text()
