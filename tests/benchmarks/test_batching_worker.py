"""The worker that measures one system: what it says, and that a run in virtual time can be repeated exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.batching.worker import quantiles

ROOT = Path(__file__).resolve().parents[2]
RUN: dict[str, Any] = {
    "system": "greedy",
    "options": {},
    "cost": {"alpha": 0.01, "beta": 2e-5},
    "workload": {"lengths": "lognormal", "urgent": 0.2, "faults": True},
    "rate": 50.0,
    "count": 200,
    "seed": 1,
    "trace": None,
    "virtual": True,
}


def test_quantiles() -> None:
    assert quantiles([4.0, 1.0, 3.0, 2.0]) == {"0.5": 2.0, "0.9": 4.0, "0.99": 4.0, "1": 4.0}
    assert quantiles([1.0, float("inf")]) == {"0.5": 1.0, "0.9": None, "0.99": None, "1": None}
    assert quantiles([]) == {}


def test_a_worker_answers_every_line() -> None:
    lines = [json.dumps(run) for run in (RUN, RUN | {"cost": {"alpha": 1}}, RUN)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.batching.worker", "greedy"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        check=True,
    )
    ready, first, bad, again = map(json.loads, done.stdout.splitlines())
    assert ready == {"system": "greedy", "version": "", "options": [{}]}
    assert "beta" in bad["error"]
    first.pop("cpu")
    again.pop("cpu")
    assert first == again
    assert 0.9 < first["in_time"] <= first["answered"] <= 1
    assert first["urgent"]["0.5"] is not None
