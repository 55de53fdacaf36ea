"""The processes in which systems are measured: each library in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from benchmarks.batching.worker import Ready, Result, Run

_ROOT = Path(__file__).resolve().parents[2]

SYSTEMS = {
    "ours": ("batchwright", None),
    "greedy": ("greedy (20 lines)", None),
    "sorting": ("sorted, as infinity", None),
    "batched": ("batched", "batched"),
    "async_batcher": ("async-batcher", "async-batcher"),
    "bentoml": ("BentoML", "bentoml"),
    "ray247": ("Ray Serve 2.47", "ray247"),
    "ray260": ("Ray Serve 2.60", "ray260"),
}
"""By the name on the command line: the name in tables, and the folder of its environment; None: this one."""

_MODULES = {
    "batched": "peer_batched",
    "async_batcher": "peer_async_batcher",
    "bentoml": "peer_bentoml",
    "ray247": "peer_ray",
    "ray260": "peer_ray",
}


def installed() -> list[str]:
    """The systems whose environment exists."""
    return [name for name, (_, folder) in SYSTEMS.items() if folder is None or _python(folder).exists()]


class Peer:
    """A process that measures one system, one run after another. Raises RuntimeError when it fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.title, folder = SYSTEMS[name]
        self._module = _MODULES.get(name, name)
        python = Path(sys.executable) if folder is None else _python(folder)
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.batching.worker", self._module],
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}", "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        ready = cast(Ready, self._read())
        self.version = ready["version"]
        self.options = ready["options"]

    def run(self, spec: Run) -> Result:
        """Measure once; `spec["system"]` is filled in."""
        spec = cast(Run, {**spec, "system": self._module})
        if self._process.stdin is None:
            raise RuntimeError(f"{self.name}: its process has no input")
        self._process.stdin.write(json.dumps(spec) + "\n")
        self._process.stdin.flush()
        return cast(Result, self._read())

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"{self.name}: its process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def _python(folder: str) -> Path:
    return _ROOT / ".bench" / folder / "bin" / "python"
