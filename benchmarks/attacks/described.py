"""schemathesis with all of its checks, against a running service."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

_ROOT = Path(__file__).resolve().parents[2]
_CONFIG = Path(__file__).with_name("schemathesis.toml")
_ENDLESS = "/dashboard/events"
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Result of a run."""

    cases: int
    """Requests that were checked."""
    accepted: int
    """Valid requests that were answered with 2xx: a service that refuses everything passes most checks."""
    failures: Sequence[str]
    """Deviations from the description, one line each, including errors of schemathesis itself."""
    output: str
    """What schemathesis printed: for each failure the request and its answer."""


class _Rate(msgspec.Struct):
    accepted: int


class _Failure(msgspec.Struct):
    title: str = ""
    type: str = ""
    operations: list[str] = []


class _Report(msgspec.Struct):
    """The parts of schemathesis's JSON report that are read here."""

    complete: bool
    test_cases: dict[str, int]
    failures: list[_Failure]
    errors: list[_Failure]
    valid_rates: dict[str, dict[str, _Rate]]


def run(
    url: str, key: str, seconds: int | None, *, phases: str = "examples,coverage,fuzzing,stateful", examples: int = 100
) -> Counts:
    """Run schemathesis against the service at `url` for a number of seconds; None: for `examples` of each operation.

    Without a time limit, the same requests are made each time. Raises RuntimeError if it cannot be run, or if the
    service does not accept `key`.
    """
    headers = {"authorization": f"Bearer {key}"}
    if httpx.get(f"{url}/v1/models", headers=headers, timeout=_START_SECONDS).status_code != 200:
        raise RuntimeError(f"{url} does not take the key")
    with tempfile.TemporaryDirectory(prefix="batchwright-schema-") as folder:
        report = Path(folder, "report.json")
        command = [
            str(Path(sys.executable).with_name("st")), "--config-file", str(_CONFIG), "run", f"{url}/openapi.json",
            "--continue-on-failure", "--phases", phases, "--exclude-path", _ENDLESS,
            "--header", f"Authorization: Bearer {key}", "--max-examples", str(examples),
            "--report", "json", "--report-json-path", str(report),
        ]  # fmt: skip
        command += ["--generation-deterministic"] if seconds is None else ["--max-time", str(seconds)]
        environment = os.environ | {
            "SCHEMATHESIS_HOOKS": "benchmarks.attacks.schema_hooks",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"schemathesis ended with status {done.returncode}: {done.stdout[-2000:]}{done.stderr}")
        found = msgspec.json.decode(report.read_bytes(), type=_Report)
    if not found.complete:
        raise RuntimeError(f"schemathesis did not come to its end: {done.stdout[-2000:]}")
    accepted = sum(rate.accepted for phase in found.valid_rates.values() for rate in phase.values())
    failures = [f"{each.title or each.type}: {', '.join(each.operations)}" for each in found.failures + found.errors]
    return Counts(found.test_cases["generated"], accepted, failures, done.stdout)
