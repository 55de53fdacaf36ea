"""A server's process: started, awaited, put under load, and ended with all processes that it started."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import psutil

from benchmarks.batching.device import Cost
from benchmarks.batching.http.load import Load, Plan
from benchmarks.batching.http.servers import HOST, Spec
from benchmarks.batching.http.systems import WIRES, HttpSystem
from benchmarks.batching.workload import Job, Workload

ROOT = Path(__file__).resolve().parents[3]
_START_S = 60.0
_SETTLE_S = 30.0
_END_S = 10.0
_POLL_S = 0.05


class ServerFailed(Exception):
    """A server did not start, does not answer, or ended by itself; the message holds the end of its log."""


def cores() -> tuple[set[int], set[int]]:
    """The cores of the server and of the load generator; the same if there is only one."""
    ours = sorted(os.sched_getaffinity(0))
    return set(ours[:-1] or ours), {ours[-1]}


class Server:
    """A running server: `python -m benchmarks.batching.http.servers.MODULE` in its environment.

    Raises `ServerFailed` from the constructor, `load` and `settle`.
    """

    def __init__(self, system: HttpSystem, python: Path, cost: Cost, settings: Mapping[str, Any], port: int) -> None:
        self._wire = system.wire
        self._port = port
        self._cost = cost
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - `close` does it
        spec = Spec(port, cost.alpha, cost.beta, cost.max_batch_size, dict(settings))
        with _pinned(cores()[0]):
            self._process = psutil.Popen(
                [str(python), "-m", system.module],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=_environment() | spec.environment(),
            )
        try:
            self.settle(_START_S)
        except BaseException:
            self.close()
            raise

    def load(self, workload: Workload, rate: float, count: int, seed: int) -> Load:
        """Make the generator send `count` requests at `rate` per second."""
        plan: Plan = {
            "port": self._port,
            "wire": self._wire,
            "cost": asdict(self._cost),
            "workload": asdict(workload),
            "rate": rate,
            "count": count,
            "seed": seed,
        }
        command = [sys.executable, "-m", "benchmarks.batching.http.load", json.dumps(plan)]
        with _pinned(cores()[1]):
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=_environment(), check=False)
        if done.returncode:
            raise ServerFailed(f"the load generator failed:\n{done.stderr[-3000:]}\nlog of the server:\n{self._tail()}")
        return cast(Load, json.loads(done.stdout))

    def settle(self, patience: float = _SETTLE_S) -> None:
        """Wait until a single request is answered as fast as it should be, so that no earlier work is left."""
        quick = 3 * self._cost.alone(1)
        until = time.monotonic() + patience
        while (seconds := self._probe()) is None or seconds > quick:
            if self._process.poll() is not None:
                raise ServerFailed(f"the server ended with status {self._process.returncode}:\n{self._tail()}")
            if time.monotonic() > until:
                what = "no right answer" if seconds is None else f"a lone request takes {seconds:.3f} s"
                raise ServerFailed(f"{what} after {patience:.0f} s:\n{self._tail()}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End it and every process that it started, in any session. May be called again."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*self._process.children(recursive=True), self._process]
            self._process.terminate()
            psutil.wait_procs([self._process], _END_S)
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, _END_S)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _probe(self) -> float | None:
        """Seconds that one short request takes; None if there is no correct answer."""
        wire = WIRES[self._wire]
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
        began = time.monotonic()
        try:
            connection.request(
                "POST", wire.path, wire.encode(Job(1, 0.0, 1, 5.0)), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            body = answer.read()
            right = answer.status == 200 and wire.decode(body) == 1
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            return None
        finally:
            connection.close()
        return time.monotonic() - began if right else None

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]


@contextlib.contextmanager
def _pinned(to: set[int]) -> Iterator[None]:
    """Make processes that are started inside the block run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, to)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _environment() -> dict[str, str]:
    """The environment of every process here: it imports the package and the benchmarks from the checkout."""
    path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
