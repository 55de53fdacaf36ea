"""The command: schemas of folders, answers to each, and what validators say about them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from batchwright import Engine
from benchmarks.throughput.report import machine, table
from benchmarks.validity.asking import Outcome, ask
from benchmarks.validity.sources import Source, read_source
from benchmarks.validity.tiny import write_tiny

_TINY = "tiny"
_SHOWN = 12
"""Number of keywords that are listed; the others are one row."""


def schemas(
    folders: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            file_okay=False,
            help="Folders of JSON files, each a schema, or a list of cases that have a schema.",
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(help="A built-in name, a folder or a hub id; tiny: a random one. May be given several times."),
    ] = None,
    count: Annotated[int, typer.Option("--schemas", min=1, help="Most schemas of each folder.")] = 500,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each schema.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 200,
    closing: Annotated[
        float, typer.Option(help="Added to the logits of quotes and closing brackets, so that more answers end.")
    ] = 4.0,
    seed: Annotated[int, typer.Option(help="Draws the schemas.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 64,
    details: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write each refusal, failure and rejection here.")
    ] = None,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the page here, as Markdown.")] = None,
) -> None:
    """Draw answers to many schemas at temperature 1, and hold each against two validators.

    Exits with 1 if a validator rejects an answer. Stopped by SIGINT or SIGTERM, it reports what is done.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sources = [read_source(folder, count, seed) for folder in folders]
    before = os.getloadavg()[0]
    sections, lines, rejected = [], [], 0
    for name in model or [_TINY]:
        found = _outcomes(name, sources, samples, max_tokens, closing, concurrency)
        rejected += sum(len(outcome.rejected) for outcome in found)
        sections += [_section(name, sources, found, samples, max_tokens, closing if name == _TINY else 0.0)]
        lines += [line for source, outcome in zip(sources, found, strict=True) for line in _details(source, outcome)]
    host = machine()
    page = "\n\n".join(
        [
            "# Answers to the schemas of others",
            f"Printed by `benchmarks/schemas.py` on {host['date']}; {host['processor']}, {host['cores']} cores; load "
            f"average before it {before:.0f}, after it {os.getloadavg()[0]:.0f}. What is measured and how to repeat "
            "it: [benchmarks/README.md](../README.md#schemas-of-others).",
            *sections,
        ]
    )
    print(page)
    if details is not None:
        details.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")
    raise typer.Exit(1 if rejected else 0)


def _outcomes(
    model: str, sources: Sequence[Source], samples: int, max_tokens: int, closing: float, concurrency: int
) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as home:
        folder = model
        if model == _TINY:
            write_tiny(Path(home))
            folder = home
        with Engine(folder, max_num_seqs=concurrency, dtype="float32" if model == _TINY else "auto") as engine:
            bias = _closers(engine, closing) if model == _TINY else {}
            found = [Outcome() for _ in sources]
            try:
                for source, outcome in zip(sources, found, strict=True):
                    _ask(engine, model, source, outcome, samples=samples, max_tokens=max_tokens, bias=bias)
            except KeyboardInterrupt:
                print("stopped: what is done is reported", file=sys.stderr, flush=True)
    return found


def _ask(
    engine: Engine,
    model: str,
    source: Source,
    outcome: Outcome,
    *,
    samples: int,
    max_tokens: int,
    bias: Mapping[int, float],
) -> None:
    for _ in ask(engine, source, outcome, samples, max_tokens, bias):
        done = f"{len(outcome.seconds)} of {len(source.schemas)} schemas, {outcome.whole} whole answers"
        bad = f"{len(outcome.failed)} failed, {len(outcome.rejected)} rejected"
        print(f"{model}, {source.name}: {done}, {bad}", file=sys.stderr, flush=True)


def _closers(engine: Engine, bias: float) -> Mapping[int, float]:
    return {token: bias for letter in '"}]' for token in engine.core.tokenizer.encode(letter)} if bias else {}


def _section(
    model: str, sources: Sequence[Source], found: Sequence[Outcome], samples: int, max_tokens: int, closing: float
) -> str:
    asked = [(source, outcome) for source, outcome in zip(sources, found, strict=True) if outcome.seconds]
    rows = [_row(source.name, source.total, [outcome]) for source, outcome in asked]
    rows.append(_row("all", sum(source.total for source, _ in asked), found))
    head = ["folder", "schemas, of", "accepted", "whole answers", "cut", "failed", "judged", "rejected",
            "unreadable", "compiled: ms, p50", "p99", "most"]  # fmt: skip
    biased = f" Closing quotes and brackets have {closing:g} added to their logits." if closing else ""
    text = (
        f"## {model}\n\n{samples} answers to each accepted schema, temperature 1, at most {max_tokens} tokens.{biased}"
    )
    return "\n\n".join(
        [text, table(head, rows), "Refused, by the first keyword that the error names:", _refused(found)]
    )


def _row(name: str, total: int, found: Sequence[Outcome]) -> list[str]:
    whole = Outcome(seconds=[each for outcome in found for each in outcome.seconds])
    half, most, longest = whole.compile_ms()
    asked = len(whole.seconds)
    accepted = sum(outcome.accepted for outcome in found)
    return [
        name,
        f"{asked:,} of {total:,}",
        f"{accepted:,} ({accepted / max(asked, 1):.1%})",
        f"{sum(outcome.whole for outcome in found):,}",
        f"{sum(outcome.cut for outcome in found):,}",
        f"{sum(len(outcome.failed) for outcome in found):,}",
        f"{sum(outcome.checked for outcome in found):,}",
        f"{sum(len(outcome.rejected) for outcome in found):,}",
        f"{sum(outcome.unreadable for outcome in found):,}",
        f"{half:.1f}",
        f"{most:.0f}",
        f"{longest:.0f}",
    ]


def _refused(found: Sequence[Outcome]) -> str:
    keywords: Counter[str] = Counter()
    for outcome in found:
        keywords += outcome.refused
    asked = sum(len(outcome.seconds) for outcome in found)
    common = keywords.most_common(_SHOWN)
    others = sum(keywords.values()) - sum(number for _, number in common)
    rows = [[keyword, f"{number:,}", f"{number / asked:.1%}"] for keyword, number in common]
    rows += [["others", f"{others:,}", f"{others / asked:.1%}"]] if others else []
    return table(["keyword", "schemas", "share"], rows) if rows else "None."


def _details(source: Source, outcome: Outcome) -> list[str]:
    kinds = {"refused": outcome.refusals, "failed": outcome.failed, "rejected": outcome.rejected}
    return [f"{kind} {source.name}/{line}" for kind, lines in kinds.items() for line in lines]
