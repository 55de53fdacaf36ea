"""The command: runs in turn, and the table of their results."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.store.runs import Outcome, input_lines

ROOT = Path(__file__).resolve().parents[2]
_KINDS = ("bare", "store")

app = typer.Typer(add_completion=False)


@app.command()
def batch_store(
    lines: Annotated[int, typer.Option(min=1, help="Of the batch.")] = 1_000_000,
    concurrency: Annotated[int, typer.Option(min=1, help="Lines that the model computes at a time.")] = 256,
    latency_ms: Annotated[float, typer.Option(min=0.0, help="Of the model.")] = 50.0,
    rounds: Annotated[int, typer.Option(min=1, help="Each runs both, one after the other.")] = 1,
    folder: Annotated[Path | None, typer.Option(file_okay=False, help="On the disk to be measured.")] = None,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Seconds of a batch with a stub model: a bare asyncio loop, and the worker with the store on SQLite."""
    with tempfile.TemporaryDirectory(prefix="batchwright-store-", dir=folder) as scratch:
        source = Path(scratch) / "input.jsonl"
        with source.open("wb") as file:
            file.writelines(input_lines(lines))
        outcomes: dict[str, list[Outcome]] = {kind: [] for kind in _KINDS}
        for number in range(rounds):
            for kind in _KINDS:
                print(f"round {number + 1} of {rounds}: {kind}", file=sys.stderr)
                outcomes[kind].append(_run(kind, source, concurrency, latency_ms / 1e3, scratch))
    page = report(outcomes["bare"], outcomes["store"], lines=lines, concurrency=concurrency, latency_ms=latency_ms)
    print(page)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(page + "\n")


def _run(kind: str, source: Path, concurrency: int, latency: float, scratch: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix=f"{kind}-", dir=scratch) as folder:
        command = [sys.executable, "-m", "benchmarks.store.runs"]
        arguments = [kind, str(source), folder, str(concurrency), str(latency)]
        done = subprocess.run(command + arguments, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Outcome)


def report(
    bare: Sequence[Outcome], store: Sequence[Outcome], *, lines: int, concurrency: int, latency_ms: float
) -> str:
    """A Markdown page. Figures are medians over the rounds; a ratio is the median of those of the rounds."""
    loop, whole = (statistics.median(each) for each in (_computing(bare), _computing(store)))
    ratios = [ours.compute / theirs.compute for ours, theirs in zip(store, bare, strict=True)]
    rest = [
        (ours.validate + ours.compute + ours.finish) / theirs.compute for ours, theirs in zip(store, bare, strict=True)
    ]
    rows = [
        ("bare loop, s", f"{loop:,.1f}"),
        ("worker and store, s", f"{whole:,.1f}"),
        ("lines/s with the store", f"{lines / whole:,.0f}"),
        ("over the bare loop", _ratio(ratios)),
        ("validating the input, s", f"{statistics.median(each.validate for each in store):,.1f}"),
        ("building the output file, s", f"{statistics.median(each.finish for each in store):,.1f}"),
        ("over the bare loop, these two included", _ratio(rest)),
        ("peak memory of the bare loop, MB", f"{max(each.peak_memory for each in bare) / 1e6:,.0f}"),
        ("peak memory with the store, MB", f"{max(each.peak_memory for each in store) / 1e6:,.0f}"),
        ("page of 100 results, ms: p50, p99, max", _latencies([ms for each in store for ms in each.page_ms])),
        ("status with ETA, ms: p50, p99, max", _latencies([ms for each in store for ms in each.status_ms])),
    ]
    return "\n".join([
        "# A large batch through the store",
        "",
        f"{lines:,} lines, a stub model that takes {latency_ms:g} ms for each of {concurrency} lines at a time, "
        f"SQLite with `synchronous=FULL`; {len(store)} round{'s' if len(store) > 1 else ''} in turn, medians. Printed "
        f"by `benchmarks/batch_store.py` on {datetime.now(UTC):%Y-%m-%d}; Python {platform.python_version()}. The bare "
        "loop reads the same file, computes with the same stub at the same concurrency, and writes the same lines.",
        "",
        "| | |",
        "| :--- | ---: |",
        *(f"| {name} | {value} |" for name, value in rows),
    ])  # fmt: skip


def _computing(outcomes: Sequence[Outcome]) -> list[float]:
    return [each.compute for each in outcomes]


def _ratio(ratios: Sequence[float]) -> str:
    median = statistics.median(ratios)
    spread = f" ({min(ratios) - 1:+.1%}..{max(ratios) - 1:+.1%})" if len(ratios) > 1 else ""
    return f"{median - 1:+.1%}{spread}"


def _latencies(values: Sequence[float]) -> str:
    if not values:
        return "none measured"
    ordered = sorted(values)
    return ", ".join(f"{ordered[min(len(ordered) - 1, int(len(ordered) * share))]:.1f}" for share in (0.5, 0.99, 1.0))
