"""The command: start the systems in turn, and the table of how long they took."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from batchwright.models import DEFAULT_MODEL, resolve
from benchmarks.starting.measure import Start, StartFailed, batch_lines, start
from benchmarks.starting.systems import System, ours, transformers, vllm
from benchmarks.throughput.report import machine, table
from benchmarks.throughput.systems import DEFAULT_VLLM, TRANSFORMERS, VLLM

_TOKENS = 32
_KV_GIB = 2
_BAR_S = 6.0

app = typer.Typer(add_completion=False)


@dataclass(slots=True)
class Measured:
    """Results of one system."""

    system: System
    environment: Mapping[str, str] = field(default_factory=dict)
    first_start: Start | None = None
    """Start with nothing compiled before; None for a system that compiles nothing."""
    starts: list[Start] = field(default_factory=list)


@app.command()
def starting(
    rounds: Annotated[int, typer.Option(min=1, help="Each starts every system once.")] = 3,
    lines: Annotated[int, typer.Option(min=1, help="Of the input file.")] = 10,
    peer: Annotated[
        list[str] | None, typer.Option(help="vllm, transformers or none; default both, vLLM where it is installed.")
    ] = None,
    model: Annotated[str, typer.Option(help="A name, folder, GGUF file or hub id.")] = DEFAULT_MODEL,
    vllm_folder: Annotated[
        Path, typer.Option("--vllm", help="Virtual environment with vLLM; benchmarks/setup_vllm.sh makes it.")
    ] = DEFAULT_VLLM,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Seconds from starting a command to the first finished line of a small file, the model being on the disk."""
    peers = peer or [VLLM, TRANSFORMERS]
    if unknown := set(peers) - {VLLM, TRANSFORMERS, "none"}:
        raise typer.BadParameter(f"--peer {', '.join(sorted(unknown))}: must be vllm, transformers or none")
    folder = resolve(model, progress=_say, weights="values")
    systems = [ours(model, _KV_GIB)]
    if VLLM in peers:
        found = vllm(vllm_folder, folder, DEFAULT_MODEL, _KV_GIB, {})
        systems += found
        if not found:
            _say(f"vLLM is skipped, there is none in {vllm_folder}: make it with benchmarks/setup_vllm.sh")
    if TRANSFORMERS in peers:
        systems.append(transformers(folder))
    try:
        measured = _measure(systems, batch_lines(lines, DEFAULT_MODEL, _TOKENS), rounds)
    except StartFailed as error:
        _say(str(error))
        raise typer.Exit(1) from None
    page = report(measured, model=model, lines=lines, rounds=rounds)
    print(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


def _measure(systems: Sequence[System], lines: str, rounds: int) -> list[Measured]:
    with tempfile.TemporaryDirectory(prefix="batchwright-compiled-") as root:
        measured = []
        for number, system in enumerate(systems):
            folder = Path(root) / str(number)
            folder.mkdir()
            measured.append(Measured(system, {} if system.compiled_in is None else system.compiled_in(folder)))
        for each in measured:
            # Also where nothing is compiled: it brings what is read from the disk into memory.
            begun = _reported("first start", each, lines)
            each.first_start = None if each.system.compiled_in is None else begun
        for number in range(rounds):
            for each in measured:
                each.starts.append(_reported(f"round {number + 1} of {rounds}", each, lines))
        return measured


def _reported(what: str, measured: Measured, lines: str) -> Start:
    begun = start(measured.system, lines, measured.environment)
    _say(f"{what}: {measured.system.name} {begun.first:.1f} s to the first line, {begun.end:.1f} s in all")
    return begun


def report(measured: Sequence[Measured], *, model: str, lines: int, rounds: int) -> str:
    """A Markdown page. Figures are medians over the rounds, with their range."""
    host = machine()
    ours_median = statistics.median(begun.first for begun in measured[0].starts)
    rows = [
        [
            each.system.name,
            _seconds([begun.first for begun in each.starts]),
            _seconds([begun.end for begun in each.starts]),
            "-" if each.first_start is None else f"{each.first_start.first:.1f}",
        ]
        for each in measured
    ]
    how_often = "one round" if rounds == 1 else f"medians of {rounds} rounds in turn, their range in brackets"
    return "\n\n".join(
        [
            "# From the command to the first line",
            f"Seconds from starting a process to its first finished line, {lines} lines of short chat questions with"
            f" {_TOKENS} tokens to generate for each, greedily; {how_often}. Printed by `benchmarks/start.py` on"
            f" {host['date']}. {model}, on the disk and read before; {host['processor']}, {host['cores']} cores"
            f" ({', '.join(host['features'])}), Python {host['python']}. What the columns mean and how to repeat it:"
            " [benchmarks/README.md](../README.md).",
            table(["system", "first line, s", "end of the process, s", "first line, nothing compiled before, s"], rows),
            "\n".join(f"- {each.system.name} {each.system.note}" for each in measured),
            f"At most {_BAR_S:g} s to the first line: **{'Met' if ours_median <= _BAR_S else 'Missed'}.**",
        ]
    )


def _seconds(values: Sequence[float]) -> str:
    spread = f" ({min(values):.1f}..{max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f}{spread}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
