"""A worker process: started once, suspended while it is not its turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from benchmarks.throughput.workers.protocol import Job, Options, Outcome, Ready, from_json

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 15


class WorkerFailed(Exception):
    """A worker ended or answered with an error; the message holds the end of its log."""


class Worker:
    """One system with its model loaded. Outside `run` its whole process group is stopped, so that it takes no CPU time.

    Raises `WorkerFailed` from the constructor and from `run`.
    """

    def __init__(self, module: str, python: Path, options: Options, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - `close` does it
        self._process = subprocess.Popen(
            [str(python), "-m", module, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"} | dict(environment),
            start_new_session=True,  # a group of its own, for the signals
        )
        try:
            self.ready = cast(Ready, self._answer())
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def run(self, job: Job) -> Outcome:
        """Compute `job` and stop again."""
        self._signal(signal.SIGCONT)
        if self._process.stdin is None:
            raise WorkerFailed("the worker has no standard input")
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(f"the worker is gone:\n{self._tail()}") from None
        outcome = cast(Outcome, self._answer())
        self._signal(signal.SIGSTOP)
        return outcome

    def close(self) -> None:
        """End the process and its children. May be called again."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> dict[str, object]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise WorkerFailed(f"the worker ended with status {self._process.wait()}:\n{self._tail()}")
        message = from_json(line)
        if "error" in message:
            raise WorkerFailed(str(message["error"]))
        return message

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]


THIS_PYTHON = Path(sys.executable)
