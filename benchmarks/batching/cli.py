"""The command: start the systems, carry out the plan, print the report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.batching.findings import Findings, Goodput, Load, Overhead, Real
from benchmarks.batching.lanes import Done, Lanes, overheads
from benchmarks.batching.peers import BY_REQUEST, OURS, SYSTEMS, System
from benchmarks.batching.report import figures, page, read_figures
from benchmarks.batching.suite import SECTIONS, Plan, Study, quick, tasks, thorough
from benchmarks.batching.trials import COUNT as TRIAL_REQUESTS
from benchmarks.batching.trials import TRIALS, trials
from benchmarks.throughput.report import machine

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def batching(
    system: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(SYSTEMS)}; default all.")] = None,
    section: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(SECTIONS)}; default all.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="CSV of the Azure LLM inference traces, for its workloads."),
    ] = None,
    look: Annotated[
        bool, typer.Option("--quick", help="One device, two seeds, few workloads: about two minutes.")
    ] = False,
    count: Annotated[int | None, typer.Option(min=100, help="Requests in a run; default 2000, with --quick 1500.")] = (
        None
    ),
    save: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write the report to this .md file, all figures and the plots beside it."),
    ] = None,
    saved: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            exists=True,
            dir_okay=False,
            help="Measure nothing; report the figures of this .json. Several: of runs of different sections.",
        ),
    ] = None,
) -> None:
    """Batching libraries in one process, in virtual time: goodput, latencies, faults, fairness, overhead.

    The whole comparison takes about 40 minutes on two cores. Interrupted, it reports what it has measured.

    With --http: batching servers over HTTP instead (--http --help).
    """
    if saved:
        _publish(_read_all(saved), save)
        return
    systems = [SYSTEMS[name] for name in _known("--system", system, SYSTEMS)]
    sections = _known("--section", section, SECTIONS)
    plan = (quick if look else thorough)(trace.resolve() if trace else None, count)
    findings = Findings(machine(), list(plan.seeds), plan.count)
    if trace is None and not look and {"goodput", "loads", "faults"} & set(sections):
        findings.note("Workloads of the Azure trace are skipped: there is no --trace.")
    for each in systems if set(sections) - set(TRIALS) else ():
        if not each.python.exists():
            findings.note(f"{each.title} is skipped: it is not installed; benchmarks/setup_batching.sh does it.")
    installed = [each for each in systems if each.python.exists()]
    findings.trials += trials(sections, min(TRIAL_REQUESTS, plan.count) if look else TRIAL_REQUESTS)
    # Whatever ends this program must also end its processes, and preserve what was measured.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _carry_out(findings, plan, installed, sections)
        findings.complete = True
    except KeyboardInterrupt:
        print("Interrupted: this is what was measured.", file=sys.stderr)
    _publish(findings, save)
    if not findings.complete:
        raise typer.Exit(130)


def _known(option: str, chosen: Sequence[str] | None, all_of_them: Sequence[str] | dict[str, System]) -> list[str]:
    if unknown := [name for name in chosen or () if name not in all_of_them]:
        raise typer.BadParameter(f"{option} {', '.join(unknown)}: must be one of {', '.join(all_of_them)}")
    return [name for name in all_of_them if not chosen or name in chosen]


def _read_all(paths: Sequence[Path]) -> Findings:
    findings = _read(paths[0])
    for path in paths[1:]:
        try:
            findings.extend(_read(path))
        except ValueError as error:
            raise typer.BadParameter(f"--from {path}: {error}") from error
    return findings


def _read(path: Path) -> Findings:
    try:
        return read_figures(path.read_bytes())
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"--from {path}: not a file that --save wrote: {error}") from error


def _carry_out(findings: Findings, plan: Plan, systems: Sequence[System], sections: Sequence[str]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    lanes = Lanes(tasks(plan, systems, sections), lambda peer: Study(peer, plan))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("starting", total=len(lanes))
        with closing(lanes.run()) as outcomes:
            for done in outcomes:
                _add(findings, done)
                progress.update(bar, advance=1, description=f"{done.title}: {done.system.title}")
        if "overhead" in sections:
            bar = progress.add_task("overhead", total=None)
            for done in _overheads(systems, plan):
                _add(findings, done)
            progress.update(bar, total=1, completed=1)


def _overheads(systems: Sequence[System], plan: Plan) -> Iterator[Done]:
    chosen = [each for each in systems if each.choice is None]
    if SYSTEMS[OURS] in chosen:
        chosen.append(BY_REQUEST)
    return overheads(chosen, plan.repeats, plan.requests)


def _add(findings: Findings, done: Done) -> None:
    if done.trouble:
        findings.note(f"{done.system.title} failed, {done.title}: {done.trouble}")
    if done.measured is not None:
        findings.systems[done.system.name] = done.measured
    for record in done.records:
        match record:
            case Goodput():
                findings.goodput.append(record)
            case Load():
                findings.loads.append(record)
            case Real():
                findings.real.append(record)
            case Overhead():
                findings.overhead.append(record)


def _publish(findings: Findings, save: Path | None) -> None:
    """Print the report, or write it with all figures and plots."""
    if save is None:
        print(page(findings, {}))
        return
    from benchmarks.batching.plots import plots  # takes a second to import

    content = figures(findings)
    save.parent.mkdir(parents=True, exist_ok=True)
    save.with_suffix(".json").write_bytes(content)
    # The report says what the file says, to the last digit.
    findings = read_figures(content)
    files: dict[str, Path] = {}
    for name, content in plots(findings):
        files[name] = save.with_name(f"{save.stem}-{name}.svg")
        files[name].write_bytes(content)
    save.with_suffix(".md").write_text(page(findings, {name: file.name for name, file in files.items()}), "utf-8")
