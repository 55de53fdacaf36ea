"""Ray Serve: `@serve.batch`, without a cluster. Which version it is depends on the environment.

2.47 gathers a batch when the model is free for one. 2.60 gathers at any time, and its batches, full or not, then
stand in line before a semaphore of `max_concurrent_batches`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from benchmarks.batching.device import Cost, Device
from benchmarks.batching.systems import Options
from benchmarks.batching.workload import FIXED, Job

_serve: Any = importlib.import_module("ray.serve")  # the environment that checks types has none
_context: Any = importlib.import_module("ray.serve.context")

VERSION = version("ray")

# The first is the default, but for the batch size: 10 by default, which would waste the device. Its wait is 0 in 2.47
# and 10 ms in 2.60. `padded`: 2.60 can be given what a batch costs.
OPTIONS: tuple[Options, ...] = (
    {},
    {"batch_wait_timeout_s": 0.0},
    {"batch_wait_timeout_s": 0.005},
    {"batch_wait_timeout_s": 0.02},
    {"batch_wait_timeout_s": 0.05},
)
if "batch_size_fn" in inspect.signature(_serve.batch).parameters:
    OPTIONS += ({"batch_wait_timeout_s": 0.02, "padded": True},)

# What `serve.batch` asks of the replica that it runs in: a number to warn with, and names for its metrics.
_REPLICA = SimpleNamespace(
    _deployment_config=SimpleNamespace(max_ongoing_requests=1_000_000),
    app_name="benchmark",
    deployment="batching",
    replica_tag="0",
)


class Ray:
    def __init__(self, device: Device, options: Options) -> None:
        _context._INTERNAL_REPLICA_CONTEXT = _REPLICA  # noqa: SLF001 - where a replica's process has it
        settings = dict(options)
        size = device.cost.max_batch_size
        if settings.pop("padded", False):
            size *= FIXED
            settings["batch_size_fn"] = _Padded(device.cost)

        async def compute(jobs: list[Job]) -> list[int]:
            return await device.compute(jobs)

        self.ask: Any = _serve.batch(max_batch_size=size, **settings)(compute)

    async def call(self, job: Job) -> int:
        ident: int = await self.ask(job)
        return ident

    async def close(self) -> None:
        """It has no end but that of its event loop."""


class _Padded:
    """Padded tokens, at least 64 a request: as many as fit the device at the length of the fixed workload."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost

    def __call__(self, jobs: Sequence[Job]) -> int:
        return len(jobs) * max(FIXED, *(job.length for job in jobs))


def open_system(device: Device, options: Options) -> Ray:
    return Ray(device, options)
