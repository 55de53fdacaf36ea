"""Processes of `batchwright` that need not import it first: forks of one process that has.

For tests that start services over and over. Each is a process like one that the shell starts: with its own signals,
limits, environment and end.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any


class Forked:
    """A process, with what is needed of the methods of `subprocess.Popen`."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._began = threading.Event()
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `TimeoutError`."""
        if not self._ended.wait(timeout) or self.returncode is None:
            raise TimeoutError(f"process {self.pid} has not ended after {timeout} s")
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            # It may have ended without having been heard of.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def hear(self, told: Mapping[str, Any]) -> None:
        """Take what the process's keeper tells."""
        if "pid" in told:
            self.pid = told["pid"]
            self._began.set()
        else:
            self.returncode = told["status"]
            self._ended.set()

    def begun(self) -> Forked:
        """Return itself once it has a number."""
        self._began.wait()
        return self


class _Forks:
    """The process that is forked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started: list[Forked] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, **request: Any) -> Forked:
        forked = Forked()
        assert self._process.stdin is not None
        with self._lock:
            self._started.append(forked)
            self._process.stdin.write(json.dumps(request | {"number": len(self._started) - 1}) + "\n")
            self._process.stdin.flush()
        return forked.begun()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            told = json.loads(line)
            self._started[told["number"]].hear(told)


_forks = cache(_Forks)


def start(arguments: Sequence[str], *, environment: Mapping[str, str], output: Path) -> Forked:
    """Start `batchwright` with these arguments, its standard output and standard error appended to a file.

    Neither the environment nor the input of this process is passed on, but its working directory is.
    """
    return _forks().start(
        arguments=["batchwright", *arguments], environment=dict(environment), output=str(output), folder=str(Path.cwd())
    )


def _become_the_next_one() -> list[str]:
    """Fork for every request; return, in the new process only, with the arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            request = json.loads(line)
            _keep(request["number"])
            return _become(request)
    os._exit(0)


def _keep(number: int) -> None:
    """Fork again; return in the new process only, about which this one tells."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process == 0:
        return
    _tell(number=number, pid=process)
    _, status = os.waitpid(process, 0)
    _tell(number=number, status=os.waitstatus_to_exitcode(status))
    os._exit(0)


def _tell(**told: int) -> None:
    os.write(1, (json.dumps(told) + "\n").encode())


def _become(request: Mapping[str, Any]) -> list[str]:
    os.setsid()
    os.chdir(request["folder"])
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(request["environment"])
    from batchwright import crash_points

    importlib.reload(crash_points)
    return list(request["arguments"])


def _serve() -> None:
    import batchwright.inference.endpoint
    import batchwright.server.process  # noqa: F401
    from batchwright.cli.main import main

    sys.argv = _become_the_next_one()
    main()


if __name__ == "__main__":
    _serve()
