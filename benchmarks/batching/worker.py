"""A process that measures one system, in the environment that has its library.

    PYTHONPATH=src:. .bench/batched/bin/python -m benchmarks.batching.worker peer_batched

It prints a line of JSON that describes the system (`Ready`), then reads lines, each a `Run` or a `Spend`, and answers
each with a `Result` or a `Spent`, or with `{"error": ...}`. This module and its imports need only the standard library
and batchwright.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from benchmarks.batching.device import Cost
from benchmarks.batching.goodput import by_decile, in_time
from benchmarks.batching.overhead import spend
from benchmarks.batching.replay import measure
from benchmarks.batching.workload import Job, Workload, draw


class Ready(TypedDict):
    system: str
    version: str
    options: list[dict[str, Any]]
    """The published grid; the first is the library's default."""


class Run(TypedDict):
    """What to measure. `cost` and `workload` hold the fields of `Cost` and of `Workload`."""

    system: str
    options: dict[str, Any]
    cost: dict[str, Any]
    workload: dict[str, Any]
    rate: float
    count: int
    seed: int
    trace: str | None
    virtual: bool
    goal: NotRequired[float]
    """The required share on time: if the first eighth alone has more misses than the whole may have, the result is that
    of the eighth (also below the goal), and the rest is not run."""


class Spend(TypedDict):
    """What to measure for the system's own cost alone."""

    system: str
    options: dict[str, Any]
    requests: int


class Result(TypedDict):
    """Jobs whose caller went away count nowhere but in `mean_size`. Times in seconds; None: there was no answer."""

    in_time: float
    """The share answered correctly within the SLO."""
    deciles: list[float]
    """`in_time` of each tenth by length, the shortest first."""
    answered: float
    """The share answered correctly at any time."""
    latencies: dict[str, float | None]
    """Quantiles of all jobs, at "0.5", "0.9", "0.99", "1"."""
    urgent: dict[str, float | None]
    """Quantiles of the interactive ones alone; empty if there are none."""
    bulk: dict[str, float | None]
    """Quantiles of the others; empty if none are interactive."""
    batches: int
    mean_size: float
    seconds: float
    """Seconds from the first arrival to the last answer."""
    busy: float
    """Seconds that the device computed."""
    cpu: NotRequired[float]
    """Seconds of processor time of this process; the only figure that differs when a run is repeated."""


SHARES = (0.5, 0.9, 0.99, 1.0)


def quantiles(latencies: Sequence[float]) -> dict[str, float | None]:
    """The latency within which each of `SHARES` of them lies; None if that is infinite. Empty if there are none."""
    ranked = sorted(latencies)
    found = {f"{share:g}": ranked[math.ceil(share * len(ranked)) - 1] for share in SHARES if ranked}
    return {share: value if math.isfinite(value) else None for share, value in found.items()}


def run(spec: Run) -> Result:
    """Measure one system once. Raises what `measure` does."""
    cost, trace = Cost(**spec["cost"]), spec["trace"]
    jobs = draw(
        Workload(**spec["workload"]),
        spec["count"],
        spec["rate"],
        spec["seed"],
        cost.alone,
        Path(trace) if trace else None,
    )
    if "goal" in spec:
        part = len(jobs) // 8
        first = _result(spec, cost, jobs[:part])
        if (1 - first["in_time"]) * part > (1 - spec["goal"]) * len(jobs):
            return first
    return _result(spec, cost, jobs)


def _result(spec: Run, cost: Cost, jobs: Sequence[Job]) -> Result:
    began = time.process_time()
    outcomes = measure(spec["system"], spec["options"], cost, jobs, virtual=spec["virtual"])
    cpu = time.process_time() - began
    kept = [
        (latency, job.urgent)
        for job, latency, counted in zip(jobs, outcomes.latencies, outcomes.counted, strict=True)
        if counted
    ]
    return {
        "in_time": in_time(jobs, outcomes),
        "deciles": by_decile(jobs, outcomes),
        "answered": sum(math.isfinite(latency) for latency, _ in kept) / len(kept),
        "latencies": quantiles([latency for latency, _ in kept]),
        "urgent": quantiles([latency for latency, urgent in kept if urgent]),
        "bulk": quantiles([latency for latency, urgent in kept if not urgent and spec["workload"].get("urgent")]),
        "batches": outcomes.batches,
        "mean_size": outcomes.mean_size,
        "seconds": outcomes.seconds,
        "busy": outcomes.busy,
        "cpu": cpu,
    }


def main() -> None:
    """Answer runs until the other side hangs up."""
    # Libraries print; their output must not be mixed with the answers.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(message: Mapping[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    system = sys.argv[1]
    # Imported here, while the clocks are real: a library that keeps a clock from its import must not keep a virtual one
    # that stands still after its run.
    module = importlib.import_module(f"benchmarks.batching.systems.{system}")
    # A library's own objects need not be searched for garbage after each of thousands of runs.
    gc.freeze()
    options = [dict(each) for each in module.OPTIONS]
    say({"system": system, "version": getattr(module, "VERSION", ""), "options": options})
    for line in sys.stdin:
        try:
            task = json.loads(line)
            say(spend(**task) if "requests" in task else run(task))
        except Exception:
            say({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
