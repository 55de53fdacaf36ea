"""The command: run the cases, and the table of what a step cost in each."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.planning.run import CASES, PIECES, Steps, measure
from benchmarks.throughput.report import machine, table

_BAR_CASE, _BAR_MS = "256 sequences", 1.5

app = typer.Typer(add_completion=False)


@app.command()
def scheduling(
    rounds: Annotated[int, typer.Option(min=1, help="Jobs of each case.")] = 3,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Milliseconds that the engine adds to a step of the model: scheduling, batch building, delivery, counting."""
    torch.set_num_threads(1)  # the stub's few logits are no work for two, who would wait for each other
    page = report({case.name: measure(case, rounds) for case in CASES}, rounds)
    print(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


def report(measured: Mapping[str, Steps], rounds: int) -> str:
    """A Markdown page."""
    host = machine()
    rows = [
        [
            name,
            *(f"{statistics.median(steps.pieces[piece]):.2f}" for piece in PIECES),
            f"{steps.median:.2f}",
            f"{steps.mean:.2f}",
            f"{steps.p99:.2f}",
            f"{statistics.median(steps.sampling):.2f}",
        ]
        for name, steps in measured.items()
    ]
    median = measured[_BAR_CASE].median
    return "\n\n".join(
        [
            "# What a step costs beside the model",
            "Milliseconds of a step of the engine around a model that computes nothing, in steps in which all places"
            f" are taken; medians of {rounds} jobs, and the mean and the 99th percentile of the whole. Printed by"
            f" `benchmarks/scheduling.py` on {host['date']}; {host['processor']}, Python {host['python']}. What is"
            " measured and how to repeat it: [benchmarks/README.md](../README.md).",
            table(["at a time", *PIECES, "a step", "mean", "p99", "(choice of tokens)"], rows),
            f"At most {_BAR_MS:g} ms at 256 sequences: **{'Met' if median <= _BAR_MS else 'Missed'}.**",
        ]
    )
