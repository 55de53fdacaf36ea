"""A well-behaved client beside the attack: it shows what the attack does to others."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field

from benchmarks.attacks.attack import Figure
from benchmarks.attacks.service import ROOT, Service

_PATIENCE = 2.0
"""Seconds that a health check waits."""


@dataclass(slots=True)
class Felt:
    """What the quiet client observed."""

    answered_ms: list[float] = field(default_factory=list)
    failed: int = 0
    """Requests that were refused, cut, or not answered within two seconds."""

    def percentile(self, q: float) -> float | None:
        """Percentile of the milliseconds to an answer; None if there was none."""
        ordered = sorted(self.answered_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))] if ordered else None

    def figures(self, *, p99_ms: float | None = None) -> list[Figure]:
        """The latencies of /health, and how often it was not answered, which must never happen."""
        return [
            Figure("`/health` for others, p50", self.percentile(50), "ms"),
            Figure("p99", self.percentile(99), "ms", p99_ms),
            Figure("longest", max(self.answered_ms, default=None), "ms"),
            Figure("not answered", self.failed, "", 0),
        ]


async def ask(service: Service, path: str = "/health") -> float:
    """Seconds to a 200 over a new connection. Raises OSError, also for any other answer."""
    return await _ask(service.host, service.port, path)


async def _ask(host: str, port: int, path: str) -> float:
    began = time.perf_counter()
    async with asyncio.timeout(_PATIENCE):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.transport.abort()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(f"answered with {answer[:30]!r}")
    return time.perf_counter() - began


@asynccontextmanager
async def quiet_client(service: Service, *, every: float = 0.1) -> AsyncIterator[Felt]:
    """Request /health ten times a second for as long as the block lasts; the results are known after it.

    It is a separate process; otherwise it would feel what the attack costs the attacker.
    """
    felt = Felt()
    command = [sys.executable, "-m", "benchmarks.attacks.quiet", service.host, str(service.port), str(every)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()  # it has begun
    try:
        yield felt
    finally:
        process.stdin.close()
        figures = json.loads(await process.stdout.read())
        await process.wait()
        felt.answered_ms, felt.failed = figures["answered_ms"], figures["failed"]


async def _ask_until_closed(host: str, port: int, every: float) -> Felt:
    """Send requests until standard input ends."""
    felt, over = Felt(), asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, over.set)
    print("begun", flush=True)
    while not over.is_set():
        try:
            felt.answered_ms.append(await _ask(host, port, "/health") * 1e3)
        except OSError:  # includes TimeoutError
            felt.failed += 1
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), every)
    # Wait for the last request: one that hangs counts.
    return felt


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(_ask_until_closed(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))))
