"""The load generator, a separate process: requests at their times over kept-alive connections, whatever comes back.

    python -m benchmarks.batching.http.load '{"port": 8100, "wire": "predict", ...}'

It prints one line of JSON, a `Load`. A latency counts from the time a request was due, not from when it was sent; `lag`
is the difference between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypedDict

from benchmarks.batching.device import Cost
from benchmarks.batching.http.servers import HOST
from benchmarks.batching.http.systems import WIRES, Wire
from benchmarks.batching.workload import Job, Workload, draw

PATIENCE = 10
"""Multiple of its SLO for which a request is waited for."""
_OPEN = 32
"""Connections that are open when the first request is due."""
_HEAD_START = 0.05
"""Seconds until then."""


class Plan(TypedDict):
    """What to send. `cost` and `workload` hold the fields of `Cost` and `Workload`."""

    port: int
    wire: str
    cost: dict[str, Any]
    workload: dict[str, Any]
    rate: float
    count: int
    seed: int


class Load(TypedDict):
    """Results of a plan. Requests whose caller left are not included."""

    latencies: list[float | None]
    """Seconds from the time due to the correct answer; None if there was none."""
    in_time: float
    """The share answered correctly within the SLO."""
    errors: dict[str, int]
    """`refused` (status 429, 503), `failed` (another error), `wrong` (another's answer, or one to a poisoned request),
    `late` (no answer within `PATIENCE` times the SLO), `broken` (the connection)."""
    lag: list[float]
    """Seconds between the time due and the sending: 99% within the first, all within the second."""
    cpu: float
    """The generator's share of its core."""


class _Connection:
    """One request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, message: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self.writer.write(message)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        _, found, rest = head.partition(b"\r\ncontent-length:")
        if not found:
            raise ConnectionError("an answer without Content-Length, which no server here should send")
        return int(head[9:12]), await self.reader.readexactly(int(rest.partition(b"\r\n")[0]))


class Generator:
    """Sends jobs to one server."""

    def __init__(self, port: int, wire: Wire) -> None:
        self.port = port
        self.wire = wire
        self.errors: Counter[str] = Counter()
        self._idle: list[_Connection] = []

    async def send(self, jobs: Sequence[Job]) -> tuple[list[float], list[float]]:
        """Seconds from the time due to the right answer (infinite for none), and to the sending, of each."""
        loop = asyncio.get_running_loop()
        self._idle = [await self._connect() for _ in range(min(_OPEN, len(jobs)))]
        messages = [self._message(job) for job in jobs]
        latencies, lags = [math.inf] * len(jobs), [0.0] * len(jobs)
        start = loop.time() + _HEAD_START

        async def ask(place: int, job: Job) -> None:
            due = start + job.at
            lags[place] = loop.time() - due
            trouble = await self._trouble(job, messages[place], due + PATIENCE * job.limit)
            if trouble is None:
                latencies[place] = loop.time() - due
            elif job.leaves_after is None:
                self.errors[trouble] += 1

        async with asyncio.TaskGroup() as group:
            for place, job in enumerate(jobs):
                await asyncio.sleep(start + job.at - loop.time())
                task = group.create_task(ask(place, job))
                if job.leaves_after is not None:
                    loop.call_at(start + job.at + job.leaves_after, task.cancel)
        for connection in self._idle:
            connection.writer.close()
        return latencies, lags

    async def _trouble(self, job: Job, message: bytes, until: float) -> str | None:
        """What went wrong, a key of `Load.errors`; None for the right answer."""
        try:
            async with asyncio.timeout_at(until):
                status, body = await self._ask(message)
        except TimeoutError:
            return "late"
        except (OSError, EOFError, ValueError):
            return "broken"
        if status == 200:
            right = not job.poison and self.wire.decode(body) == job.ident
            return None if right else "wrong"
        if job.poison:
            return None
        return "refused" if status in (429, 503) else "failed"

    async def _ask(self, message: bytes) -> tuple[int, bytes]:
        connection = self._idle.pop() if self._idle else await self._connect()
        status = None
        try:
            status, body = await connection.ask(message)
        finally:
            # Some servers close the connection silently after an error.
            if status == 200:
                self._idle.append(connection)
            else:
                connection.writer.close()
        return status, body

    async def _connect(self) -> _Connection:
        return _Connection(*await asyncio.open_connection(HOST, self.port))

    def _message(self, job: Job) -> bytes:
        body = self.wire.encode(job)
        head = f"POST {self.wire.path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def generate(plan: Plan) -> Load:
    """Send the requests of `plan`, and wait for all answers."""
    cost = Cost(**plan["cost"])
    jobs = draw(Workload(**plan["workload"]), plan["count"], plan["rate"], plan["seed"], cost.alone)
    generator = Generator(plan["port"], WIRES[plan["wire"]])
    gc.disable()
    wall, cpu = time.perf_counter(), time.process_time()
    latencies, lags = asyncio.run(generator.send(jobs))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    kept = [(latency, job) for latency, job in zip(latencies, jobs, strict=True) if job.leaves_after is None]
    return {
        "latencies": [latency if latency < math.inf else None for latency, _ in kept],
        "in_time": sum(latency <= job.limit for latency, job in kept) / len(kept),
        "errors": dict(generator.errors),
        "lag": [sorted(lags)[math.ceil(0.99 * len(lags)) - 1], max(lags)],
        "cpu": cpu / wall,
    }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        print(json.dumps(generate(json.loads(sys.argv[1]))))
