"""The command: runs in turn, and the table of their results."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.remote.limits import raise_descriptor_limit
from benchmarks.remote.runs import Outcome

ROOT = Path(__file__).resolve().parents[2]
_MOST_MS = 1.5
_FLAT = 1.25
_NAMES = {
    "plain": "a loop around aiohttp",
    "inference": "`EndpointInference`",
    "worker": "worker and store",
    "old inference": "`EndpointInference`, before",
    "old worker": "worker and store, before",
}
_JUDGED = ("inference", "worker")

Results = Mapping[str, Mapping[int, Sequence[Outcome]]]
"""By kind and by the number of requests in flight; one outcome for each round."""

app = typer.Typer(add_completion=False)


@app.command()
def endpoint(
    in_flight: Annotated[str, typer.Option(help="Requests under way at a time, with commas.")] = "16,64,256,1024",
    lines: Annotated[int, typer.Option(min=1, help="Of each run.")] = 20_000,
    old_lines: Annotated[int, typer.Option(min=1, help="Of each run of --source.")] = 3_000,
    latency_ms: Annotated[float, typer.Option(min=0.0, help="Of the endpoint.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Each runs everything once, in turn.")] = 3,
    source: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A checkout of older code to measure beside it.")
    ] = None,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Processor time of a line that an endpoint elsewhere computes, by the number of requests in flight."""
    raise_descriptor_limit()
    depths = [int(each) for each in in_flight.split(",")]
    runs = [(kind, kind, ROOT, lines) for kind in ("plain", *_JUDGED)]
    if source is not None:
        runs += [(f"old {kind}", kind, source.resolve(), old_lines) for kind in _JUDGED]
    results: dict[str, dict[int, list[Outcome]]] = {name: {depth: [] for depth in depths} for name, *_ in runs}
    for number in range(rounds):
        for depth in depths:
            for name, kind, checkout, count in runs:
                print(f"round {number + 1} of {rounds}: {name}, {depth} in flight", file=sys.stderr)
                results[name][depth].append(_run(kind, checkout, depth, count, latency_ms / 1e3))
    page = report(results, lines=lines, old_lines=old_lines, latency_ms=latency_ms, old=_revision(source))
    print(page)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(page + "\n")


def _run(kind: str, checkout: Path, in_flight: int, lines: int, latency: float) -> Outcome:
    with _served(latency) as url:
        command = [sys.executable, "-m", "benchmarks.remote.runs", kind, url, str(in_flight), str(lines)]
        environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    # Before it stand warnings of calls that were tried again, if there were any.
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Outcome)


@contextmanager
def _served(latency: float) -> Iterator[str]:
    """The URL of an endpoint in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.remote.server", str(latency)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
        # Leaving the block closes its standard input, at which it ends.


def _revision(source: Path | None) -> str:
    if source is None:
        return ""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    return done.stdout.strip() or source.name


def report(results: Results, *, lines: int, old_lines: int, latency_ms: float, old: str) -> str:
    """A Markdown page. Figures are medians over the rounds."""
    depths = [*next(iter(results.values()))]
    rounds = len(next(iter(next(iter(results.values())).values())))
    before = f" “Before” is revision {old}, with {old_lines:,} lines a run." if old else ""
    head = "| | " + " | ".join(f"{depth:,} in flight" for depth in depths) + " | largest over smallest |"
    return "\n".join([
        "# Lines that an endpoint elsewhere computes",
        "",
        "Milliseconds of processor time, user and system, that one line costs the process that sends it. The endpoint "
        f"is a process of its own on the same machine and answers each request after {latency_ms:g} ms; {lines:,} "
        f"lines a run, {rounds} round{'s' if rounds > 1 else ''} in turn, medians. With the worker a line is "
        f"validated, claimed, computed, committed to SQLite and written to the output file.{before} Printed by "
        f"`benchmarks/endpoint.py` on {datetime.now(UTC):%Y-%m-%d}; Python {platform.python_version()}, "
        f"{os.cpu_count()} processors.",
        "",
        head,
        "| :--- |" + " ---: |" * (len(depths) + 1),
        *(_row(_NAMES[name], [_cpu_ms(by_depth[depth]) for depth in depths]) for name, by_depth in results.items()),
        "",
        "Lines per second, which the other processes of the machine bear upon:",
        "",
        "| | " + " | ".join(f"{depth:,} in flight" for depth in depths) + " |",
        "| :--- |" + " ---: |" * len(depths),
        *(
            f"| {_NAMES[name]} | " + " | ".join(f"{_rate(by_depth[depth]):,.0f}" for depth in depths) + " |"
            for name, by_depth in results.items()
        ),
        "",
        *(_verdict(name, [_cpu_ms(results[name][depth]) for depth in depths]) for name in _JUDGED),
    ])  # fmt: skip


def _cpu_ms(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(each.cpu / each.lines for each in outcomes) * 1e3


def _rate(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(each.lines / each.wall for each in outcomes)


def _row(name: str, milliseconds: Sequence[float]) -> str:
    cells = " | ".join(f"{each:.2f}" for each in milliseconds)
    return f"| {name} | {cells} | {max(milliseconds) / min(milliseconds):.2f} |"


def _verdict(name: str, milliseconds: Sequence[float]) -> str:
    most, ratio = max(milliseconds), max(milliseconds) / min(milliseconds)
    held = "reached" if most <= _MOST_MS and ratio <= _FLAT else "missed"
    return (
        f"- {_NAMES[name]}: at most {_MOST_MS:g} ms, and the largest at most {_FLAT:g} times the smallest: {held} "
        f"({most:.2f} ms, {ratio:.2f})."
    )
