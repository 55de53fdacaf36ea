"""`batchwright serve` as a process, in front of an endpoint that answers when it is told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

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


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, list[dict[str, Any]]]]:
    """Run the service, and yield the process, its address, and its log as it grows."""
    process = subprocess.Popen(
        command("--port", "0", *flags), stderr=subprocess.PIPE, text=True, env=environment(folder)
    )
    assert process.stderr is not None
    log: list[dict[str, Any]] = []
    try:
        for line in process.stderr:
            log.append(json.loads(line))
            if log[-1]["event"] == "serving":
                break
        reader = Thread(target=lambda: log.extend(map(json.loads, process.stderr or ())), daemon=True)
        reader.start()
        yield process, log[-1]["url"], log
        process.wait(LIMIT)
        reader.join(LIMIT)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
