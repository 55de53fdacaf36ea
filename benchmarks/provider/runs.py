"""Runs: each client with its own provider, several side by side."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.provider.clients import OURS, ROOT, System
from benchmarks.provider.jobs import Job
from benchmarks.provider.ledger import Ledger
from benchmarks.provider.measures import Measures, measure
from benchmarks.provider.scenarios import MAX_TOKENS, SCENARIOS, GivenLimits
from benchmarks.provider.server import MODEL
from benchmarks.provider.systems.protocol import Task

_PATIENCE = 4.0
"""Multiple of the clairvoyant client's time after which a client is stopped."""
_STARTING_SECONDS = 30.0
_STOPPING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a client can know about the limits."""

    configured: bool
    """Whether it knows them in advance, as settings."""
    headers: bool
    """Whether it knows them from the headers of all responses, and `retry-after` with refusals."""

    @property
    def name(self) -> str:
        """On the command line and in tables."""
        return f"{'configured' if self.configured else 'unconfigured'}{'+headers' if self.headers else ''}"


KNOWLEDGE = {each.name: each for each in (Knowledge(t, h) for t in (True, False) for h in (True, False))}


@dataclass(frozen=True, slots=True)
class Run:
    """Result of a client's run."""

    system: System
    measures: Measures | None
    """None: it could not do the job."""
    settings: str
    """Its version and settings, or why it has no measures."""


@contextmanager
def provider(scenario: str, *, headers: bool, retry_after: bool) -> Iterator[str]:
    """The address of a provider in a separate process."""
    command = [sys.executable, "-m", "benchmarks.provider.server", scenario]
    command += ["--headers"] * headers + ["--retry-after"] * retry_after
    environment = os.environ | {"PYTHONPATH": _path()}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        # Leaving the block closes its standard input, at which it ends.


def ledger_of(address: str) -> Ledger:
    """Everything that a provider has recorded."""
    with urllib.request.urlopen(f"{address}/ledger") as response:
        return msgspec.json.decode(response.read(), type=Ledger)


def run_all(systems: Sequence[System], scenario: str, job: Job, knowledge: Knowledge, *, side: int) -> list[Run]:
    """Run all systems on a job, `side` at a time."""
    with ThreadPoolExecutor(side) as threads:
        return list(threads.map(lambda system: run_one(system, scenario, job, knowledge), systems))


def run_one(system: System, scenario: str, job: Job, knowledge: Knowledge) -> Run:
    """Run one system on a job."""
    limits = SCENARIOS[scenario].given if knowledge.configured else GivenLimits()
    address_of = provider(scenario, headers=knowledge.headers, retry_after=knowledge.headers)
    with tempfile.TemporaryDirectory(prefix="batchwright-provider-") as folder, address_of as address:
        source = Path(folder) / "in.jsonl"
        job.write(source)
        output = str(Path(folder) / "out.jsonl")
        url = f"{address}/v1"
        task = Task(url, str(source), output, MODEL, MAX_TOKENS, limits.rpm, limits.tpm, limits.concurrency)
        patience = _STARTING_SECONDS + _PATIENCE * job.plan.makespan
        why, printed = _finished(system.command(task), Path(folder) / "log.txt", patience)
        ledger, written = ledger_of(address), _written(Path(output))
    if why and not len(ledger):
        return Run(system, None, why)
    return Run(system, measure(job, ledger, written), f"{_settings(system, task, printed)}{f'; {why}' if why else ''}")


def _finished(command: Sequence[str], log: Path, patience: float) -> tuple[str, str]:
    """Run a client. Returns why it did not end well, and its last line of output."""
    environment = os.environ | {"PYTHONPATH": _path(), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    began = time.monotonic()
    with log.open("w") as errors:
        client = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            printed, _ = client.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            client.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(_STOPPING_SECONDS)
            client.kill()
            client.communicate()
            return f"stopped after {time.monotonic() - began:.0f} s", ""
    last = printed.decode().strip().rpartition("\n")[2]
    if client.returncode in (0, 3):
        return "", last
    # The last words: what frames a message is none.
    lines = [line for line in log.read_text(errors="replace").splitlines() if any(map(str.isalnum, line))]
    return f"exit status {client.returncode}: {lines[-1].strip('│ ') if lines else 'no message'}", last


def _written(output: Path) -> int:
    """Lines with an answer in a client's output, in our form or in that of the others."""
    if not output.exists():
        return 0
    with output.open("rb") as file:
        lines = [json.loads(line) for line in file if line.endswith(b"\n")]
    return len({line["custom_id"] for line in lines if (line.get("content") or line.get("response")) is not None})


def _settings(system: System, task: Task, printed: str) -> str:
    if system.name == OURS:
        limits = {"--rpm": task.rpm, "--tpm": task.tpm, "--backend-concurrency": task.concurrency}
        flags = " ".join(f"{flag} {value}" for flag, value in limits.items() if value is not None)
        return f"`run --backend{f' {flags}' if flags else ''}`"
    try:
        ready = json.loads(printed)
    except ValueError:
        return "not known"
    return f"{ready['version']}: {ready['settings']}"


def _path() -> str:
    """This checkout's code, whatever is installed."""
    return os.pathsep.join((str(ROOT / "src"), str(ROOT)))
