"""What goes wrong, one at a time, and what online requests may suffer from each."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from tests.crash.load import eventually
from tests.crash.models import Model
from tests.crash.outside import Outside, Trouble
from tests.crash.service import Service
from tests.forked import Command
from tests.postgres import PostgresServer
from tests.soak.hostile import Burst
from tests.soak.timeline import BROKEN, ERROR_EVENT, REFUSED

_AWAY = 2.0
"""Seconds at most from the end of a process to the start of the next one."""
_DATABASE_AWAY = 3.0
_SMALL = 4096
"""Bytes that a file may have when the disk is full."""
_GONE = frozenset({REFUSED, BROKEN})
"""The process that was asked is not there any more."""
_STOPPING = _GONE | {"503", ERROR_EVENT}
_WITHOUT_MODEL = frozenset({"429", "502", "503", "504", ERROR_EVENT})
_CROWDED = frozenset({"429", "503"})
_NONE: frozenset[str] = frozenset()


@dataclass
class World:
    """Everything that a fault may be done to."""

    service: Service
    model: Model
    receiver: Outside
    """Of webhooks."""
    endpoint: Outside | None
    """What computes; None: the engine of the service."""
    postgres: PostgresServer | None
    keys: list[str]
    flags: list[str]
    """Of the service, for other processes with the same store."""
    seconds: float
    """How long a fault lasts that has no end of its own."""
    lease: float
    draw: random.Random
    expected_down: bool = False
    """Whether a fault has stopped the service and not started it again yet."""

    async def start(self) -> None:
        self.service.start()
        await self.service.ready()
        self.expected_down = False


@dataclass(frozen=True)
class Fault:
    name: str
    strike: Callable[[World], Awaitable[None]]
    """Returns when the cause is gone. Raises `AssertionError` when the service does not bear it."""
    allowed: frozenset[str] = _NONE
    """Outcomes of online requests meanwhile; see `timeline`."""
    ends_process: bool = False
    """Whether another process serves after it."""


def faults_for(world: World) -> list[Fault]:
    """Those that are possible in this world."""
    faults = [
        Fault("SIGKILL", _kill, _GONE, ends_process=True),
        Fault("SIGTERM", _terminate, _STOPPING, ends_process=True),
        Fault("second worker stopped", _stop_worker),
        Fault("service stopped", _stop_service),
        Fault("disk full", _fill_disk),
        Fault("webhook receiver down", _receiver_down),
        Fault("hostile clients", _hostile, _CROWDED),
    ]
    if world.endpoint is not None:
        faults += [
            Fault("endpoint answers 500", _trouble("500"), _WITHOUT_MODEL),
            Fault("endpoint answers 429", _trouble("429"), _WITHOUT_MODEL),
            Fault("endpoint hangs", _trouble("hanging"), _WITHOUT_MODEL),
            Fault("endpoint down", _endpoint_down, _WITHOUT_MODEL),
        ]
    if world.postgres is not None:
        faults.append(Fault("PostgreSQL crashes", _crash_database))
    return faults


def in_order(faults: list[Fault], count: int, draw: random.Random) -> Iterator[Fault]:
    """All of them in random order, then all in another order, until there are `count`.

    In the second half, once each was there, only those that a process survives: what grows slowly is seen in one that
    lives for long.
    """
    first = min(count, max(count - count // 2, len(faults)))
    yield from islice(_rounds(faults, draw), first)
    yield from islice(_rounds([each for each in faults if not each.ends_process] or faults, draw), count - first)


def _rounds(faults: list[Fault], draw: random.Random) -> Iterator[Fault]:
    while True:
        yield from draw.sample(faults, len(faults))


async def _kill(world: World) -> None:
    world.expected_down = True
    world.service.kill()
    await asyncio.sleep(world.draw.uniform(0.0, _AWAY))
    await world.start()


async def _terminate(world: World) -> None:
    world.expected_down = True
    status = await world.service.stop()
    assert status == 0, f"status {status} after SIGTERM:\n{world.service.tail()}"
    await world.start()


async def _stop_worker(world: World) -> None:
    async with _second_worker(world) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5 * world.lease)
        os.kill(worker.pid, signal.SIGCONT)
        await asyncio.sleep(world.lease / 2)


async def _stop_service(world: World) -> None:
    """The other worker goes on with its lines; its clients wait."""
    async with _second_worker(world):
        os.kill(world.service.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5 * world.lease)
        os.kill(world.service.pid, signal.SIGCONT)
        await asyncio.sleep(world.lease / 2)


@asynccontextmanager
async def _second_worker(world: World) -> AsyncIterator[Command]:
    """Works while the context lasts, and must then end well."""
    before = world.service.log.stat().st_size
    worker = world.service.worker(*world.flags)

    def works() -> bool:
        assert worker.poll() is None, f"the second worker ended:\n{world.service.tail()}"
        with world.service.log.open("rb") as log:
            log.seek(before)
            return b"working on batches" in log.read()

    try:
        await eventually(works)
        yield worker
        worker.terminate()
        status = await asyncio.to_thread(worker.wait, 60)
        assert status == 0, f"status {status} of the second worker after SIGTERM:\n{world.service.tail()}"
    finally:
        worker.kill()
        worker.wait()


async def _fill_disk(world: World) -> None:
    _, hard = resource.prlimit(world.service.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(world.service.pid, resource.RLIMIT_FSIZE, (_SMALL, hard))
    try:
        await asyncio.sleep(world.seconds)
    finally:
        resource.prlimit(world.service.pid, resource.RLIMIT_FSIZE, (hard, hard))


async def _receiver_down(world: World) -> None:
    await world.receiver.stop()
    await asyncio.sleep(world.seconds)
    await world.receiver.start()


async def _hostile(world: World) -> None:
    burst = Burst(world.service.port, world.draw.choice(world.keys), world.model)
    await burst.run(world.seconds)
    assert not burst.wrong, burst.wrong


def _trouble(kind: Trouble) -> Callable[[World], Awaitable[None]]:
    async def strike(world: World) -> None:
        endpoint = _endpoint(world)
        endpoint.trouble = kind
        await asyncio.sleep(world.seconds)
        endpoint.trouble = None

    return strike


async def _endpoint_down(world: World) -> None:
    endpoint = _endpoint(world)
    await endpoint.stop()
    await asyncio.sleep(world.seconds)
    await endpoint.start()


def _endpoint(world: World) -> Outside:
    if world.endpoint is None:
        raise ValueError("the engine of the service computes: there is no endpoint")
    return world.endpoint


async def _crash_database(world: World) -> None:
    if world.postgres is None:
        raise ValueError("the database is not PostgreSQL")
    await asyncio.to_thread(world.postgres.stop, "immediate")
    await asyncio.sleep(world.draw.uniform(0.0, _DATABASE_AWAY))
    await asyncio.to_thread(world.postgres.start)
