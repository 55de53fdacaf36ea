"""The command: run the service under load for minutes, print the table."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from batchwright.models import DEFAULT_MODEL, resolve
from benchmarks.endure import report
from benchmarks.endure.cores import Cores
from benchmarks.endure.run import Setting, endure

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def endurance(
    seconds: Annotated[float, typer.Option(min=5, help="That are measured.")] = 600,
    clients: Annotated[int, typer.Option(min=1, help="Online.")] = 512,
    lines: Annotated[int, typer.Option(min=1, help="Of the batch; it is made anew when it ends.")] = 5000,
    share: Annotated[float, typer.Option(min=0.01, max=0.95, help="Of what the service can answer online.")] = 0.7,
    ramp: Annotated[float, typer.Option(min=0, help="Seconds of the same load before.")] = 60,
    calibration: Annotated[float, typer.Option(min=2, help="Seconds in which the capacity is found, at most.")] = 240,
    quick: Annotated[bool, typer.Option("--quick", help="64 clients and 200 lines for 30 seconds.")] = False,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the page here.")] = None,
) -> None:
    """Online clients in closed loops beside a large batch: errors, memory, and how fast the service says it lives."""
    resolve(DEFAULT_MODEL, progress=_say)
    if quick:
        seconds, clients, lines, ramp, calibration = 30, 64, 200, 15, 30
    setting = Setting(clients, lines, seconds, ramp, calibration, share)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(endure(setting, Cores.shared_out(os.sched_getaffinity(0)), Path(folder) / "run", _say))
    print(f"{report.introduction(found)}\n\n{report.figures_table(found)}\n\n{report.bars(found)}")
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(report.page(found), encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
