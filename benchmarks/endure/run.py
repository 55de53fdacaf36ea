"""One run: the service on its cores, the clients, the batch, and what is seen of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from tests.crash.service import Service

from benchmarks.endure.batch import Batches, BatchFigures
from benchmarks.endure.beside import beside
from benchmarks.endure.clients import Crowd, Reply
from benchmarks.endure.cores import Cores
from benchmarks.endure.probe import HealthProbe, Probed
from benchmarks.endure.watch import Sample, look

_SEED = "2026"
_KV_MEMORY = "1GiB"
"""Memory is taken as it is used: a cache no larger than needed is full before the window, and shows no growth in it."""
_ROUNDS = 2
"""Answers to each client, on average, that suffice to show the capacity."""
_SAMPLED_EVERY = 1.0
_END = 3600.0
"""Seconds that the last batch may take beyond the window."""


@dataclass(frozen=True)
class Setting:
    """What is run. Times in seconds."""

    clients: int
    lines: int
    seconds: float
    """Length of the window in which things are measured."""
    ramp: float
    """Time of the same load before it."""
    calibration: float
    """Longest time in which all clients first send requests without pauses."""
    share: float
    """Share of the rate found then at which they send requests later."""


@dataclass
class Endured:
    """Results of a run."""

    setting: Setting
    cores: Cores
    capacity: float = 0.0
    """Requests per second that were answered without pauses."""
    thinking: float = 0.0
    """Mean seconds of a pause."""
    window: tuple[float, float] = (0.0, 0.0)
    """From and to, by `time.monotonic`."""
    replies: list[Reply] = field(default_factory=list)
    """Replies that ended in the window."""
    earlier_errors: list[str] = field(default_factory=list)
    """Errors of requests that ended before it."""
    probed: list[Probed] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    stolen: list[tuple[float, float]] = field(default_factory=list)
    """When, by `time.monotonic`, and how many processor seconds the host of this machine had kept from it until then:
    0 where it has none, or does not say.
    """
    loop_share: float = 0.0
    """Share of a core that the thread of the event loop took in the window."""
    service_share: float = 0.0
    """Share of a core that all threads of the service took."""
    generator_share: float = 0.0
    batch_lines: int = 0
    """Lines that were committed in the window."""
    batch: BatchFigures = field(default_factory=BatchFigures)

    @property
    def errors(self) -> list[str]:
        """Errors of all requests and batches."""
        found = [*self.earlier_errors, *(each.error for each in self.replies if each.error is not None)]
        return found if self.batch.problem is None else [*found, self.batch.problem]


async def endure(setting: Setting, cores: Cores, folder: Path, say: Callable[[str], None]) -> Endured:
    """Run it, with data and log in `folder`. Raises what a service that does not live raises."""
    cores.take_generator()
    data = folder / "data"
    data.mkdir(parents=True)
    service = Service(data, str(data / "batchwright.db"), "engine", ["--kv-memory", _KV_MEMORY])
    environment = {"OMP_NUM_THREADS": str(len(cores.engine))}
    service.start(environment, before=lambda: os.sched_setaffinity(0, cores.engine))
    try:
        await service.ready()
        cores.move_event_loop(service.pid)
        found = Endured(setting, cores)
        await _calibrate(found, service, say)
        await _measure(found, service, folder, say)
        await service.stop()
        return found
    finally:
        service.kill()


async def _calibrate(found: Endured, service: Service, say: Callable[[str], None]) -> None:
    setting = found.setting
    crowd = Crowd(service.url, setting.clients, f"{_SEED}/calibration")
    began = time.monotonic()
    # What is under way at the end is abandoned: the service must notice that too.
    async with beside(crowd.run(0.0)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(setting.calibration):
                await crowd.answered(_ROUNDS * setting.clients)
        found.capacity = len(crowd.replies) / (time.monotonic() - began)
    if not found.capacity:
        raise RuntimeError(f"no request was answered in {setting.calibration:g} s: calibrate for longer")
    found.thinking = setting.clients / (setting.share * found.capacity)
    found.earlier_errors += [each.error for each in crowd.replies if each.error is not None]
    say(f"{found.capacity:.1f} requests/s at most; mean pause of a client {found.thinking:.1f} s")


async def _measure(found: Endured, service: Service, folder: Path, say: Callable[[str], None]) -> None:
    setting = found.setting
    crowd = Crowd(service.url, setting.clients, f"{_SEED}/online")
    batches = Batches(service.url, setting.lines, f"{_SEED}/lines")
    with HealthProbe(service.port, folder / "health.jsonl", found.cores.generator) as probe:
        async with beside(_sample(found, service)), asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            group.create_task(batches.run())
            async with beside(crowd.run(found.thinking)):
                await asyncio.sleep(setting.ramp)
                await _window(found, service)
            batches.finish()
            limit.reschedule(asyncio.get_running_loop().time() + _END)
            say("the clients have gone; the batch comes to its end")
        found.probed = [each for each in probe.read() if _inside(found, each.at)]
    found.replies = [each for each in crowd.replies if _inside(found, each.ended)]
    found.earlier_errors += [
        each.error for each in crowd.replies if each.error is not None and each.ended < found.window[0]
    ]
    found.samples = [each for each in found.samples if _inside(found, each.at)]
    found.stolen = [(at, seconds) for at, seconds in found.stolen if _inside(found, at)]
    found.batch = batches.figures


def _inside(found: Endured, at: float) -> bool:
    began, ended = found.window
    return began <= at < ended


async def _window(found: Endured, service: Service) -> None:
    process, ours = psutil.Process(service.pid), psutil.Process()
    began, before = time.monotonic(), _spent(process, ours)
    lines = await _lines(service)
    await asyncio.sleep(found.setting.seconds)
    ended, after = time.monotonic(), _spent(process, ours)
    found.batch_lines = await _lines(service) - lines
    found.window = began, ended
    shares = [(late - early) / (ended - began) for early, late in zip(before, after, strict=True)]
    found.loop_share, found.service_share, found.generator_share = shares


def _spent(service: psutil.Process, ours: psutil.Process) -> tuple[float, float, float]:
    """Processor seconds of the service's main thread, of all of the service, and of this process."""
    (loop,) = [each for each in service.threads() if each.id == service.pid]
    whole, own = service.cpu_times(), ours.cpu_times()
    return loop.user_time + loop.system_time, whole.user + whole.system, own.user + own.system


async def _lines(service: Service) -> int:
    """Lines of batches that were committed, as the service's metrics say."""
    async with httpx.AsyncClient(timeout=60) as client:
        metrics = (await client.get(f"{service.url}/metrics")).text
    counted = [line for line in metrics.splitlines() if line.startswith("batchwright_worker_lines_total{")]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in counted if 'outcome="succeeded"' in line))


async def _sample(found: Endured, service: Service) -> None:
    while True:
        sample = look(service.pid)
        if sample is not None:
            found.samples.append(sample)
        found.stolen.append((time.monotonic(), getattr(psutil.cpu_times(), "steal", 0.0)))
        await asyncio.sleep(_SAMPLED_EVERY)
