"""This checkout against another one, in alternating rounds: `.venv/bin/python benchmarks/revisions.py --help`."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import httpx
import typer

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE), str(HERE / "src")]

from batchwright.models import DEFAULT_MODEL, resolve  # noqa: E402 - this checkout's, not an installed one
from benchmarks.attacks.service import serving  # noqa: E402
from benchmarks.starting.measure import batch_lines, start  # noqa: E402
from benchmarks.starting.systems import System  # noqa: E402
from benchmarks.throughput.process import Worker  # noqa: E402
from benchmarks.throughput.report import machine, table  # noqa: E402
from benchmarks.throughput.workers.protocol import Options  # noqa: E402
from benchmarks.throughput.workloads import find_workload  # noqa: E402

KV_GIB = 2
TINY: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Shape of a model that costs next to nothing, so that everything else is measured."""

Rounds: TypeAlias = Iterator[Callable[[], float]]
Trees: TypeAlias = Mapping[str, Path]


class Section(StrEnum):
    """One measure, in seconds or parts of them; less is better."""

    ENGINE_FEW = "uniform-4"
    ENGINE_UNIFORM = "uniform-64"
    ENGINE_CHAT = "chat-64"
    LINES = "lines"
    START = "start"
    ONE_CLIENT = "one-client"


def environment(tree: Path) -> dict[str, str]:
    """Environment variables with which Python imports the code in `tree`."""
    return {"PYTHONPATH": str(tree / "src")}


@contextmanager
def engine(trees: Trees, workload_name: str) -> Iterator[Callable[[str, int], float]]:
    """Seconds that the engine takes for a workload of `benchmarks/engine.py`."""
    workload = find_workload(workload_name)
    options: Options = {
        "model": str(resolve(DEFAULT_MODEL)), "precision": "bf16", "kv_gib": KV_GIB, "max_num_seqs": 256,
        "attention": "auto", "profile": False,
    }  # fmt: skip
    vocabulary = json.loads((resolve(DEFAULT_MODEL) / "config.json").read_text())["vocab_size"]

    def run(name: str, number: int) -> float:
        # A new process each time: the location of its memory changes the time of all its rounds by a percent or two.
        python, module = Path(sys.executable), "benchmarks.throughput.workers.batchwright"
        with Worker(module, python, options, environment(trees[name])) as worker:
            worker.run(workload.warm_up(vocabulary))
            return worker.run(workload.job(number, vocabulary))["seconds"]

    yield run


@contextmanager
def lines(trees: Trees, count: int) -> Iterator[Callable[[str, int], float]]:
    """Microseconds a line of `batchwright run` over many tiny lines, without loading."""
    with tempfile.TemporaryDirectory(prefix="batchwright-lines-") as name:
        folder = Path(name)
        write_lines(folder / "lines.jsonl", count)
        make_tiny_model(folder / "model")

        def run(name: str, _number: int) -> float:
            arguments = ["run", "lines.jsonl", "-o", "out.jsonl", "--overwrite", "--quiet", "--report", "report.json"]
            command = [sys.executable, "-m", "batchwright", *arguments, "--model", str(folder / "model")]
            subprocess.run(command, cwd=folder, env=os.environ | environment(trees[name]), check=True)
            report = json.loads((folder / "report.json").read_text())
            if report["failed"]:
                raise SystemExit(f"{report['failed']} lines failed in {name}")
            return float(report["loop_seconds"]) / count * 1e6

        yield run


