"""The command: `python -m tests.soak --hours 1`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated, get_args

import typer
from tests.soak.checks import checks
from tests.soak.report import page, report
from tests.soak.soak import Backend, Database, Plan, soak

_USUAL: dict[Backend, Database] = {"engine": "sqlite", "scripted": "postgresql"}


def main(
    hours: Annotated[float, typer.Option(min=0.005, help="Of load with faults, in all; 0.05 for a trial.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the load, and of the order of the faults.")] = 1,
    backend: Annotated[
        Backend | None, typer.Option(help="What computes. Default: both, each for half of the time.")
    ] = None,
    database: Annotated[
        Database | None, typer.Option(help="Default: sqlite for the engine, postgresql for the scripted endpoint.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(file_okay=False, help="A folder for data and logs.")] = None,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the report here, too.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the fault of this name; may be repeated.")] = None,
) -> None:
    """Run the real service at mixed load, with a fault every minute, and print what came of it."""
    backends: tuple[Backend, ...] = get_args(Backend) if backend is None else (backend,)
    met, reports = True, []
    for each in backends:
        seconds = hours * 3600 / len(backends)
        plan = Plan(seconds, seed, database or _USUAL[each], each, only=tuple(only or ()))
        with tempfile.TemporaryDirectory() as folder:
            _say(f"{plan.backend}, {plan.database}: {seconds:.0f} s, seed {seed}")
            seen = asyncio.run(soak(plan, (keep or Path(folder)) / f"{plan.backend}-{plan.database}", _say))
        reports.append(report(seen))
        print(reports[-1], flush=True)
        met = met and all(check.met is not False for check in checks(seen))
    if save is not None:
        save.write_text(page(reports), encoding="utf-8")
    if not met:
        raise typer.Exit(1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
