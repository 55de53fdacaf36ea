"""Requests generated from the OpenAPI description, valid and invalid ones."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.described import run
from benchmarks.attacks.service import Service

_SECONDS = 300


async def _attack(service: Service) -> Sequence[Figure]:
    key = await asyncio.to_thread(_make_key, service)
    counts = await asyncio.to_thread(run, service.url, key, _SECONDS)
    if counts.failures:
        print(counts.output, file=sys.stderr)
    return [
        Figure("requests", counts.cases),
        Figure("accepted", counts.accepted),
        Figure("failures", len(counts.failures), most=0),
    ]


def _make_key(service: Service) -> str:
    """Create a key in the service's own store: once there is one, every request needs one."""
    data = service.log.parent / "data"
    command = [sys.executable, "-m", "batchwright", "keys", "create", "schema", "--data", str(data)]
    environment = os.environ | {"PYTHONPATH": str(service.source / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return next(word for word in done.stdout.split() if word.startswith("bw-"))


ATTACK = Attack(
    name="schema",
    title="Requests made from the description",
    text=f"schemathesis asks for {_SECONDS} s what the OpenAPI description allows and what it does not, with all of "
    "its checks: statuses, bodies and headers as described, what fits taken and what does not refused, methods, keys, "
    "objects that are deleted, and sequences of requests.",
    run=_attack,
    backend="engine",
    seconds=_SECONDS + 300.0,
)
