"""Streams and answers that nobody reads."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from urllib.request import urlopen

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.quiet import quiet_client
from benchmarks.attacks.service import Service

_CLIENTS = 20
_TOKENS = 40_000
_WORD = "x" * 400
"""Text of every token: the attack should fill the buffers, not load the endpoint."""
_TIMEOUT = 5.0
_WATCHED_SECONDS = 30.0
_IN_FLIGHT = re.compile(r'batchwright_calls_in_flight\{traffic="online"\} (\S+)')


def _request(*, stream: bool) -> bytes:
    tokens = _TOKENS if stream else _TOKENS // 4
    body = json.dumps({"model": "scripted", "prompt": "x", "max_tokens": tokens, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _in_flight(service: Service) -> float | None:
    """Requests that hold a place; None if the service does not state it."""
    try:
        with urlopen(f"{service.url}/metrics", timeout=5) as answer:
            found = _IN_FLIGHT.search(answer.read().decode())
    except OSError:
        return None
    return float(found[1]) if found else None


async def _run(service: Service) -> Sequence[Figure]:
    memory, freed, closed = service.memory, None, None
    with ExitStack() as opened:
        for number in range(_CLIENTS):
            client = opened.enter_context(socket.create_connection((service.host, service.port), timeout=5))
            client.sendall(_request(stream=number % 2 == 0))
        began = time.monotonic()
        async with quiet_client(service) as felt:
            await asyncio.sleep(2.0)
            while closed is None and time.monotonic() < began + _WATCHED_SECONDS:
                await asyncio.sleep(0.5)
                # One may belong to the quiet client.
                if service.connections <= 1:
                    closed = time.monotonic() - began
                if freed is None and await asyncio.to_thread(_in_flight, service) == 0:
                    freed = time.monotonic() - began
        left = await asyncio.to_thread(_in_flight, service)
    return [
        *felt.figures(p99_ms=1000),
        Figure(f"requests that hold their place after {_WATCHED_SECONDS:g} s", left, "", 0),
        Figure("all places free after", freed, "s"),
        Figure("all connections cut after", closed, "s", _WATCHED_SECONDS),
        Figure("memory", (service.memory - memory) / 1e6, "MB", 400),
    ]


ATTACK = Attack(
    name="unread-streams",
    title="Unread streams",
    text=f"{_CLIENTS} clients ask for {_TOKENS * len(_WORD) / 1e6:g} MB of tokens as a stream, or for a quarter of "
    f"that as a whole, and never read; `write_timeout` is {_TIMEOUT:g} s here (60 by default).",
    run=_run,
    new_flags=("--write-timeout", f"{_TIMEOUT:g}"),
    endpoint_flags=("--token-ms", "0.1", "--word", _WORD),
)