def make_tiny_model(folder: Path) -> None:
    """Save a random model of the shape `TINY`, with the tokenizer of the default one."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**TINY)).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve(DEFAULT_MODEL)).save_pretrained(folder)


def write_lines(path: Path, count: int) -> None:
    """Write `count` short lines, all different."""
    rng = random.Random(1)
    with path.open("w") as file:
        for number in range(count):
            body = {"prompt": f"Count {rng.randrange(10**6)}", "max_tokens": 2, "temperature": 0}
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


@contextmanager
def first_line(trees: Trees) -> Iterator[Callable[[str, int], float]]:
    """Seconds from starting `batchwright run` to the first line of its output."""
    asked = batch_lines(10, DEFAULT_MODEL, 32)
    arguments = ("run", "{input}", "-o", "{output}", "--model", DEFAULT_MODEL, "--kv-memory", f"{KV_GIB}GiB", "--quiet")
    system = System("batchwright", "", (sys.executable, "-m", "batchwright", *arguments))
    for tree in trees.values():
        start(system, asked, environment(tree))
    yield lambda name, _number: start(system, asked, environment(trees[name])).first


@contextmanager
def one_client(trees: Trees) -> Iterator[Callable[[str, int], float]]:
    """Milliseconds in the median of 40 chat answers of 16 tokens that one client asks for one after the other."""

    def ask(name: str, number: int) -> float:
        took = []
        # A new process each time, for the same reason as above.
        with (
            tempfile.TemporaryDirectory(prefix="batchwright-online-") as folder,
            serving(trees[name], Path(folder), ["--kv-memory", f"{KV_GIB}GiB"], None) as service,
            httpx.Client(timeout=60) as client,
        ):
            for turn in range(44):
                content = f"Tell me about the number {number * 100 + turn}."
                body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 16}
                began = time.perf_counter()
                answer = client.post(f"{service.url}/v1/chat/completions", json=body | {"temperature": 0})
                answer.raise_for_status()
                took.append(time.perf_counter() - began)
        return statistics.median(took[4:]) * 1000

    yield ask


@contextmanager
def opened(section: Section, trees: Trees, count: int) -> Iterator[tuple[str, Callable[[str, int], float]]]:
    """What is measured, with its unit, and the measure of one checkout in one round."""
    if section is Section.LINES:
        with lines(trees, count) as measure:
            yield f"`run`, µs a line of {count:,}", measure
    elif section is Section.START:
        with first_line(trees) as measure:
            yield "first line of `run`, s", measure
    elif section is Section.ONE_CLIENT:
        with one_client(trees) as measure:
            yield "chat answer to one client, ms", measure
    else:
        with engine(trees, section) as measure:
            yield f"engine, {section}, s", measure


def row(what: str, values: Mapping[str, Sequence[float]]) -> list[str]:
    """Medians of both checkouts, and the ratio of the first to the second with the range of the single rounds."""
    this, other = values.values()
    ratios = [mine / its for mine, its in zip(this, other, strict=True)]
    one, two = statistics.median(this), statistics.median(other)
    return [what, f"{one:.4g}", f"{two:.4g}", f"{one / two:.3f} ({min(ratios):.3f}..{max(ratios):.3f})"]


def main(
    against: Annotated[Path, typer.Argument(help="Another checkout of this project.", file_okay=False, exists=True)],
    section: Annotated[list[Section] | None, typer.Option(help="May be repeated; all by default.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each checkout.")] = 5,
    count: Annotated[int, typer.Option("--lines", min=1, help="Lines of the section lines.")] = 200_000,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Measure this checkout and another one in turns, in the same Python environment."""
    trees = {"this": HERE, "other": against.resolve()}
    rows = []
    for each in section or list(Section):
        with opened(each, trees, count) as (what, measure):
            values: dict[str, list[float]] = {name: [] for name in trees}
            for number in range(rounds):
                for name in trees if number % 2 else reversed(trees):
                    values[name].append(measure(name, number))
                    print(f"{what}, round {number + 1} of {rounds}, {name}: {values[name][-1]:.4g}", flush=True)
        rows.append(row(what, values))
    host = machine()
    page = "\n\n".join([
        "# This checkout against another one",
        f"Medians of {rounds} alternating rounds; in brackets the range of the rounds taken one by one. Less is better."
        f" Printed by `benchmarks/revisions.py` on {host['date']}. {DEFAULT_MODEL}, {host['processor']},"
        f" {host['cores']} cores, Python {host['python']}.",
        table(["measure", "this", "other", "this over other"], rows),
    ])  # fmt: skip
    print(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
