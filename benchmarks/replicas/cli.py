"""The command: many replicas in virtual time, and replicas of one core each on this machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from batchwright.engine_config import EngineConfig
from batchwright.models import DEFAULT_MODEL
from benchmarks.replicas.device import ACCELERATOR, CORES, Speed
from benchmarks.replicas.jobs import lengths, make_jobs
from benchmarks.replicas.processes import WORKLOADS, Rates, measure, memory
from benchmarks.replicas.simulation import POLICIES, bound, most_reused, simulate
from benchmarks.throughput.report import machine, table

_GROUPS = 100
_BAR, _REUSE_BAR = 1.03, 0.95
_LINES_EACH = 4842
"""Lines for each replica, a quarter of the trace, where the job grows with their number."""

app = typer.Typer(add_completion=False)


@app.command()
def scaling(
    trace: Annotated[
        Path | None, typer.Option(help="CSV with ContextTokens and GeneratedTokens; else lengths are drawn.")
    ] = None,
    devices: Annotated[list[int] | None, typer.Option(help="Numbers of replicas in virtual time.")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of each job on this machine; 0: virtual time only.")] = 3,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas on this machine.")] = 2,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the page here.")] = None,
) -> None:
    """Makespan and reuse of routed lines beside cut-up files and blocks; and replicas against one engine."""
    pairs = lengths(trace, random.Random(0))
    numbers = devices or [1, 2, 4, 8, 16, 32, 64]
    what = "the trace's lengths" if trace is not None else "drawn lengths"
    host = machine()
    parts = [
        "# Replicas",
        f"Printed by `benchmarks/scaling.py` on {host['date']}; {host['processor']}, Python {host['python']}. What is"
        " measured and how to repeat it: [benchmarks/README.md](../README.md#replicas).",
        "## In virtual time",
        f"Lines with {what} behind {_GROUPS} prefixes of a Zipf law (512 to 2,048 tokens), lengths of answers unknown."
        " Each cell: makespan as a multiple of the bound, and the share of what one replica with an infinite cache"
        " would reuse. *Blocks* are of 64 lines, 8 at once.",
        f"### A job of {len(pairs):,} lines, on groups of cores",
        _virtual(pairs, [(number, len(pairs)) for number in numbers], CORES),
        f"### {_LINES_EACH:,} lines for each replica, on accelerators",
        _virtual(pairs, [(number, number * _LINES_EACH) for number in numbers], ACCELERATOR),
    ]
    if rounds:
        parts += ["## On this machine", *_real(rounds, replicas)]
    page = "\n\n".join(parts)
    print(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


def _virtual(pairs: Sequence[tuple[int, int]], sizes: Sequence[tuple[int, int]], speed: Speed) -> str:
    rows, met = [], True
    for devices, lines in sizes:
        jobs = make_jobs(pairs, lines, groups=_GROUPS)
        least, most = bound(jobs, devices, speed), most_reused(jobs)
        cells = []
        for policy in POLICIES:
            outcome = simulate(jobs, devices, speed, policy)
            ratio, reuse = outcome.makespan / least, outcome.reused / most
            cells.append(f"{ratio:.3f} · {reuse:.1%}")
            met &= policy != "router" or (ratio <= _BAR and reuse >= _REUSE_BAR)
        rows.append([str(devices), f"{lines:,}", f"{least:,.0f}", *cells])
    verdict = f"Router: at most {_BAR} times the bound, at least {_REUSE_BAR:.0%} of the reuse:"
    head = ["replicas", "lines", "bound, s", *POLICIES]
    return f"{table(head, rows)}\n\n{verdict} **{'Met' if met else 'Missed'}.**"


def _real(rounds: int, replicas: int) -> list[str]:
    rows = [[each.name, *_cells(measure(each, replicas, rounds), replicas)] for each in WORKLOADS]
    head = ["workload", "one engine", f"{replicas} replicas", "ratio"]
    memories = []
    for dtype in ("bfloat16", "float32"):
        config = EngineConfig(dtype=dtype, device="cpu", kv_memory="64MiB")
        for number in (1, replicas):
            each = memory(number, DEFAULT_MODEL, config)[0]
            memories.append([dtype, str(number), *(f"{each[name]:.0f}" for name in ("rss", "pss", "private"))])
    return [
        f"{DEFAULT_MODEL}, one engine on all cores against {replicas} replicas on a part of them each: tokens/s"
        f" computed, medians of {rounds} rounds in turns; the ratio with its range over the rounds.",
        table(head, rows),
        "Memory of one replica after loading, in MiB: all that it uses, its share of what it has in common with others"
        " (PSS), and what is its own.",
        table(["precision", "replicas", "RSS", "PSS", "own"], memories),
    ]


def _cells(found: Rates, replicas: int) -> list[str]:
    ratios = found.ratios(replicas)
    ratio = found.median(replicas) / found.median(0)
    return [
        f"{found.median(0):,.0f}",
        f"{found.median(replicas):,.0f}",
        f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
    ]
