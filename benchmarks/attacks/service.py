"""The service under attack, a separate process, and what can be observed of it from outside."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 120.0
_STOP_SECONDS = 20.0


class NotStarted(Exception):
    """The service, or the endpoint behind it, ended or stayed silent instead of starting."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    source: Path
    """The checkout that it was started from."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def processor_seconds(self) -> float:
        """Processor seconds of all its threads since its start."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def log_bytes(self) -> int:
        return self.log.stat().st_size

    @property
    def connections(self) -> int:
        """Number of client connections, according to the kernel."""
        found = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(each.status == "ESTABLISHED" and each.laddr.port == self.port for each in found)


@contextmanager
def endpoint(flags: Sequence[str]) -> Iterator[str]:
    """Run a scripted OpenAI endpoint in a separate process; yields its address."""
    command = [sys.executable, "-m", "benchmarks.attacks.endpoint", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise NotStarted("the scripted endpoint has ended")
        yield url
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def serving(source: Path, folder: Path, flags: Sequence[str], descriptors: int | None) -> Iterator[Service]:
    """`batchwright serve` from the checkout `source`, with data and log in `folder`. Raises `NotStarted`."""
    log = folder / "log"
    command = [sys.executable, "-m", "batchwright", "serve", "--port", "0", "--data", str(folder / "data"), *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    environment |= {"PYTHONPATH": str(source / "src"), "XDG_CONFIG_HOME": str(folder), "BATCHWRIGHT_LOG_FORMAT": "json"}

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with log.open("wb") as written:
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=written, preexec_fn=limit)
    try:
        yield Service(_address(process, log), process, log, source)
    finally:
        _stop(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        for line in log.read_text(errors="replace").splitlines():
            if '"serving"' in line and (url := json.loads(line).get("url")):
                return str(url)
        time.sleep(0.05)
    raise NotStarted(f"the service did not start: {log.read_text(errors='replace')[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    # Signal twice: the first drains, the second does not wait.
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
