"""A thousand dashboards at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.quiet import quiet_client
from benchmarks.attacks.service import Service

_STREAMS = 1000
_SECONDS = 10.0


async def _watch(service: Service, statuses: Counter[bytes], begun: asyncio.Event) -> int:
    """Bytes received until cancelled."""
    reader, writer = await asyncio.open_connection(service.host, service.port)
    received = 0
    try:
        await begun.wait()
        writer.write(b"GET /dashboard/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        statuses[head[9:12]] += 1
        while piece := await reader.read(65_536):
            received += len(piece)
    except (OSError, asyncio.IncompleteReadError):
        statuses[b"cut"] += 1
    except asyncio.CancelledError:
        pass
    finally:
        writer.transport.abort()
    return received


async def _run(service: Service) -> Sequence[Figure]:
    statuses, begun = Counter[bytes](), asyncio.Event()
    memory = service.memory
    tasks = [asyncio.create_task(_watch(service, statuses, begun)) for _ in range(_STREAMS)]
    await asyncio.sleep(2.0)
    begun.set()
    await asyncio.sleep(1.0)
    processor = service.processor_seconds
    async with quiet_client(service) as felt:
        await asyncio.sleep(_SECONDS)
    used = service.processor_seconds - processor
    for task in tasks:
        task.cancel()
    received = await asyncio.gather(*tasks)
    return [
        *felt.figures(p99_ms=250),
        Figure("streams that were served", statuses[b"200"]),
        Figure("refused with 429", statuses[b"429"]),
        Figure("sent to all", sum(received) / 1e6, "MB"),
        Figure("processor a second", used / _SECONDS, "s", 0.5),
        Figure("memory", (service.memory - memory) / 1e6, "MB", 100),
    ]


ATTACK = Attack(
    name="page-streams",
    title="A thousand page streams",
    text=f"{_STREAMS:,} streams of the dashboard's state are asked for by one tenant and read for {_SECONDS:g} s.",
    run=_run,
)
