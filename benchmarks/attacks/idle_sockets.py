"""More sockets than the service has descriptors, all of them silent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.quiet import quiet_client
from benchmarks.attacks.service import Service

_SOCKETS = 1100
_HELD_SECONDS = 10.0


async def _run(service: Service) -> Sequence[Figure]:
    memory, logged, processor = service.memory, service.log_bytes, service.processor_seconds
    with ExitStack() as opened:
        for _ in range(_SOCKETS):
            opened.enter_context(socket.create_connection((service.host, service.port), timeout=5))
            await asyncio.sleep(0)
        async with quiet_client(service) as felt:
            await asyncio.sleep(_HELD_SECONDS)
    return [
        *felt.figures(p99_ms=1000),
        Figure("log", (service.log_bytes - logged) / 1e3, "kB", 20),
        Figure("memory", (service.memory - memory) / 1e6, "MB", 50),
        Figure("processor", service.processor_seconds - processor, "s"),
    ]


ATTACK = Attack(
    name="idle-sockets",
    title="Idle sockets",
    text=f"{_SOCKETS:,} connections that send nothing, to a service with 1,024 descriptors, held for "
    f"{_HELD_SECONDS:g} s. Memory and log are what the attack added.",
    run=_run,
    descriptors=1024,
)
