"""The same rows in turns: a file with `run`, and a dataset of Ray with each system in its fastest way."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from batchwright.models import resolve
from benchmarks.ray_forms.job import Job
from benchmarks.replicas.processes import WORDS
from benchmarks.throughput.process import ROOT
from benchmarks.throughput.systems import vllm_systems

_PROMPT_WORDS = (8, 60)
AT_ONCE = 512
"""Rows that an actor is given at once: twice as many as engines compute, so that others wait when some are done."""


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """A way to compute the rows."""

    name: str
    system: str
    """`run`, `batchwright` or `vllm`: only the fastest way of a system is measured in more than one round."""
    module: str | None = None
    """Module that computes a dataset; None: `run` computes a file."""
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Measured:
    """Rows per second of each way, one figure for each round in which it was measured."""

    rates: dict[Way, list[float]] = field(default_factory=dict)

    def ratios(self, way: Way, other: Way) -> list[float]:
        """Return the ratios of a way to another one in the rounds of both."""
        return [a / b for a, b in zip(self.rates[way], self.rates[other], strict=False)]

    def fastest(self, system: str) -> Way | None:
        """Return the way of a system with the greatest median; None if there is none."""
        ways = [way for way in self.rates if way.system == system and self.rates[way]]
        return max(ways, key=lambda way: statistics.median(self.rates[way]), default=None)


def ways(vllm: Path) -> list[Way]:
    """Return the ways, those of vLLM if it is in the folder `vllm`."""
    ours = [
        Way("batchwright run, a file", "run"),
        Way("Ray Data, batchwright.ray.Generate", "batchwright", "benchmarks.ray_forms.ours"),
    ]
    all_cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    theirs = []
    for system in vllm_systems(vllm, {}):
        binding = system.environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
        if system.environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            # What `ray.data.llm` runs always has a process for its scheduler.
            name, module = "Ray Data, vllm.LLM in a class, one process", "benchmarks.ray_forms.vllm_class"
        else:
            where = "all cores" if binding == all_cores else f"threads {binding}"
            name, module = f"Ray Data, ray.data.llm, {where}", "benchmarks.ray_forms.vllm_processor"
        theirs.append(Way(name, "vllm", module, system.python, system.environment))
    return [*ours, *theirs]


def measure(
    chosen: list[Way],
    *,
    model: str,
    rows: int,
    tokens: int,
    batch_size: int,
    rounds: int,
    vllm_rounds: int,
    say: Callable[[str], None],
) -> Measured:
    """Compute the rows in each round in each way; with vLLM in `vllm_rounds`, after the first in its fastest way only.

    vLLM takes a minute to start, and each round restarts everything.
    """
    found = Measured({way: [] for way in chosen})
    for number in range(rounds):
        for way in chosen:
            if way.system == "vllm" and number and (number >= vllm_rounds or way != found.fastest("vllm")):
                continue
            with TemporaryDirectory(prefix="batchwright-") as folder:
                job: Job = {
                    "rows": str(_write(Path(folder) / "rows.jsonl", rows, seed=number)),
                    "model": str(resolve(model)),
                    "tokens": tokens,
                    "cores": len(os.sched_getaffinity(0)),
                    "batch_size": batch_size,
                    "batches": max(1, AT_ONCE // batch_size),
                    "stamp": str(Path(folder) / "stamp"),
                }
                seconds = _of_file(job) if way.module is None else _of_dataset(way, job)
            found.rates[way].append(rows / seconds)
            say(f"round {number + 1}, {way.name}: {rows / seconds:.2f} rows/s")
    return found


def _write(path: Path, rows: int, seed: int) -> Path:
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            file.write(json.dumps({"prompt": " ".join(draw.choices(WORDS, k=draw.randint(*_PROMPT_WORDS)))}) + "\n")
    return path


def _of_file(job: Job) -> float:
    folder = Path(job["stamp"]).parent
    report = folder / "report.json"
    command = [sys.executable, "-m", "batchwright", "run", job["rows"], "-o", str(folder / "out.jsonl"), "-q"]
    command += ["--model", job["model"], "--temperature", "0", "--max-tokens", str(job["tokens"]), "--ignore-eos"]
    subprocess.run([*command, "--report", str(report)], check=True)
    figures = json.loads(report.read_bytes())
    if figures["failed"]:
        raise RuntimeError(f"{figures['failed']} rows failed")
    return float(figures["loop_seconds"])


def _of_dataset(way: Way, job: Job) -> float:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        **way.environment,
    }
    ended = subprocess.run(
        [str(way.python), "-m", str(way.module)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    if ended.returncode:
        raise RuntimeError(f"{way.name} ended with status {ended.returncode}:\n{ended.stderr[-3000:]}")
    return float(json.loads(ended.stdout.splitlines()[-1])["seconds"])
