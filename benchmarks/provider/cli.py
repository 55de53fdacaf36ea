"""The command: scenarios in turn, clients side by side, and the page of what came of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from benchmarks.provider import report
from benchmarks.provider.clients import SYSTEMS, System
from benchmarks.provider.jobs import job_of
from benchmarks.provider.report import Comparison
from benchmarks.provider.runs import KNOWLEDGE, run_all
from benchmarks.provider.scenarios import SCENARIOS
from benchmarks.remote.limits import raise_descriptor_limit

_QUICK_SECONDS = 20.0
_QUICK = ("rpm", "tpm", "concurrency", "errors")
_QUICK_KNOWLEDGE = ("untold+headers",)

_T = TypeVar("_T")

app = typer.Typer(add_completion=False)


@app.command()
def providers(
    scenario: Annotated[
        list[str] | None, typer.Option(help=f"May be repeated; default all: {', '.join(SCENARIOS)}.")
    ] = None,
    knowledge: Annotated[
        list[str] | None,
        typer.Option(help=f"What clients can know of the limits; may be repeated: {', '.join(KNOWLEDGE)}."),
    ] = None,
    system: Annotated[
        list[str] | None, typer.Option(help=f"May be repeated; default all that are installed: {', '.join(SYSTEMS)}.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=5.0, help="Of a job, for a client that knows everything.")
    ] = None,
    side: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = len(SYSTEMS),
    quick: Annotated[bool, typer.Option(help="Few scenarios, 20 s each.")] = False,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the page here.")] = None,
) -> None:
    """How much of what a provider's limits allow each client gets, and how often it is refused."""
    raise_descriptor_limit()
    systems = _installed(_chosen("--system", system, SYSTEMS))
    scenarios = _chosen("--scenario", scenario or (_QUICK if quick else None), SCENARIOS)
    known = _chosen("--knowledge", knowledge or (_QUICK_KNOWLEDGE if quick else None), KNOWLEDGE)
    done: list[Comparison] = []
    for name in scenarios:
        job = job_of(SCENARIOS[name], seconds or (_QUICK_SECONDS if quick else SCENARIOS[name].seconds))
        for each in known.values():
            _say(f"{name}, {each.name}: {len(job.lines):,} lines, {job.plan.makespan:.0f} s at best")
            runs = run_all(systems, name, job, each, side=side)
            done.append(Comparison(name, each.told, each.headers, len(job.lines), job.plan.makespan, runs))
            print(f"{report.section(done[-1])}\n", flush=True)
            if save is not None:
                save.parent.mkdir(parents=True, exist_ok=True)
                save.write_text(report.page(done, side), encoding="utf-8")
    print(report.bars(done))


def _chosen(flag: str, names: Iterable[str] | None, every: Mapping[str, _T]) -> dict[str, _T]:
    chosen = list(every) if names is None else list(names)
    if unknown := set(chosen) - set(every):
        raise typer.BadParameter(f"{flag} {', '.join(sorted(unknown))}: choose from {', '.join(every)}")
    return {name: every[name] for name in chosen}


def _installed(systems: dict[str, System]) -> list[System]:
    for each in systems.values():
        if not each.installed:
            _say(f"{each.title} is left out: benchmarks/setup_providers.sh installs it")
    return [each for each in systems.values() if each.installed]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
