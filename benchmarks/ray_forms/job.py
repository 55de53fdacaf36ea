"""What a process computes and measures; it runs in environments that have Ray and one engine, and little else."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import ray
import ray.data

Rows: TypeAlias = Sequence[Mapping[str, Any]]
_OBJECTS = 200 * 2**20
"""Bytes of Ray's object store."""
_CPUS = 4
"""Processors that Ray schedules on: two for the engine, and others for short tasks."""


class Job(TypedDict):
    """Rows with prompts, each of which gets an answer of the same length."""

    rows: str
    """File with one JSON object per line."""
    model: str
    tokens: int
    cores: int
    batch_size: int
    batches: int
    """Batches that an actor computes at once."""
    stamp: str
    """File in which the actor notes when the first batch arrived."""


def note_start(stamp: str) -> None:
    """Note that a batch has arrived, if it is the first one."""
    path = Path(stamp)
    if not path.exists():
        path.write_text(str(time.time()))


def serve(answer: Callable[[Job, ray.data.Dataset], ray.data.Dataset], column: str) -> None:
    """Compute the job on standard input and print seconds from the first batch in an actor to the last row here."""
    job: Job = json.loads(sys.stdin.read())
    # By default Ray's processes give way to all others, and `run` does not.
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"})
    ray.init("local", num_cpus=_CPUS, object_store_memory=_OBJECTS, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    with Path(job["rows"]).open() as file:
        rows = [json.loads(line) for line in file]
    # As many small blocks as there are batches.
    dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // job["batch_size"]))
    made: Rows = answer(job, dataset).take_all()
    seconds = time.time() - float(Path(job["stamp"]).read_text())
    if len(made) != len(rows) or not all(isinstance(row[column], str) for row in made):
        raise SystemExit(f"{len(made)} rows of {len(rows)} came back, or some without an answer")
    print(json.dumps({"seconds": seconds, "ray": ray.__version__}))
    ray.shutdown()
