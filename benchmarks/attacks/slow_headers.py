"""Requests whose head never ends: a byte now and then, so that the connection is never idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.quiet import quiet_client
from benchmarks.attacks.service import Service

_CLIENTS = 300
_TIMEOUT = 5.0
_WATCHED_SECONDS = 20.0
_HEAD = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: " + b"a" * 1000


async def _drip(service: Service, until: float) -> float | None:
    """Seconds after which the service ended the connection; None: it did not."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(service.host, service.port)
    ended = asyncio.create_task(reader.read())
    try:
        for byte in _HEAD:
            if time.monotonic() >= until or ended.done():
                break
            writer.write(bytes([byte]))
            await asyncio.wait({ended}, timeout=0.5)
        return time.monotonic() - began if ended.done() else None
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
        writer.transport.abort()


async def _run(service: Service) -> Sequence[Figure]:
    logged = service.log_bytes
    until = time.monotonic() + _WATCHED_SECONDS
    async with quiet_client(service) as felt:
        held = await asyncio.gather(*(_drip(service, until) for _ in range(_CLIENTS)))
    ended = [each for each in held if each is not None]
    return [
        *felt.figures(p99_ms=500),
        Figure(f"still held after {_WATCHED_SECONDS:g} s", len(held) - len(ended), "", 0),
        Figure("longest held", max(ended, default=None), "s"),
        Figure("log", (service.log_bytes - logged) / 1e3, "kB", 20),
    ]


ATTACK = Attack(
    name="slow-headers",
    title="Slow headers",
    text=f"{_CLIENTS} clients send the head of a request at two bytes a second; `header_timeout` is {_TIMEOUT:g} s "
    "here (15 by default).",
    run=_run,
    new_flags=("--header-timeout", f"{_TIMEOUT:g}"),
)
