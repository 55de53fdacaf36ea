"""The command `batchwright` in processes forked from one that has imported all that it needs, and done nothing else.

For tests of what a process leaves behind, of which they kill many, and of services that only have to be there:
importing is most of a start. Each is a process like one that the shell starts, with its own signals, environment and
end.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

context = multiprocessing.get_context("forkserver")
# There is one such process for all tests, which imports these when it starts.
context.set_forkserver_preload(
    [
        "batchwright.engine",  # before torch: it settles how OpenMP's threads wait
        "batchwright.cli.main",
        "batchwright.engine.engine",
        "batchwright.encoder.encoder",
        "batchwright.inference.loading",
        "batchwright.inference.endpoint",
        "batchwright.jobs.loading",
        "batchwright.jobs.job_run",
        "batchwright.jobs.run",
        "batchwright.cli.run",
        "batchwright.server.process",
        "transformers.configuration_utils",
        "tests.jobs.test_via_batch_kill",
    ]
)


@dataclass(frozen=True)
class Command:
    """A process that runs the command, with what is needed of the methods of `subprocess.Popen`."""

    process: ForkServerProcess
    _errors: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Its status, once it has ended; the negative number of a signal that ended it."""
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its status. Raises `TimeoutError`."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"process {self.pid} has not ended after {timeout} s")
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            # It may have ended meanwhile.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def errors(self) -> str:
        """What it has written to standard error."""
        return self._errors.read_text()


def prepare() -> None:
    """Have all imported now, and not by the first process that is started."""
    process = context.Process(target=int)
    process.start()
    process.join()


def start(
    arguments: Sequence[str | Path],
    errors: Path,
    *,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Command:
    """Start the command, in the environment of this process if no other is given, and in a session of its own.

    It appends to the file `errors` what is for standard error, and to `output`, if that is given, what is for standard
    output.
    """
    files = {2: str(errors)} if output is None else {1: str(output), 2: str(errors)}
    for name in files.values():
        Path(name).touch()
    given = dict(os.environ if environment is None else environment)
    process = context.Process(target=_command, args=([*map(str, arguments)], files, given))
    process.start()
    return Command(process, errors)


def _command(arguments: list[str], files: Mapping[int, str], environment: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in files.items():
        opened = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = ["batchwright", *arguments]
    from batchwright import crash_points
    from batchwright.cli.main import main

    importlib.reload(crash_points)  # which has read the environment
    main()
