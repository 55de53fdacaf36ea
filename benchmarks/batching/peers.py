"""The processes in which systems are measured: each library in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from benchmarks.batching.overhead import Spent
from benchmarks.batching.worker import Ready, Result, Run, Spend

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 1200.0
"""Seconds that one run may take: the longest takes about thirty, more on a busy machine."""


@dataclass(frozen=True, slots=True)
class System:
    """One row of the tables."""

    name: str
    """Name on the command line."""
    title: str
    """Title in tables."""
    module: str
    """Module in `benchmarks.batching.systems`."""
    environment: str | None = None
    """The folder of its virtual environment under `.bench`; None: this one."""
    choice: int | None = None
    """The only one of its grid's settings that this row measures; None: all, and the first is the default."""

    @property
    def python(self) -> Path:
        """Path of its interpreter, which may not exist."""
        if self.environment is None:
            return Path(sys.executable)
        return ROOT / ".bench" / self.environment / "bin" / "python"


OURS, UNLIMITED, GREEDY, SORTING, REQUESTS = "ours", "ours_untold", "greedy", "sorting", "ours_requests"
SYSTEMS = {
    system.name: system
    for system in (
        System(OURS, "batchwright", "ours"),
        System(UNLIMITED, "batchwright, not given limits", "ours", choice=1),
        System(GREEDY, "greedy (20 lines)", "greedy"),
        System(SORTING, "sorted, as infinity", "sorting"),
        System("batched", "batched", "peer_batched", "batched"),
        System("async_batcher", "async-batcher", "peer_async_batcher", "async-batcher"),
        System("bentoml", "BentoML", "peer_bentoml", "bentoml"),
        System("ray247", "Ray Serve 2.47", "peer_ray", "ray247"),
        System("ray260", "Ray Serve 2.60", "peer_ray", "ray260"),
    )
}
"""All systems that are compared under load."""
BY_REQUEST = System(REQUESTS, "batchwright, add_request", "ours_requests")
"""Another interface of ours, for which only the overhead is measured."""


def title(name: str) -> str:
    """Return the title of a system by its name."""
    return BY_REQUEST.title if name == REQUESTS else SYSTEMS[name].title


class PeerFailed(Exception):
    """A system could not be started, or did not answer."""


class Peer:
    """A process that measures one system, one run after another. Raises `PeerFailed`, also when it is created."""

    def __init__(self, system: System) -> None:
        self.system = system
        # Its own session: a key that ends this program must not end the process in the middle of a run, as if it had
        # failed.
        self._process = subprocess.Popen(
            [system.python, "-m", "benchmarks.batching.worker", system.module],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._tasks = cast(IO[str], self._process.stdin)
        self._answers = cast(IO[str], self._process.stdout)
        try:
            ready = cast(Ready, self._read())
        except PeerFailed:
            self.close()
            raise
        self.version = ready["version"]
        self.options = ready["options"] if system.choice is None else [ready["options"][system.choice]]

    def run(self, spec: Run) -> Result:
        """Measure once; `spec["system"]` is filled in."""
        return cast(Result, self._ask({**spec, "system": self.system.module}))

    def spend(self, requests: int) -> Spent:
        """Measure the cost of the system itself with default settings."""
        task: Spend = {"system": self.system.module, "options": self.options[0], "requests": requests}
        return cast(Spent, self._ask({**task}))

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        try:
            self._tasks.write(json.dumps(task) + "\n")
            self._tasks.flush()
        except OSError as error:
            raise PeerFailed(f"its process has ended: {error}") from error
        return self._read()

    def _read(self) -> dict[str, Any]:
        timer = threading.Timer(_PATIENCE, self._process.kill)
        timer.start()
        line = self._answers.readline()
        timer.cancel()
        if not line:
            status = self._process.wait()
            raise PeerFailed(f"its process ended with status {status}; one run may take {_PATIENCE:g} s")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"].strip().rpartition("\n")[2])
        return answer

    def close(self) -> None:
        """End the process, whatever it is doing. May be called from another thread, and repeatedly."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
