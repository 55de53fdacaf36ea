"""Requests made from the OpenAPI description, those that fit it and those that do not: schemathesis with all checks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.service import ROOT, Service

_SECONDS = 300
_CONFIG = Path(__file__).with_name("schemathesis.toml")
_ENDLESS = "/dashboard/events"
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What came of a run."""

    cases: int
    """Requests that were checked."""
    accepted: int
    """Of those made to fit the description, the ones answered with 2xx: a service that refuses all passes most checks."""
    failures: Sequence[str]
    """What was not as described, in a line each; errors of schemathesis itself too."""


class _Rate(msgspec.Struct):
    accepted: int


class _Failure(msgspec.Struct):
    title: str = ""
    operation: str = ""
    message: str = ""


class _Report(msgspec.Struct):
    """Of schemathesis's JSON report what is read here."""

    complete: bool
    test_cases: dict[str, int]
    failures: list[msgspec.Raw]
    errors: list[msgspec.Raw]
    valid_rates: dict[str, dict[str, _Rate]]


def run(
    url: str, key: str, seconds: int | None, *, phases: str = "examples,coverage,fuzzing,stateful", examples: int = 100
) -> Counts:
    """Have schemathesis ask the service at `url` for so many seconds; None: for `examples` of each operation.

    Without a time limit the same requests are made each time. Raises RuntimeError when it could not be run, or when the
    service does not take `key`.
    """
    headers = {"authorization": f"Bearer {key}"}
    if httpx.get(f"{url}/v1/models", headers=headers, timeout=_START_SECONDS).status_code != 200:
        raise RuntimeError(f"{url} does not take the key")
    with tempfile.TemporaryDirectory(prefix="batchwright-schema-") as folder:
        report = Path(folder, "report.json")
        command = [
            str(Path(sys.executable).with_name("st")), "--config-file", str(_CONFIG), "run", f"{url}/openapi.json",
            "--checks", "all", "--continue-on-failure", "--phases", phases, "--exclude-path", _ENDLESS,
            "--header", f"Authorization: Bearer {key}", "--max-examples", str(examples),
            "--report", "json", "--report-json-path", str(report),
        ]  # fmt: skip
        command += ["--generation-deterministic"] if seconds is None else ["--max-time", str(seconds)]
        environment = os.environ | {
            "SCHEMATHESIS_HOOKS": "benchmarks.attacks.schema_hooks",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"schemathesis ended with status {told.returncode}: {told.stdout[-2000:]}{told.stderr}")
        found = msgspec.json.decode(report.read_bytes(), type=_Report)
    if not found.complete:
        raise RuntimeError(f"schemathesis did not come to its end: {told.stdout[-2000:]}")
    accepted = sum(rate.accepted for phase in found.valid_rates.values() for rate in phase.values())
    return Counts(found.test_cases["generated"], accepted, [bytes(each).decode() for each in found.failures + found.errors])


async def _attack(service: Service) -> Sequence[Figure]:
    key = await asyncio.to_thread(_make_key, service)
    counts = await asyncio.to_thread(run, service.url, key, _SECONDS)
    for failure in counts.failures:
        print(failure, file=sys.stderr)
    return [
        Figure("requests", counts.cases),
        Figure("accepted", counts.accepted),
        Figure("failures", len(counts.failures), most=0),
    ]


def _make_key(service: Service) -> str:
    """A key in the service's own store: with one in it, every request needs one."""
    command = [sys.executable, "-m", "batchwright", "keys", "create", "schema", "--data", str(service.log.parent / "data")]
    environment = os.environ | {"PYTHONPATH": str(service.source / "src")}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return next(word for word in told.stdout.split() if word.startswith("bw-"))


ATTACK = Attack(
    name="schema",
    title="Requests made from the description",
    told=f"schemathesis asks for {_SECONDS} s what the OpenAPI description allows and what it does not, with all of its "
    "checks: statuses, bodies and headers as described, what fits taken and what does not refused, methods, keys, "
    "objects that are deleted, and sequences of requests.",
    run=_attack,
    backend="engine",
    seconds=_SECONDS + 300.0,
)
