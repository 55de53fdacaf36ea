"""The command: start the systems, run the workloads, print the tables."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from batchwright.models import DEFAULT_MODEL, resolve
from benchmarks.throughput import report
from benchmarks.throughput.measure import Result, bounded, measure, profile, tried
from benchmarks.throughput.process import Worker, WorkerFailed
from benchmarks.throughput.systems import DEFAULT_VLLM, OURS, PEERS, PRODUCTS, System, Unavailable, peer_systems
from benchmarks.throughput.workers.protocol import Options, Ready
from benchmarks.throughput.workloads import STANDARD, Workload, find_workload

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass(slots=True)
class Measured:
    results: list[Result]
    ready: dict[str, Ready]
    precisions: dict[str, str]
    """Precisions of the weights, by system."""
    trials: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tokens/s of each way that was tried, by system and settings."""
    profiles: dict[str, dict[str, float]] = field(default_factory=dict)
    bounds: dict[str, dict[str, float]] = field(default_factory=dict)


@app.command()
def engine(
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload", "-w", help=f"One of {', '.join(STANDARD)}, 'all' of these, uniform-N or uniform-N:IN/OUT."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each workload; each runs every system once.")] = 3,
    peer: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(PEERS)} or none; default all whose environment is there."),
    ] = None,
    model: Annotated[str, typer.Option(help="A model of the Llama family: a name, folder, GGUF file or hub id.")] = (
        DEFAULT_MODEL
    ),
    quantization: Annotated[
        Literal["int8", "int8-group", "int4"] | None,
        typer.Option(help="Of batchwright; its peers have as many bits, vLLM those that it is fastest with."),
    ] = None,
    attention: Annotated[
        Literal["auto", "native", "sdpa"],
        typer.Option(help="Of batchwright; BATCHWRIGHT_NATIVE=0 is no kernel at all."),
    ] = "auto",
    vllm: Annotated[Path, typer.Option(help="Virtual environment with vLLM; benchmarks/setup_vllm.sh makes it.")] = (
        DEFAULT_VLLM
    ),
    vllm_env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Environment of vLLM, before our choice.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="CSV with the lengths of mixed-200 (Azure's trace)."),
    ] = None,
    kv_gib: Annotated[int, typer.Option(min=1, help="KV cache of batchwright and of vLLM, GiB each.")] = 2,
    profiled: Annotated[
        bool,
        typer.Option("--profile", help="Also split our steps into their pieces, and report the bound of each job."),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write every figure here.")] = None,
    save: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the tables here, as a Markdown page.")
    ] = None,
) -> None:
    """Generated tokens/s of batchwright, of its peers and of the matrix products alone, in alternating rounds."""
    # Workers are suspended when it is not their turn: whatever ends this process has to end them too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        workloads = _workloads(workload, trace)
        ours = System(OURS, precision=quantization or "bf16")
        bits = "bf16" if quantization is None else quantization.removesuffix("-group")
        peers = _peers(peer, model, vllm, _pairs(vllm_env), bits=bits)
        systems = [*peers, [ours], [System(PRODUCTS)]]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    options: Options = {
        "model": str(resolve(model, progress=_say, weights="values")),
        "precision": ours.precision,
        "kv_gib": kv_gib,
        "max_num_seqs": 256,
        "attention": attention,
        "profile": False,
    }

    def keep(measured: Measured) -> None:
        """Write what is measured so far: otherwise hours are lost if something fails at the end."""
        if save is not None:
            save.write_text(_page(measured, model, rounds), encoding="utf-8")
        if json_file is not None:
            json_file.write_text(json.dumps(_figures(measured, model), indent=1) + "\n", encoding="utf-8")

    try:
        measured = _run(workloads, systems, options, rounds, keep, profiled=profiled)
    except WorkerFailed as error:
        _say(str(error))
        raise typer.Exit(1) from None
    print(_page(measured, model, rounds), end="")


def _workloads(names: list[str] | None, trace: Path | None) -> list[Workload]:
    chosen = names or ["uniform-64"]
    if "all" in chosen:
        chosen = list(STANDARD)
    return [find_workload(name, trace) for name in chosen]


