"""The command: score the text in each precision, print the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from batchwright.engine.bodies.load import read_config
from batchwright.engine.tokenizer import Tokenizer
from batchwright.models import DEFAULT_MODEL, resolve
from benchmarks.perplexity.measure import PRECISIONS, Scores, score
from benchmarks.perplexity.texts import documents, own_text, read
from benchmarks.throughput.report import machine, table

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def quantization(
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="What is predicted: JSON Lines, of which each line's texts are a document, or plain text. "
            "Default: the documentation of this repository.",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="A model of the Llama family: a name, folder, GGUF file or hub id.")] = (
        DEFAULT_MODEL
    ),
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of the text, from its beginning.")] = 20_000,
    window: Annotated[int, typer.Option(min=2, help="Longer documents are cut into pieces of so many tokens.")] = 512,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Perplexity of a text in float32, in bfloat16 and quantized, through the engine's own body."""
    folder = resolve(model, progress=_say, weights="values")
    try:
        texts = [own_text()] if text is None else read(text)
    except ValueError as error:
        raise typer.BadParameter(f"--text: {error}") from None
    tokenizer = Tokenizer(folder, read_config(folder).vocab_size)
    pieces = documents(texts, tokenizer, window=window, tokens=tokens)
    if not pieces:
        raise typer.BadParameter("--text: two tokens are needed at least")
    scores = {}
    for precision in PRECISIONS:
        _say(f"{precision}: {len(pieces)} documents")
        scores[precision] = score(folder, pieces, precision)
    name = "the documentation of this repository" if text is None else text.name
    content = f"{_summary(scores, len(pieces), name)}\n\n{_table(scores)}\n\n{_implementations(scores)}"
    print(content)
    if save is not None:
        save.write_text(_page(content, model), encoding="utf-8")


def _summary(scores: dict[str, Scores], count: int, name: str) -> str:
    predicted = scores["float32"].losses.numel()
    return (
        f"Text: {name}, {count} documents, {predicted:,} tokens predicted, each from those before it in its document."
    )


def _table(scores: dict[str, Scores]) -> str:
    exact, usual = scores["float32"], scores["bfloat16"]
    rows = []
    for precision, each in scores.items():
        above, error = each.above(usual)
        against = "-" if each is usual else f"{above:+.2%} ± {error:.2%}"
        rows.append([precision, f"{each.perplexity:.3f}", against, f"{each.agreement(exact):.1%}"])
    return table(["precision", "perplexity", "against bfloat16", "same likeliest token as float32"], rows)


def _implementations(scores: dict[str, Scores]) -> str:
    return "\n".join(f"- {precision}: {each.implementation}" for precision, each in scores.items())


def _page(content: str, model: str) -> str:
    host = machine()
    return (
        "# What quantization costs\n\n"
        f"Printed by `benchmarks/quantization.py` on {host['date']}. {model}; {host['processor']}"
        f" ({', '.join(host['features'])}). What the columns mean and how to repeat it:"
        " [benchmarks/README.md](../README.md).\n\n"
        f"{content}\n"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
