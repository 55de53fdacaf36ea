"""A client that behaves, beside the attack: what it feels is what the attack does to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from benchmarks.attacks.attack import Figure
from benchmarks.attacks.service import Service

_PATIENCE = 2.0
"""Seconds: as a health check waits."""


@dataclass(slots=True)
class Felt:
    """What the quiet client saw."""

    answered_ms: list[float] = field(default_factory=list)
    failed: int = 0
    """Refused, cut, or not answered within two seconds."""

    def percentile(self, q: float) -> float | None:
        """Of the milliseconds to an answer; None when none came."""
        ordered = sorted(self.answered_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))] if ordered else None

    def figures(self, *, p99_ms: float | None = None) -> list[Figure]:
        """The latencies of /health, and how often it was not answered; the latter must never happen."""
        return [
            Figure("`/health` for others, p50", self.percentile(50), "ms"),
            Figure("p99", self.percentile(99), "ms", p99_ms),
            Figure("longest", max(self.answered_ms, default=None), "ms"),
            Figure("not answered", self.failed, "", 0),
        ]


async def ask(service: Service, path: str = "/health") -> float:
    """Seconds to a 200 over a connection of its own. Raises OSError, also for another answer."""
    began = time.perf_counter()
    async with asyncio.timeout(_PATIENCE):
        reader, writer = await asyncio.open_connection(service.host, service.port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {service.host}\r\nconnection: close\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.transport.abort()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(f"answered with {answer[:30]!r}")
    return time.perf_counter() - began


@asynccontextmanager
async def quiet_client(service: Service, *, every: float = 0.1) -> AsyncIterator[Felt]:
    """Ask for /health ten times a second for as long as the block lasts."""
    felt, over = Felt(), asyncio.Event()

    async def asking() -> None:
        while not over.is_set():
            try:
                felt.answered_ms.append(await ask(service) * 1e3)
            except OSError:  # of which TimeoutError is one
                felt.failed += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), every)

    task = asyncio.create_task(asking())
    try:
        yield felt
    finally:
        # The last request is waited for: one that hangs must count.
        over.set()
        await task
