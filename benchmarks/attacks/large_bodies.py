"""Bodies as large as the service accepts, of texts or only of brackets, several at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import httpx

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.quiet import quiet_client
from benchmarks.attacks.service import Service

_BYTES = 15_000_000
_AT_ONCE = 4
_SECONDS = 20.0
_JSON = {"content-type": "application/json"}
_PROMPT = b'"' + b"word " * 3000 + b'"'
_BODIES = {
    "/v1/batch/async": b'{"prompts": [' + b", ".join([_PROMPT] * 990) + b"]}",
    "/v1/batch/sync": b'{"prompts": ' + b"[" * _BYTES,
    "/v1/batch/sync?lists": b'{"prompts": [' + b"[]," * (_BYTES // 3) + b"0]}",
    "/v1/batch/sync?numbers": b'{"prompts": [' + b"1000," * (_BYTES // 5) + b"0]}",
    "/v1/batch/async?fields": b"{" + b",".join(b'"%07d":0' % place for place in range(_BYTES // 12)) + b"}",
    "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "' + b"word " * 800_000 + b'"}]}',
}


async def _run(service: Service) -> Sequence[Figure]:
    before, peak, statuses = service.memory, service.memory, Counter[int]()
    limits = httpx.Limits(max_connections=_AT_ONCE)
    async with httpx.AsyncClient(base_url=service.url, headers=_JSON, limits=limits, timeout=120) as client:

        async def send() -> None:
            while True:
                for path, body in _BODIES.items():
                    statuses[(await client.post(path, content=body)).status_code] += 1

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, service.memory)
                await asyncio.sleep(0.05)

        async with quiet_client(service) as felt:
            tasks = [asyncio.create_task(each) for each in (watch(), *(send() for _ in range(_AT_ONCE)))]
            await asyncio.wait(tasks, timeout=_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            failed = [
                each for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, Exception)
            ]
    if failed:
        raise failed[0]
    await asyncio.sleep(2)
    return [
        *felt.figures(p99_ms=100),
        Figure("bodies", statuses.total()),
        *(Figure(f"answered {status}", count) for status, count in sorted(statuses.items())),
        Figure("memory at most", (peak - before) / 1e6, "MB", 400),
        Figure("memory afterwards", (service.memory - before) / 1e6, "MB"),
    ]


ATTACK = Attack(
    name="large-bodies",
    title="Large JSON bodies",
    text=f"{_AT_ONCE} clients send bodies of up to {_BYTES / 1e6:g} MB for {_SECONDS:g} s: prompts, a chat, and masses "
    "of brackets, lists, numbers and names. Memory is what the attack added.",
    run=_run,
)
