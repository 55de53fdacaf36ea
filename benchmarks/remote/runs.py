"""One run, in a process of its own: `python -m benchmarks.remote.runs KIND URL IN_FLIGHT LINES`."""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.inference import Call
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.files.blobs import Blobs
from batchwright.service.limits import ServiceLimits
from batchwright.service.worker.worker import Worker, WorkerOptions
from batchwright.store import open_store
from batchwright.store.records import ENDED
from benchmarks.remote.limits import raise_descriptor_limit
from benchmarks.store.runs import ENDPOINT, input_lines

_TENANT = "default"
_LIMITS = ServiceLimits(max_lines=2**40, max_file_bytes=2**50)
_LOOK_EVERY = 0.1

Ask = Callable[[bytes, int], Awaitable[object]]
"""Gets the answer to a line of an input with this number."""


class Outcome(msgspec.Struct):
    """Result for all counted lines together, in seconds."""

    lines: int
    cpu: float
    """Processor time of this process, in user and in system mode."""
    wall: float


class _Line(msgspec.Struct):
    body: dict[str, Any]


_decode_line = msgspec.json.Decoder(_Line).decode


class _Meter:
    """What passes within its block."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        cpu, wall = _cpu_seconds(), time.perf_counter()
        yield
        self.cpu, self.wall = _cpu_seconds() - cpu, time.perf_counter() - wall


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@asynccontextmanager
async def _plain(url: str, in_flight: int) -> AsyncIterator[Ask]:
    """What someone would write who needs no retries, no limits and no record of what was done."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def ask(line: bytes, _: int) -> object:
            body = msgspec.json.encode(_decode_line(line).body)
            headers = {"content-type": "application/json"}
            async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                return msgspec.json.decode(await response.read())

        yield ask


@asynccontextmanager
async def _inference(url: str, in_flight: int) -> AsyncIterator[Ask]:
    endpoint = EndpointInference(url, max_concurrency=in_flight)
    await endpoint.discover()

    async def ask(line: bytes, number: int) -> object:
        return await endpoint.answer(Call(ENDPOINT, _decode_line(line).body, f"req_{number}", "batch"))

    try:
        yield ask
    finally:
        await endpoint.close()


async def _through(ask: Ask, in_flight: int, lines: int) -> Outcome:
    """As many tasks, each of which takes a line after the other; the lines that open the connections do not count."""
    meter = _Meter()

    async def work(numbered: Iterator[tuple[int, bytes]]) -> None:
        for number, line in numbered:
            await ask(line, number)

    every = enumerate(input_lines(in_flight + lines))
    await asyncio.gather(*(work(islice(every, 1)) for _ in range(in_flight)))
    with meter.running():
        await asyncio.gather(*(work(every) for _ in range(in_flight)))
    return Outcome(lines, meter.cpu, meter.wall)


async def plain(url: str, in_flight: int, lines: int) -> Outcome:
    """A loop around aiohttp."""
    async with _plain(url, in_flight) as ask:
        return await _through(ask, in_flight, lines)


async def inference(url: str, in_flight: int, lines: int) -> Outcome:
    """`EndpointInference`, as the service has it."""
    async with _inference(url, in_flight) as ask:
        return await _through(ask, in_flight, lines)


async def worker(url: str, in_flight: int, lines: int) -> Outcome:
    """A batch on SQLite, from its creation until its output file is there: validated, computed, committed."""
    meter = _Meter()
    endpoint = EndpointInference(url, max_concurrency=in_flight)
    await endpoint.discover()
    with tempfile.TemporaryDirectory(prefix="batchwright-endpoint-") as folder:
        async with open_store(Path(folder) / "batches.db") as database:
            blobs = Blobs(Path(folder) / "files")
            computing = Worker(database, blobs, endpoint, options=WorkerOptions(limits=_LIMITS))
            jobs = BatchService(database, blobs, limits=_LIMITS, on_work=computing.wake)
            uploaded = await jobs.upload(_TENANT, "input.jsonl", _pieces(lines))
            async with computing:
                with meter.running():
                    batch = await jobs.create_batch(_TENANT, input_file_id=uploaded.id, endpoint=ENDPOINT)
                    while batch.status not in ENDED:
                        await asyncio.sleep(_LOOK_EVERY)
                        batch = await jobs.batch(_TENANT, batch.id)
    await endpoint.close()
    if batch.counts.completed != lines:
        raise RuntimeError(f"the batch did not come out right: {batch}")
    return Outcome(lines, meter.cpu, meter.wall)


async def _pieces(lines: int) -> AsyncIterator[bytes]:
    for line in input_lines(lines):
        yield line


KINDS: dict[str, Callable[[str, int, int], Awaitable[Outcome]]] = {
    "plain": plain,
    "inference": inference,
    "worker": worker,
}


def main(arguments: Sequence[str]) -> None:
    kind, url, in_flight, lines = arguments
    raise_descriptor_limit()

    async def run() -> Outcome:
        return await KINDS[kind](url, int(in_flight), int(lines))

    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run())))


if __name__ == "__main__":
    main(sys.argv[1:])