def _peers(
    names: list[str] | None, model: str, vllm: Path, settings: dict[str, str], *, bits: str
) -> list[list[System]]:
    """Each peer in the ways that are to be tried.

    Raises ValueError for an unknown name, or for a peer that is asked for by name and cannot be measured.
    """
    chosen = names or PEERS
    if unknown := set(chosen) - {*PEERS, "none"}:
        raise ValueError(f"--peer {', '.join(sorted(unknown))}: must be {', '.join(PEERS)} or none")
    peers = []
    for name in (peer for peer in PEERS if peer in chosen):
        try:
            peers.append(peer_systems(name, model, vllm, settings, _say, bits=bits))
        except Unavailable as error:
            if names:
                raise
            _say(f"{name} is skipped: {error}")
    return peers


def _pairs(settings: list[str] | None) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings or ()]
    for name, sign, _ in pairs:
        if not name or not sign:
            raise ValueError(f"--vllm-env {name}: must be NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _run(
    workloads: list[Workload],
    systems: list[list[System]],
    options: Options,
    rounds: int,
    keep: Callable[[Measured], None],
    *,
    profiled: bool,
) -> Measured:
    """Measure all; `keep` is called with what there is whenever there is more."""
    vocab_size = json.loads((Path(options["model"]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    with contextlib.ExitStack() as stack:

        def start(system: System, options: Options) -> Worker:
            _say(f"starting {system.name}")
            options = {**options, "precision": system.precision, "model": str(system.model or options["model"])}
            return stack.enter_context(Worker(system.module, system.python, options, system.environment))

        workers, precisions, trials = {}, {}, {}
        for candidates in systems:
            started = [start(system, options) for system in candidates]
            best = 0
            if len(started) > 1:
                rates = tried(started, vocab_size, _say)
                best = rates.index(max(rates))
                ways = (worker.ready["settings"] for worker in started)
                trials[candidates[best].name] = dict(zip(ways, rates, strict=True))
            for worker in started[:best] + started[best + 1 :]:
                worker.close()
            chosen = candidates[best]
            workers[chosen.name], precisions[chosen.name] = started[best], chosen.precision
        measured = Measured([], {name: worker.ready for name, worker in workers.items()}, precisions, trials)
        for each in workloads:
            measured.results.append(measure(each, workers, rounds, vocab_size, _say))
            keep(measured)
        if profiled:
            for worker in workers.values():  # their memory, which a second engine needs
                worker.close()
            ours = System(OURS, precision=precisions[OURS])
            with start(ours, {**options, "profile": True}) as watched:
                measured.profiles = {each.name: profile(each, watched, vocab_size) for each in workloads}
            keep(measured)
            try:
                # Whatever ends the worker, its folder is removed here.
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="batchwright-rates-"))
                with start(ours, {**options, "rates_folder": folder}) as watched:
                    measured.bounds = {each.name: bounded(each, watched, rounds, vocab_size) for each in workloads}
            except WorkerFailed as error:
                _say(f"no bounds are given: {error}")
            keep(measured)
        return measured


def _page(measured: Measured, model: str, rounds: int) -> str:
    rest = [report.trial_list(name, rates) for name, rates in measured.trials.items()]
    if measured.profiles:
        rest += [
            "Where the time of a step goes, ms:",
            report.profile_table(measured.profiles),
        ]
    if measured.bounds:
        rest += [report.bound_paragraph(measured.bounds), report.bound_table(measured.bounds)]
    return report.page(measured.results, measured.precisions, measured.ready, model, rounds, rest)


def _figures(measured: Measured, model: str) -> dict[str, object]:
    return {
        "machine": report.machine(),
        "model": model,
        "systems": measured.ready,
        "precisions": measured.precisions,
        "trials": measured.trials,
        "workloads": [
            {
                "name": result.workload.name,
                "requests": len(result.workload.lengths),
                "prompt_tokens": result.workload.prompt_tokens,
                "generated_tokens": result.workload.generated,
                "tokens_per_second": result.rates,
                "first_tokens_equal": result.agreement,
                "ratios": {
                    other: asdict(ratio) for other in result.rates if other != OURS and (ratio := result.ratio(other))
                },
            }
            for result in measured.results
        ],
        "profiles": measured.profiles,
        "bounds": measured.bounds,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
