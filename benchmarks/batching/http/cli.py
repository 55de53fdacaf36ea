"""The command: start the servers, run the scenarios, print the tables."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.batching.http import report
from benchmarks.batching.http.run import LOADS, SCENARIOS, compare
from benchmarks.batching.http.systems import SYSTEMS

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def http(
    system: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(each.name for each in SYSTEMS)}; default all.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with other arrivals and lengths.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long requests arrive in a run.")] = 2.5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every library as it comes, half and nine tenths of the load, one seed.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the tables to this .md file, and all figures beside it.")
    ] = None,
) -> None:
    """Batching servers in real time: how many requests each answers right within its SLO."""
    # Servers are processes of their own: whatever ends this one has to end them too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = system or [each.name for each in SYSTEMS]
    if unknown := set(names) - {each.name for each in SYSTEMS}:
        raise typer.BadParameter(f"--system {', '.join(sorted(unknown))}: must be one of those in --help")
    chosen = [each for each in SYSTEMS if each.name in names]
    scenarios = list(SCENARIOS)
    if quick:
        seeds = 1
        chosen = [replace(each, settings=each.settings[:1]) for each in chosen]
        scenarios = [each for each in scenarios if each.load in (LOADS[0], LOADS[2]) and not each.faults]
    results = list(compare(chosen, scenarios, seeds, seconds, lambda line: print(line, file=sys.stderr, flush=True)))
    if not results:
        raise typer.Exit(1)
    print(report.tables(results))
    if save is not None:
        save.with_suffix(".md").write_text(report.page(results, seeds, seconds), encoding="utf-8")
        save.with_suffix(".json").write_text(report.figures(results, seeds, seconds), encoding="utf-8")
