"""The command: what planning finds in a trace, what it gains on the real engine, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer

from batchwright import AsyncEngine, Engine
from batchwright.models import resolve
from benchmarks.foresight import makespans, traces
from benchmarks.foresight.batches import batches_in_turns
from benchmarks.foresight.jobs import (
    TokenLine,
    answers_mostly,
    apart,
    blocks_needed,
    few_shot,
    prompts_and_answers,
    with_copies,
)
from benchmarks.foresight.long_files import measured
from benchmarks.foresight.runs import Timed, Way, in_turns
from benchmarks.foresight.vllm_answers import SmallCache
from benchmarks.replicas.jobs import LIMIT
from benchmarks.throughput.process import Worker
from benchmarks.throughput.report import machine, table
from benchmarks.throughput.systems import DEFAULT_VLLM, vllm_systems

_PLANNED, _ARRIVAL, _VLLM = makespans.PLANNED, makespans.ARRIVAL, "vLLM, prefix caching"
_PLAN, _NO_PLAN = Way(_PLANNED, {}), Way(_ARRIVAL, {"planned": False})
_CACHE_TOKENS = 1_000_000
_PREFIXES_HELD = 3
_PLACES = 64
_MAKESPAN = 1.02
_PROBED = 2**26
"""Bytes of KV cache with which the size of a block is found."""

app = typer.Typer(add_completion=False)


@app.command()
def planning(
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="traces, long-file, makespan, few-shot, batches, copies, mixing, cost; repeatable (default: all)."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace of Mooncake's form (default: one is drawn).")] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="CSV with ContextTokens and GeneratedTokens (default: lengths are drawn).")
    ] = None,
    model: Annotated[str, typer.Option(help="A built-in name, a folder or a hub id.")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Of each way.")] = 3,
    lines: Annotated[int, typer.Option(min=20, help="Of the few-shot job.")] = 400,
    vllm: Annotated[Path, typer.Option(help="vLLM's virtual environment; left out if it is not there.")] = DEFAULT_VLLM,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the page here.")] = None,
) -> None:
    """What it is worth to know a job before it starts, and what planning it costs."""
    makers: dict[str, Callable[[], str]] = {
        "traces": lambda: _traces(trace),
        "long-file": _long_file,
        "makespan": lambda: _makespan(lengths),
        "few-shot": lambda: _few_shot(model, rounds, lines, vllm),
        "batches": lambda: _batches(model, rounds, lines),
        "copies": lambda: _copies(model, rounds),
        "mixing": lambda: _mixing(model, rounds),
        "cost": lambda: _cost(model, rounds),
    }
    host = machine()
    parts = [
        "# Jobs that are known before they start",
        f"Printed by `benchmarks/planning.py` on {host['date']}; {host['processor']}, {host['cores']} cores, Python "
        f"{host['python']}. What is measured and how to repeat it: "
        "[benchmarks/README.md](../README.md#jobs-that-are-known-before-they-start).",
    ]
    for name in section or makers:
        if name not in makers:
            raise typer.BadParameter(f"--section {name}: must be one of {', '.join(makers)}")
        parts.append(makers[name]())
        print(parts[-1], flush=True)
    if save is not None:
        save.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _traces(path: Path | None) -> str:
    requests = traces.read_mooncake(path) if path is not None else traces.drawn(1, 12_000)
    capacity = _CACHE_TOKENS // traces.BLOCK_TOKENS
    arrival = range(len(requests))
    ideal = traces.reuse(requests, arrival, None)
    by_arrival, planned = (
        traces.reuse(requests, arrival, capacity),
        traces.reuse(requests, traces.planned(requests), capacity),
    )
    seconds, gibibytes = traces.seconds_of_a_million(requests)
    name = "a trace that is drawn" if path is None else f"`{path.name}`"
    return "\n\n".join([
        "## Prefixes of a trace",
        f"{len(requests):,} requests of {name}, a cache of {_CACHE_TOKENS:,} tokens in blocks of {traces.BLOCK_TOKENS}"
        " that forgets the least recently used.",
        table(
            ["order", "blocks found", "of what any cache could find"],
            [
                ["of arrival", f"{by_arrival:.1%}", f"{by_arrival / ideal:.1%}"],
                [_PLANNED, f"{planned:.1%}", f"{planned / ideal:.1%}"],
                ["any, with a cache without end", f"{ideal:.1%}", "100%"],
            ],
        ),
        f"A million such requests are planned in {seconds:.1f} s on one core, with {gibibytes:.2f} GiB at the peak of"
        f" the process. At least 99% of what any cache could find: **{_met(planned >= 0.99 * ideal)}**; at most 5 s and"
        f" 1 GB: **{_met(seconds <= 5 and gibibytes * 2**30 <= 1e9)}**.",
    ])  # fmt: skip


def _long_file() -> str:
    # A process's peak memory includes everything that it has done.
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        file = apart.submit(measured, documents=100_000, questions=10).result()
    return "\n\n".join([
        "## A file of many windows",
        f"{file.lines:,} lines that ask all of 100,000 documents one question, then all of them the next: 9 of 10 lines"
        " begin like an earlier one, which no window of the file holds.",
        table(
            ["order", "lines whose document is in their window"],
            [["of the file", f"{file.found_as_it_is:.1%}"], ["of the whole file", f"{file.found_in_order:.1%}"]],
        ),
        f"Found in {file.seconds:.1f} s, {file.seconds / file.lines * 1e6:.0f} µs a line, with {file.bytes_a_line:.0f}"
        " bytes of memory a line at the peak, the places of the lines in the file included.",
    ])  # fmt: skip


def _makespan(lengths: Path | None) -> str:
    found = makespans.measured(lengths)
    ways = [*found[0][2]]
    rows = [[device.name, job.name, *(f"{each[way]:.3f}" for way in ways)] for device, job, each in found]
    worst = max(each[_PLANNED] for _, job, each in found if job.is_trace)
    return "\n\n".join([
        "## Makespans in virtual time",
        f"Jobs of {makespans.LINES:,} lines on {makespans.PLACES} places, over their bounds, with the scheduler and the"
        " planner of the engine and costs of about an 8B model on one large GPU, and of a 0.5B model on two cores."
        f" Nothing is known of the lengths of answers but a limit of {LIMIT:,} tokens, except where they are given;"
        " *shortest* and *longest first* are orders by lengths that only the benchmark knows. Tasks: prompts that"
        " are equally long, behind one system prompt, with examples of their task.",
        table(["device", "job", *ways], rows),
        f"Chats, planned, at most {_MAKESPAN} times the bound: {worst:.3f}, **{_met(worst <= _MAKESPAN)}**.",
    ])  # fmt: skip


def _few_shot(model: str, rounds: int, lines: int, vllm: Path) -> str:
    jobs = [few_shot(seed, lines=lines) for seed in range(rounds)]
    blocks = max(blocks_needed(job, _PREFIXES_HELD) for job in jobs)
    with Engine(model, kv_memory=blocks * _block_bytes(model)) as engine:
        held = engine.stats.kv_blocks * engine.stats.block_size
        timed = in_turns(engine, jobs, [_PLAN, _NO_PLAN])
    rows = [_row(name, each) for name, each in timed.items()]
    if (theirs := _vllm_seconds(model, jobs, held, vllm)) is not None:
        rows.append([_VLLM, f"{min(theirs):.1f}", ""])
    ours, arrival = timed[_PLANNED].median, timed[_ARRIVAL].median
    bars = (
        f"At least 3 times as fast as in the order of the input: {arrival / ours:.2f}, **{_met(arrival >= 3 * ours)}**"
    )
    if theirs is not None:
        bars += f"; as vLLM: {min(theirs) / ours:.2f}, **{_met(min(theirs) >= 3 * ours)}**"
    return "\n\n".join([
        "## Few-shot prompts",
        f"{lines} lines with one of 20 beginnings of about 600 tokens, one after the other, and a KV cache of {held:,}"
        f" tokens, about {_PREFIXES_HELD} of them; medians of {rounds} rounds in turns (of vLLM the best).",
        table(["order", "seconds", "prompt tokens found in the cache"], rows),
        f"{bars}.",
    ])  # fmt: skip


def _batches(model: str, rounds: int, lines: int) -> str:
    jobs = [few_shot(seed, lines=lines) for seed in range(rounds)]
    blocks = max(blocks_needed(job, _PREFIXES_HELD) for job in jobs)
    engine = AsyncEngine(model, kv_memory=blocks * _block_bytes(model))
    timed = batches_in_turns(engine, jobs, _PLANNED, _ARRIVAL)
    gain = timed[_ARRIVAL].median / timed[_PLANNED].median
    return "\n\n".join([
        "## Few-shot prompts as a batch of the service",
        f"{lines} lines with one of 20 beginnings of about 600 tokens, one after the other, a KV cache for about"
        f" {_PREFIXES_HELD} of them; from the file in the service's store to the output file; medians of {rounds}"
        " rounds in turns.",
        table(["order", "seconds", "prompt tokens found in the cache"], [_row(*each) for each in timed.items()]),
        f"The planned order is {gain:.2f} times as fast.",
    ])  # fmt: skip


def _copies(model: str, rounds: int) -> str:
    ways = [_PLAN, Way("each computed", {"dedupe": False})]
    rows, shares = [], {}
    with Engine(model, max_num_seqs=_PLACES) as engine:
        for name, make in (("mostly answers", answers_mostly), ("mostly prompts", apart)):
            timed = in_turns(engine, [with_copies(seed, make(seed)) for seed in range(rounds)], ways)
            rows += [[name, *_row(way, each)] for way, each in timed.items()]
            shares[name] = timed[_PLANNED].median / timed["each computed"].median
    share = shares["mostly answers"]
    return "\n\n".join([
        "## Identical lines",
        f"30% of the lines ask the same as another; {_PLACES} places. Where each is computed, the prefix cache has most"
        " of the prompts of copies, so there is less to save where lines are mostly prompts.",
        table(["lines", "order", "seconds", "found in the cache"], rows),
        f"At most 72% of the time, mostly answers: {share:.0%}, **{_met(share <= 0.72)}**; mostly prompts:"
        f" {shares['mostly prompts']:.0%}.",
    ])  # fmt: skip


def _mixing(model: str, rounds: int) -> str:
    jobs = [prompts_and_answers(seed) for seed in range(rounds)]
    with Engine(model, max_num_seqs=_PLACES) as engine:
        timed = in_turns(engine, jobs, [_PLAN, _NO_PLAN])
    gain = timed[_ARRIVAL].median / timed[_PLANNED].median
    return "\n\n".join([
        "## Prompts and answers in one step",
        f"200 lines that are nearly all prompt, and after them 200 that are nearly all answer; {_PLACES} places. The"
        " plan mixes them.",
        table(["order", "seconds", "found in the cache"], [_row(name, each) for name, each in timed.items()]),
        f"Mixed, the job is {gain:.2f} times as fast as one kind after the other.",
    ])  # fmt: skip


def _cost(model: str, rounds: int) -> str:
    with Engine(model) as engine:
        timed = in_turns(engine, [apart(seed) for seed in range(2 * rounds)], [_PLAN, _NO_PLAN])
    extra = timed[_PLANNED].median / timed[_ARRIVAL].median - 1.0
    return "\n\n".join([
        "## What planning costs",
        "300 lines that share nothing, with plenty of KV cache.",
        table(["order", "seconds", "found in the cache"], [_row(name, each) for name, each in timed.items()]),
        f"Less than 1% more time: {extra:+.1%}, **{_met(extra < 0.01)}**.",
    ])  # fmt: skip


def _vllm_seconds(model: str, jobs: Sequence[Sequence[TokenLine]], held: int, folder: Path) -> list[float] | None:
    """Seconds of the rounds, in the fastest of its ways; None if there is no vLLM."""
    systems = vllm_systems(folder, {}) if folder.is_dir() else []
    found: list[list[float]] = []
    for system in systems:
        options: SmallCache = {
            "model": str(resolve(model)), "precision": system.precision, "kv_gib": 1, "max_num_seqs": 256,
            "attention": "", "profile": False, "kv_bytes": held * _block_bytes(model) // 16, "max_model_len": 1024,
        }  # fmt: skip
        with ExitStack() as stack:
            worker = stack.enter_context(
                Worker("benchmarks.foresight.vllm_answers", system.python, options, system.environment)
            )
            worker.run({"prompts": [list(range(2000, 2600))] * 2, "outputs": [8, 8]})  # all is compiled after it
            found.append(
                [
                    worker.run({"prompts": [each.prompt for each in job], "outputs": [each.answer for each in job]})[
                        "seconds"
                    ]
                    for job in jobs
                ]
            )
    return min(found, key=min) if found else None


def _block_bytes(model: str) -> int:
    """Bytes of a KV block of the model in bfloat16."""
    with Engine(model, kv_memory=_PROBED) as engine:
        return _PROBED // engine.stats.kv_blocks


def _row(name: str, timed: Timed) -> list[str]:
    return [name, f"{timed.median:.1f}", f"{sum(timed.hit_rates) / len(timed.hit_rates):.0%}"]


def _met(holds: bool) -> str:
    return "met" if holds else "not met"
