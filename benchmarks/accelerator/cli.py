"""The command: one section after another within one time, the table at the end, and the page after each."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.accelerator import report
from benchmarks.accelerator.report import Findings
from benchmarks.accelerator.results import Section, Unavailable
from benchmarks.accelerator.shapes import SHAPES
from benchmarks.accelerator.suite import NoTests, run_tests
from benchmarks.accelerator.worker import GRACE_S, SectionFailed, Worker, serve

_TOTAL_S = 520.0
_LIMITS: dict[Section, float] = {
    "hardware": 90,
    "decode": 100,
    "prefix": 60,
    "mixed": 60,
    "fp8": 60,
    "generate_batch": 60,
}
"""Seconds of each section, in their order; the first one also starts the process. The tests have what is left."""
_CPU_PATIENCE = 20.0
"""Factor of the time limits on the CPU, where only the script itself is tried."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def gpu(
    shape: Annotated[Literal["llama-3.1-8b", "tiny"], typer.Option(help="Of the model and of the sections.")] = (
        "llama-3.1-8b"
    ),
    device: Annotated[str, typer.Option(help="cuda, cuda:N or cpu.")] = "cuda",
    tests: Annotated[bool, typer.Option(help="Run tests/engine too, on CUDA only.")] = True,
    save: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the page here, after each figure as far as it has come.")
    ] = None,
) -> None:
    """Decoding, a mixed job and a shared prefix on one GPU, against what its bandwidth and products allow."""
    # The worker is killed when its time is over: whatever ends this process has to end it too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    device = _chosen(device)
    findings = Findings(SHAPES[shape])

    def keep() -> None:
        if save is not None:
            save.parent.mkdir(parents=True, exist_ok=True)
            save.write_text(report.page(findings), encoding="utf-8")

    patience = _CPU_PATIENCE if device == "cpu" else 1.0
    ends = time.monotonic() + patience * _TOTAL_S
    with tempfile.TemporaryDirectory() as folder, Worker(shape, device, Path(folder), serve) as worker:
        for section, limit in _LIMITS.items():
            _measure(worker, section, min(patience * limit, ends - time.monotonic() - GRACE_S), findings, keep)
    if not device.startswith("cuda"):
        findings.results.append(Unavailable("tests/engine", "needs CUDA"))
    elif not tests:
        findings.results.append(Unavailable("tests/engine", "left out"))
    else:
        _test(ends - time.monotonic(), findings)
    keep()
    print("\n\n".join([report.results_table(findings), *report.notes(findings)]))


def _chosen(device: str) -> str:
    if device == "cpu":
        return device
    from batchwright.engine.bodies.load import choose_device

    try:
        return str(choose_device(device))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _measure(worker: Worker, section: Section, limit: float, findings: Findings, keep: Callable[[], None]) -> None:
    if limit <= 0:
        findings.failures[section] = "no time was left"
        return
    _say(f"{section}, {limit:.0f} s at most")
    try:
        for result in worker.measure(section, limit):
            findings.results.append(result)
            keep()
            _say(f"  {result}")
    except SectionFailed as error:
        findings.failures[section] = str(error)
        _say(f"  {error}")
    keep()


def _test(limit: float, findings: Findings) -> None:
    _say(f"tests, {limit:.0f} s at most")
    try:
        findings.results.append(run_tests(max(1.0, limit)))
    except NoTests as error:
        findings.failures["tests"] = str(error)
        _say(f"  {error}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
