"""Latencies of `/health`, measured by a separate process: `python -m benchmarks.endure.probe HOST PORT FILE`.

In the process of the load generator they would contain the delays of its own event loop.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD = 0.1
"""Seconds from one request to the next; a late answer delays the next request."""
_TIMEOUT = 30.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Probed:
    """One request."""

    at: float
    """When it was sent, by `time.monotonic`, the same clock for all processes."""
    seconds: float
    answered: bool
    """Whether it was answered with status 200."""


class HealthProbe:
    """Requests `/health` from the server at `port` of 127.0.0.1 while the context lasts.

    `file` is where the process writes; `cores`: which it may run on, all if None.
    """

    def __init__(self, port: int, file: Path, cores: Collection[int] | None = None) -> None:
        self._port = port
        self._file = file
        self._cores = cores

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.endure.probe", "127.0.0.1", str(self._port), str(self._file)]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL)
        if self._cores is not None:
            os.sched_setaffinity(self._process.pid, self._cores)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def read(self) -> list[Probed]:
        """Return what has been measured so far."""
        if not self._file.exists():
            return []
        *lines, _ = self._file.read_text(encoding="ascii").split("\n")
        return [Probed(*json.loads(line)) for line in lines]


def probe(host: str, port: int, file: Path) -> None:
    """Send requests until the process is ended."""
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    with file.open("a", encoding="ascii", buffering=1) as out:
        while True:
            began, answered = time.monotonic(), False
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
                answered = answer.status == http.client.OK
            except (OSError, http.client.HTTPException):
                connection.close()
            ended = time.monotonic()
            out.write(json.dumps([began, ended - began, answered]) + "\n")
            time.sleep(max(0.0, began + PERIOD - ended))


if __name__ == "__main__":
    probe(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
