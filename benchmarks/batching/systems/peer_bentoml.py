"""BentoML: `CorkDispatcher`, the batcher behind `@bentoml.api(batchable=True)`.

It learns seconds as a + b * items and how long requests wait, polls every millisecond while anything waits, and
refuses requests that it expects to be answered later than `max_latency_in_ms`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any, NoReturn

from benchmarks.batching.device import Device
from benchmarks.batching.systems import Options
from benchmarks.batching.workload import Job

_CorkDispatcher: Any = importlib.import_module("bentoml._internal.marshal.dispatcher").CorkDispatcher

VERSION = version("bentoml")

# The first is the default, but for the batch size: 100 by default, more than the device holds.
OPTIONS: tuple[Options, ...] = (
    {"max_latency_in_ms": 60_000},
    {"max_latency_in_ms": 1000},
    {"max_latency_in_ms": 250},
    {"max_latency_in_ms": 100},
    {"max_latency_in_ms": 50},
)


class Refused(Exception):
    """What the service answers with 503."""


def _refuse() -> NoReturn:
    # The service's own `fallback` raises too.
    raise Refused("process is overloaded")


class Cork:
    def __init__(self, device: Device, options: Options) -> None:
        self.dispatcher: Any = _CorkDispatcher(
            max_batch_size=device.cost.max_batch_size, fallback=_refuse, get_batch_size=lambda _: 1, **options
        )
        self.ask: Any = self.dispatcher(device.compute)

    async def call(self, job: Job) -> int:
        ident: int = await self.ask(job)
        return ident

    async def close(self) -> None:
        self.dispatcher.shutdown()


def open_system(device: Device, options: Options) -> Cork:
    return Cork(device, options)
