"""Bodies in chunks of one byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.quiet import quiet_client
from benchmarks.attacks.service import Service

_BYTES = 16 * 2**20
_CLIENTS = 4
_SECONDS = 20.0
_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_PIECE = b"1\r\n \r\n" * 4096


async def _send(service: Service, until: float) -> int:
    """Bytes of the body that were accepted before the service ended the connection, or the time was over."""
    _, writer = await asyncio.open_connection(service.host, service.port)
    sent = 0
    try:
        writer.write(_HEAD)
        while sent < _BYTES and time.monotonic() < until:
            writer.write(_PIECE)
            await asyncio.wait_for(writer.drain(), max(0.01, until - time.monotonic()))
            sent += _PIECE.count(b" ")
    except OSError:
        pass
    finally:
        writer.transport.abort()
    return sent


async def _run(service: Service) -> Sequence[Figure]:
    processor, memory = service.processor_seconds, service.memory
    until = time.monotonic() + _SECONDS
    async with quiet_client(service) as felt:
        sent = await asyncio.gather(*(_send(service, until) for _ in range(_CLIENTS)))
        # The quiet client should see all of it, even if the attack was over immediately.
        await asyncio.sleep(3.0)
    used = service.processor_seconds - processor
    return [
        *felt.figures(p99_ms=250),
        Figure("bytes of the bodies that were taken", sum(sent) / 1e6, "MB"),
        Figure("processor", used, "s", 3),
        Figure("memory", (service.memory - memory) / 1e6, "MB", 50),
    ]


ATTACK = Attack(
    name="one-byte-chunks",
    title="One-byte chunks",
    text=f"{_CLIENTS} clients send a body of {_BYTES >> 20} MiB in chunks of one byte, for at most {_SECONDS:g} s.",
    run=_run,
)
