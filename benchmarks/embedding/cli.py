"""The command: start the systems, run the workloads, print the tables."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from tokenizers import Tokenizer

from batchwright.models import resolve
from benchmarks.embedding import report
from benchmarks.embedding.fit import Fit, fit
from benchmarks.embedding.measure import Result, fastest, measure
from benchmarks.embedding.systems import BATCHER, OURS, PEERS, System, peer
from benchmarks.embedding.workers.protocol import Options
from benchmarks.embedding.workloads import NAMES, Workload, find_workload
from benchmarks.throughput.process import Worker, WorkerFailed
from benchmarks.throughput.workers.protocol import Ready

MAX_LENGTH = 256
_DTYPES = ("float32", "bfloat16")

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def embeddings(
    workload: Annotated[list[str] | None, typer.Option("--workload", "-w", help="gsm8k or mix; default both.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16; default both.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each workload; each runs every system once.")] = 5,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", help="sentence_transformers, infinity or none; default those that are installed."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON lines with the questions of gsm8k; default made-up ones."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of every system.")] = 2,
    fitting: Annotated[bool, typer.Option("--fit", help="Also fit the cost of a padded batch.")] = False,
    save: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the tables here, as a Markdown page.")
    ] = None,
) -> None:
    """Tokens/s of embeddings by batchwright, sentence-transformers and infinity-emb, in alternating rounds."""
    # Workers are suspended when it is not their turn: whatever ends this process has to end them too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        workloads = [find_workload(name, data) for name in workload or NAMES]
        systems = _peers(peers)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    kinds = dtype or list(_DTYPES)
    if unknown := set(kinds) - set(_DTYPES):
        raise typer.BadParameter(f"--dtype {', '.join(sorted(unknown))}: must be float32 or bfloat16")
    model = resolve("minilm", progress=_say)
    results, ready = list[Result](), defaultdict[str, list[Ready]](list)
    try:
        for kind in kinds:
            options: Options = {
                "model": str(model),
                "dtype": kind,
                "threads": threads,
                "max_length": MAX_LENGTH,
                "setting": {},
            }
            results += _run(workloads, systems, options, rounds, ready)
    except WorkerFailed as error:
        _say(str(error))
        raise typer.Exit(1) from None
    fits = [fit(model, kind, threads, MAX_LENGTH) for kind in kinds] if fitting else []
    _print(results, ready, fits, threads, rounds, save)


def _peers(names: list[str] | None) -> list[list[System]]:
    """Each peer in the ways to be tried. Raises ValueError for one that is unknown, or requested but not installed."""
    chosen = [*PEERS] if names is None else [name for name in names if name != "none"]
    if unknown := set(chosen) - set(PEERS):
        raise ValueError(f"--peer {', '.join(sorted(unknown))}: must be {', '.join(PEERS)} or none")
    found = {name: peer(name) for name in chosen}
    for name, ways in found.items():
        hint = f"{name} is not installed: benchmarks/setup_embeddings.sh does it"
        if not ways and names is not None:
            raise ValueError(hint)
        if not ways:
            _say(f"skipped: {hint}")
    return [ways for ways in found.values() if ways]


def _run(
    workloads: Sequence[Workload],
    peers: Sequence[list[System]],
    options: Options,
    rounds: int,
    ready: dict[str, list[Ready]],
) -> list[Result]:
    tokenizer = Tokenizer.from_file(str(Path(options["model"]) / "tokenizer.json"))
    tokenizer.enable_truncation(options["max_length"])
    tokenizer.no_padding()
    with contextlib.ExitStack() as stack:
        workers = {}
        for ways in ([System(OURS)], [System(BATCHER)], *peers):
            started = [stack.enter_context(_start(system, options)) for system in ways]
            best = fastest(started, workloads[-1].texts, _say) if len(started) > 1 else 0
            for worker in started[:best] + started[best + 1 :]:
                worker.close()
            workers[ways[best].name] = started[best]
            ready[ways[best].name].append(started[best].ready)
        return [
            measure(
                each,
                options["dtype"],
                sum(len(encoding.ids) for encoding in tokenizer.encode_batch(each.texts)),
                workers,
                rounds,
                _say,
            )
            for each in workloads
        ]


def _start(system: System, options: Options) -> Worker:
    _say(f"starting {system.name} {system.setting}, {options['dtype']}")
    chosen: Options = {**options, "setting": system.setting}
    return Worker(system.module, system.python, cast(Any, chosen), {})


def _print(
    results: Sequence[Result],
    ready: dict[str, list[Ready]],
    fits: Sequence[Fit],
    threads: int,
    rounds: int,
    save: Path | None,
) -> None:
    tables = [report.rates_table(results), report.best_peer_table(results), report.agreement_table(results)]
    print("\n\n".join([*filter(None, tables), *report.body_lists(results, ready, fits)]))
    if save is not None:
        save.write_text(report.page(results, ready, fits, threads, rounds), encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
