"""The engine's own tests, on a machine whose default device is the GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.accelerator.results import Suite

ROOT = Path(__file__).resolve().parents[2]
_VERDICT = re.compile(r"^(?P<name>\S+::.+?) (?P<verdict>PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)


class NoTests(Exception):
    """pytest could not run the tests; the message is the end of its output."""


def run_tests(limit: float) -> Suite:
    """`python -m pytest tests/engine`, ended after `limit` seconds. Engines there choose CUDA by themselves.

    Raises `NoTests`.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/engine",
        "-v",
        "--tb=short",
        "--color=no",
        "-p",
        "no:cacheprovider",
    ]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, timeout=limit, check=False)
            ended = done.returncode in (0, 1)
        except subprocess.TimeoutExpired:
            ended = False
        log.seek(0)
        output = log.read()
    tests = read_verdicts(output, ended=ended)
    if tests.failed or not ended:
        print(output[-20_000:], file=sys.stderr)
    if not (tests.passed or tests.failed or tests.skipped):
        lines = [line for line in output.splitlines() if line.strip()]
        raise NoTests(lines[-1] if lines else f"pytest said nothing within {limit:.0f} s")
    return tests


def read_verdicts(output: str, *, ended: bool) -> Suite:
    """What `pytest -v` said of each test. One that passed and then failed in a fixture's end has failed."""
    verdicts: dict[str, str] = {}
    for found in _VERDICT.finditer(output):
        verdicts[found["name"]] = found["verdict"]
    bad = tuple(name for name, verdict in verdicts.items() if verdict in ("FAILED", "ERROR"))
    good = sum(verdict == "PASSED" for verdict in verdicts.values())
    return Suite(good, bad, len(verdicts) - good - len(bad), ended)
