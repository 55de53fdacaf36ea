"""The command `batchwright` in processes forked from one that has imported all that it needs, and done nothing else.

For tests of what a process leaves behind, of which they kill many: with a model, importing is most of a start.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
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
        "batchwright.jobs.loading",
        "batchwright.jobs.job_run",
        "batchwright.jobs.run",
        "batchwright.cli.run",
        "transformers.configuration_utils",
        "tests.jobs.test_via_batch_kill",
    ]
)


@dataclass(frozen=True)
class Command:
    """A process that runs the command."""

    process: ForkServerProcess
    _errors: Path

    def wait(self) -> int | None:
        """Its status, once it has ended; the negative number of a signal that ended it."""
        self.process.join()
        return self.process.exitcode

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
    """Start the command, in the environment of this process if no other is given.

    It writes to `errors` what is for standard error, and to `output`, if that is given, what is for standard output.
    """
    files = {2: str(errors)} if output is None else {1: str(output), 2: str(errors)}
    for name in files.values():
        Path(name).touch()
    given = dict(os.environ if environment is None else environment)
    process = context.Process(target=_command, args=([*map(str, arguments)], files, given))
    process.start()
    return Command(process, errors)


def _command(arguments: list[str], files: Mapping[int, str], environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in files.items():
        with Path(name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = ["batchwright", *arguments]
    from batchwright.cli.main import main

    main()
