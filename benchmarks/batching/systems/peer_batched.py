"""`batched` (mixedbread): `batched.aio.dynamically`.

It sleeps `timeout_ms` whenever less than a batch waits, then takes all that waits, in order, cut into batches.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from benchmarks.batching.device import Device
from benchmarks.batching.systems import Options
from benchmarks.batching.workload import Job

_aio: Any = importlib.import_module("batched.aio")  # the environment that checks types has none
_Item: Any = importlib.import_module("batched.aio.batch_processor").AsyncBatchItem

VERSION = version("batched")

# The first is the default; 32, the batch size of the device, is its default too. `timeout_ms=0` is left out: with an
# empty queue it calls sleep(0) forever, which takes a whole core in real time and stops the clock in virtual time.
OPTIONS: tuple[Options, ...] = (
    {"timeout_ms": 5.0},
    {"timeout_ms": 1.0},
    {"timeout_ms": 20.0},
    {"timeout_ms": 5.0, "max_batch_length": 2048},
    {"timeout_ms": 1.0, "max_batch_length": 2048},
)


class _Sized(_Item):  # type: ignore[misc]
    """How the library is given lengths: `max_batch_length` limits the sum of them in a batch."""

    def __len__(self) -> int:
        length: int = self.content.length
        return length


class Batched:
    def __init__(self, device: Device, options: Options) -> None:
        size = device.cost.max_batch_size
        self.ask: Any = _aio.dynamically(device.compute, batch_size=size, batch_item_cls=_Sized, **options)

    async def call(self, job: Job) -> int:
        ident: int = await self.ask(job)
        return ident

    async def close(self) -> None:
        """It has no end but that of its event loop."""


def open_system(device: Device, options: Options) -> Batched:
    return Batched(device, options)
