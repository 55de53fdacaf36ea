"""The command: rows per second of each way, and the ratios."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
from pathlib import Path
from typing import Annotated

import typer

from batchwright.models import DEFAULT_MODEL
from benchmarks.ray_forms.measure import AT_ONCE, Measured, Way, measure, ways
from benchmarks.throughput.report import machine, table
from benchmarks.throughput.systems import DEFAULT_VLLM

_BAR = 0.95

app = typer.Typer(add_completion=False)


@app.command()
def ray_data(
    model: Annotated[str, typer.Option(help="Model.")] = DEFAULT_MODEL,
    rows: Annotated[int, typer.Option(min=16, help="Rows.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch, and of a block of the dataset.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in turns.")] = 3,
    vllm_rounds: Annotated[int, typer.Option(min=1, help="Rounds with vLLM, which takes a minute to start.")] = 2,
    vllm: Annotated[Path, typer.Option(help="Environment with vLLM and ray[data]; without one it is left out.")] = (
        DEFAULT_VLLM
    ),
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the page here.")] = None,
) -> None:
    """Rows a second of a file with `run`, of Ray Data with our class, and of Ray Data with vLLM."""
    before = os.getloadavg()[0]
    found = measure(
        ways(vllm),
        model=model,
        rows=rows,
        tokens=tokens,
        batch_size=batch_size,
        rounds=rounds,
        vllm_rounds=vllm_rounds,
        say=typer.echo,
    )
    host = machine()
    parts = [
        "# Ray Data",
        f"Printed by `benchmarks/ray_data.py` on {host['date']}; {host['processor']}, {host['cores']} cores, Python"
        f" {host['python']}, Ray {importlib.metadata.version('ray')}. {model}, bfloat16, greedy, {rows} rows of 8"
        f" to 60 words, {tokens} tokens each, batches and blocks of {batch_size} rows, {AT_ONCE} rows at once. Figures"
        f" are ratios of one run of the benchmark; load average before it {before:.0f}, after it"
        f" {os.getloadavg()[0]:.0f}."
        " What is measured and how to repeat it:"
        " [benchmarks/README.md](../README.md#ray-data).",
        _table(found),
        *_verdicts(found),
    ]
    page = "\n\n".join(parts)
    typer.echo(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


def _table(found: Measured) -> str:
    ours = found.fastest("batchwright")
    lines = []
    for way, rates in found.rates.items():
        ratio = "" if ours is None or way == ours else _ratio(found, ours, way)
        lines.append([way.name, f"{statistics.median(rates):.1f}", str(len(rates)), ratio])
    return table(["", "rows/s", "rounds", "our class, relative to it"], lines)


def _ratio(found: Measured, way: Way, other: Way) -> str:
    ratios = found.ratios(way, other)
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


def _verdicts(found: Measured) -> list[str]:
    ours, direct = found.fastest("batchwright"), found.fastest("run")
    if ours is None or direct is None:
        return []
    met = statistics.median(found.ratios(ours, direct)) >= _BAR
    return [f"Our class, relative to `run`: at least {_BAR}: **{'met' if met else 'missed'}.**"]
