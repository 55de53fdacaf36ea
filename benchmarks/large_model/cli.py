"""Tokens per second of a model with the shape of Llama 3 8B, compared with what its weights allow."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from batchwright import Engine, InferenceRequest
from batchwright.engine.bodies.compiled import CompiledStack
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.models import DEFAULT_MODEL, resolve
from benchmarks.large_model.checkpoint import random_checkpoint
from benchmarks.large_model.gguf_checkpoint import KINDS
from benchmarks.large_model.peers import peer_decoded
from benchmarks.throughput.process import WorkerFailed
from benchmarks.throughput.report import machine, table
from benchmarks.throughput.systems import LLAMA_CPP, OPENVINO, Unavailable

_FOLDER = Path(__file__).resolve().parents[2] / ".bench" / "large-model"
_PROMPT = 32
"""Tokens of a prompt."""
_SUM_BYTES = 2**30
_GOAL = 0.85
_SEQUENCES = (1, 16, 64)
_PEERS = {LLAMA_CPP: "llama.cpp", OPENVINO: "OpenVINO"}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Steps of several sequences, each of which chose a token for every one."""

    step: float
    """Seconds of the median step."""
    products: float
    """Seconds of the median step in matrix products."""
    pairs: Sequence[tuple[float, float]]
    """Seconds of each step, and the bandwidth of memory right after it: beside other virtual machines it changes within
    seconds."""

    @property
    def bandwidth(self) -> float:
        """Median bytes per second."""
        return statistics.median(rate for _, rate in self.pairs)


@app.command()
def large_model(
    bits: Annotated[list[int] | None, typer.Option(min=4, max=8, help="4 or 8; repeatable.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers; the model has 32.")] = 32,
    steps: Annotated[int, typer.Option(min=3, help="Steps of each number of sequences.")] = 12,
    peer: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(_PEERS)} or none; default all whose environment is there."),
    ] = None,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Decode 1, 16 and 64 sequences with random weights of an 8B Llama in 4 and 8 bits."""
    if not set(bits or ()) <= {4, 8}:
        raise typer.BadParameter("--bits: must be 4 or 8")
    if unknown := {*(peer or ())} - {*_PEERS, "none"}:
        raise typer.BadParameter(f"--peer {', '.join(sorted(unknown))}: must be {', '.join(_PEERS)} or none")
    rows: list[list[str]] = []
    tokenizer = resolve(DEFAULT_MODEL, progress=typer.echo)
    for each in bits or [4, 8]:
        folder = random_checkpoint(_FOLDER, each, layers, tokenizer)
        began = time.perf_counter()
        with Engine(folder, kv_memory="1GiB", max_model_len=2048) as engine:
            loading = time.perf_counter() - began
            weights = _weight_bytes(engine)
            for sequences in _SEQUENCES:
                found = _decoded(engine, sequences, steps)
                alone = sequences == 1
                row = [
                    f"{each}",
                    "batchwright",
                    f"{weights / 1e9:.2f} GB, {loading:.0f} s",
                    str(sequences),
                    f"{sequences / found.step:.1f}",
                    f"{found.step * 1e3:,.0f} ms",
                    f"{found.products / found.step:.0%}",
                    f"{weights / found.step / 1e9:.1f} of {found.bandwidth / 1e9:.1f} GB/s" if alone else "-",
                    f"{statistics.median(weights / step / rate for step, rate in found.pairs):.0%}" if alone else "-",
                ]
                rows.append(row)
                typer.echo(" · ".join(row))
        for name in (each for each in _PEERS if peer is None or each in peer):
            try:
                for row in _peer_rows(name, each, layers, steps):
                    rows.append(row)
                    typer.echo(" · ".join(row))
            except (Unavailable, WorkerFailed) as error:
                if peer is not None:
                    raise typer.BadParameter(f"--peer {name}: {error}") from None
                typer.echo(f"{name} is skipped: {error}")
    page = _page(rows, layers)
    typer.echo(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


def _peer_rows(name: str, bits: int, layers: int, steps: int) -> Iterator[list[str]]:
    for found in peer_decoded(name, DEFAULT_MODEL, _FOLDER, bits, layers, steps, _SEQUENCES, typer.echo):
        size = f"{found.file_bytes / 1e9:.2f} GB, {found.loading:.0f} s"
        rate, step = f"{found.sequences / found.step:.1f}", f"{found.step * 1e3:,.0f} ms"
        yield [str(bits), f"{_PEERS[name]} {KINDS[bits]}", size, str(found.sequences), rate, step, "-", "-", "-"]


def _bandwidth(values: torch.Tensor) -> float:
    """Bytes per second of a sum over memory that no cache holds."""
    began = time.perf_counter()
    values.sum()
    return values.nbytes / (time.perf_counter() - began)


def _weight_bytes(engine: Engine) -> int:
    """Bytes of all weights that a step of one sequence reads."""
    body = engine.core.body
    if not isinstance(body, LlamaBody) or not isinstance(body.stack, CompiledStack):
        raise RuntimeError(f"layers are not compiled here: {engine.stats.implementation}")
    return body.stack.weight_bytes


def _decoded(engine: Engine, sequences: int, steps: int) -> Decoded:
    draw = random.Random(sequences)
    for number in range(sequences):
        prompt = [draw.randrange(100, 40_000) for _ in range(_PROMPT)]
        # Sampled tokens are not drafted.
        request = InferenceRequest(prompt, max_tokens=2 * steps + 8, temperature=1.0, seed=number, ignore_eos=True)
        engine.submit(request)
    scheduler = engine.core.scheduler
    while scheduler.num_waiting or any(not each.is_decode for each in scheduler.running):
        engine.step()
    seconds = engine.core.body.watch()
    if seconds is None:
        raise RuntimeError("the times of products are not known")
    values = torch.ones(_SUM_BYTES // 4)
    pairs, products = [], []
    for _ in range(steps):
        engine.step()  # the one after a sum finds none of the host's data in the caches
        before, began = seconds.products, time.perf_counter()
        engine.step()
        took = time.perf_counter() - began
        products.append(seconds.products - before)
        pairs.append((took, _bandwidth(values)))
    while engine.unfinished:
        engine.step()
    return Decoded(statistics.median(took for took, _ in pairs), statistics.median(products), pairs)


def _page(rows: list[list[str]], layers: int) -> str:
    host = machine()
    shape = "all 32 layers" if layers == 32 else f"{layers} of 32 layers"
    columns = ["bits", "system", "weights, loading", "sequences", "tokens/s", "step", "products", "read", "share"]
    return "\n\n".join(
        [
            "# A model of real size",
            f"The shape of Llama 3 8B, {shape}, with random weights in groups. Printed by `benchmarks/large_model.py`"
            f" on {host['date']}; {host['processor']}, Python {host['python']}. What is measured and how to repeat it:"
            " [benchmarks/README.md](../README.md).",
            table(columns, rows),
            "Read: weights in the time of a step, beside what a sum over memory reached right after it. Share: the"
            f" median of these ratios, step by step; the goal for one sequence is {_GOAL:.0%}. Peers read GGUF files"
            " with a scale for each 32 weights; their weights are the size of the file, with an embedding of 8 bits.",
        ]
    )
