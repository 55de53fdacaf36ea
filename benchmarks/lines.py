"""What a line of `batchwright run` costs beside the model: `.venv/bin/python benchmarks/lines.py --help`."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).resolve().parents[1]
TINY: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""A model that costs next to nothing, so that what is measured is everything else."""


def make_model(folder: Path) -> None:
    """Save a random model of the shape `TINY`, with the tokenizer of the default one."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from batchwright.models import DEFAULT_MODEL, resolve

    LlamaForCausalLM(LlamaConfig(**TINY)).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve(DEFAULT_MODEL)).save_pretrained(folder)


def write_lines(path: Path, count: int, *, embeddings: bool) -> None:
    """Write `count` short lines, all different."""
    rng = random.Random(1)
    with path.open("w") as file:
        for number in range(count):
            text = f"Count {rng.randrange(10**6)}"
            body: dict[str, Any] = (
                {"input": text} if embeddings else {"prompt": text, "max_tokens": 2, "temperature": 0}
            )
            url = "/v1/embeddings" if embeddings else "/v1/completions"
            line = {"custom_id": f"line {number}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")


def measure(tree: Path, folder: Path, *flags: str) -> dict[str, Any]:
    """The report of one run with the code in `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    arguments = ["run", "lines.jsonl", "-o", "out.jsonl", "--overwrite", "--quiet", "--report", "report.json", *flags]
    subprocess.run([sys.executable, "-m", "batchwright", *arguments], cwd=folder, env=environment, check=True)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    if report["failed"]:
        raise SystemExit(f"{report['failed']} lines failed")
    return report


@contextmanager
def workplace(lines: int, *, embeddings: bool) -> Iterator[Path]:
    """A folder with the input and the model."""
    with tempfile.TemporaryDirectory(prefix="batchwright-lines-") as name:
        folder = Path(name)
        if not embeddings:
            make_model(folder / "model")
        write_lines(folder / "lines.jsonl", lines, embeddings=embeddings)
        yield folder


def table(reports: dict[str, list[dict[str, Any]]], lines: int) -> str:
    """A row for each tree, with medians, and the ratio to the last one, whose range is that of the single rounds."""
    last = [report["loop_seconds"] for report in [*reports.values()][-1]]
    rows = ["| code | µs a line | seconds | of the last | peak memory, MiB |", "| :- | -: | -: | -: | -: |"]
    for name, each in reports.items():
        seconds = [report["loop_seconds"] for report in each]
        ratios = [mine / other for mine, other in zip(seconds, last, strict=True)]
        median, memory = statistics.median(seconds), max(report["peak_memory_bytes"] for report in each) / 2**20
        ratio = f"{median / statistics.median(last):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
        rows.append(f"| {name} | {median / lines * 1e6:.0f} | {median:.1f} | {ratio} | {memory:.0f} |")
    return "\n".join(rows)


def main(
    lines: Annotated[int, typer.Option(help="Lines of the input.")] = 200_000,
    rounds: Annotated[int, typer.Option(help="Runs of each code, taken in turns.")] = 3,
    against: Annotated[
        list[Path] | None, typer.Option(help="Another checkout of this project, to compare with; may be repeated.")
    ] = None,
    embeddings: Annotated[bool, typer.Option(help="Lines for /v1/embeddings, computed by minilm.")] = False,
    save: Annotated[Path | None, typer.Option(help="Append the table to this file.")] = None,
) -> None:
    """Run many tiny lines through a model that costs next to nothing; the loop is timed, without loading."""
    sys.path.insert(0, str(HERE / "src"))
    trees = {"this": HERE, **{tree.name: tree.resolve() for tree in against or ()}}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    with workplace(lines, embeddings=embeddings) as folder:
        flags = ["--embedding-model", "minilm"] if embeddings else ["--model", str(folder / "model")]
        for _ in range(rounds):
            for name, tree in trees.items():
                reports[name].append(measure(tree, folder, *flags))
                print(f"{name}: {reports[name][-1]['loop_seconds']:.1f} s", flush=True)
    text = f"{lines:,} lines, medians of {rounds} alternating rounds\n\n{table(reports, lines)}\n"
    print(text)
    if save is not None:
        with save.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    typer.run(main)
