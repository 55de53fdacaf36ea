"""The command: scenarios in turn, clients side by side, and the page of their results."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from batchwright.models import DEFAULT_MODEL, resolve
from benchmarks.provider import report
from benchmarks.provider.clients import SYSTEMS, System
from benchmarks.provider.endpoints import found
from benchmarks.provider.jobs import job_of
from benchmarks.provider.report import Comparison
from benchmarks.provider.runs import KNOWLEDGE, Knowledge, run_all
from benchmarks.provider.scenarios import SCENARIOS
from benchmarks.provider.sweep import CONCURRENCIES, sweep
from benchmarks.remote.limits import raise_descriptor_limit

_QUICK_SECONDS = 20.0
_LINES, _QUICK_LINES = 600, 60
_QUICK_CONCURRENCIES = (4, 16)
_QUICK = ("rpm", "tpm", "concurrency", "errors")
_QUICK_KNOWLEDGE = ("unconfigured+headers",)

_T = TypeVar("_T")


class Section(StrEnum):
    """What is measured."""

    LIMITS = "limits"
    ENDPOINTS = "endpoints"


app = typer.Typer(add_completion=False)


@app.command()
def providers(
    section: Annotated[
        Section, typer.Option(help="Providers with limits, or servers of models as endpoints.")
    ] = Section.LIMITS,
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
        float | None, typer.Option(min=1.0, help="Of a job, for a client that knows everything.")
    ] = None,
    side: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = len(SYSTEMS),
    at_once: Annotated[int, typer.Option(min=1, help="Comparisons at a time, each with so many clients.")] = 1,
    server: Annotated[
        list[str] | None, typer.Option(help="With --section endpoints: batchwright, vllm, llama_cpp; default all.")
    ] = None,
    model: Annotated[str, typer.Option(help="With --section endpoints.")] = DEFAULT_MODEL,
    gguf: Annotated[Path | None, typer.Option(help="The same model for llama.cpp's server.")] = None,
    lines: Annotated[int | None, typer.Option(min=20, help="With --section endpoints.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --section endpoints.")] = 3,
    in_flight: Annotated[
        str, typer.Option(help="With --section endpoints: the fixed numbers of requests under way, with commas.")
    ] = ",".join(map(str, CONCURRENCIES)),
    quick: Annotated[bool, typer.Option(help="Few scenarios, 20 s each; few lines, one round.")] = False,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the page here.")] = None,
) -> None:
    """How much of what a provider's limits allow each client gets, and how often it is refused."""
    raise_descriptor_limit()
    if section is Section.ENDPOINTS:
        levels = _QUICK_CONCURRENCIES if quick else [int(each) for each in in_flight.split(",")]
        count = lines or (_QUICK_LINES if quick else _LINES)
        _endpoints(server, model, gguf, levels, count, 1 if quick else rounds, save)
        return
    systems = _installed(_chosen("--system", system, SYSTEMS))
    scenarios = _chosen("--scenario", scenario or (_QUICK if quick else None), SCENARIOS)
    known = _chosen("--knowledge", knowledge or (_QUICK_KNOWLEDGE if quick else None), KNOWLEDGE)
    pairs = [(name, each) for name in scenarios for each in known.values()]

    def compare(pair: tuple[str, Knowledge]) -> Comparison:
        name, each = pair
        job = job_of(SCENARIOS[name], seconds or (_QUICK_SECONDS if quick else SCENARIOS[name].seconds))
        _say(f"{name}, {each.name}: {len(job.lines):,} lines, {job.plan.makespan:.0f} s at best")
        runs = run_all(systems, name, job, each, side=side)
        return Comparison(name, each.configured, each.headers, len(job.lines), job.plan.makespan, runs)

    done: list[Comparison] = []
    with ThreadPoolExecutor(at_once) as pool:
        for each in pool.map(compare, pairs):
            done.append(each)
            print(f"{report.section(each)}\n", flush=True)
            _save(save, report.page(done, side * at_once))
    print(report.bars(done))


def _endpoints(
    names: list[str] | None,
    model: str,
    gguf: Path | None,
    levels: Sequence[int],
    lines: int,
    rounds: int,
    save: Path | None,
) -> None:
    checkpoint = resolve(model, progress=_say, weights="values")
    servers = _chosen("--server", names, found(model, checkpoint, gguf, max(levels)))
    done = []
    for server in servers.values():
        _say(f"{server.title}: {lines} lines, {rounds} rounds of {', '.join(map(str, levels))} and ours")
        with tempfile.TemporaryDirectory(prefix="batchwright-endpoint-") as folder, server.open(Path(folder)) as opened:
            swept = sweep(server.title, opened, lines=lines, rounds=rounds, concurrencies=levels, say=_say)
            done.append(swept)
    page = report.swept_page(done, lines=lines, rounds=rounds)
    print(page)
    _save(save, page)


def _save(path: Path | None, page: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")


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
