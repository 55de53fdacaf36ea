"""`batchwright simulate`: what replicas of a model would do under given traffic, in virtual time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.markup import escape

from batchwright.cli.flags import with_engine_flags, with_job_sampling_flags
from batchwright.cli.quantities import duration
from batchwright.cli.visible_text import visible
from batchwright.durable_files import require_writable
from batchwright.engine_config import EngineConfig
from batchwright.errors import InputError, InvalidRequest
from batchwright.models import DEFAULT_MODEL, require_generating
from batchwright.pricing.rates import money
from batchwright.request import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from batchwright.jobs.job_lengths import JobLengths
    from batchwright.kept_costs import KeptCosts
    from batchwright.simulation.outcome import Outcome
    from batchwright.simulation.replica import SimulatedReplica
    from batchwright.simulation.requests import SimulatedRequest

_PARAGRAPHS = (
    "Answer questions about capacity: what replicas of a model do under given traffic, in seconds instead of hours.",
    "The scheduler, the KV blocks, the SLO, the share of batches and the router are those of the service, and a job's "
    "lines have the order of `run`; only step times are modelled, by a cost model fitted to steps that every run "
    "measures on this machine. Before the first run, the model is loaded and probed for some seconds. Drafts of greedy "
    "answers are not simulated.",
    "Example: batchwright simulate --trace azure_llm_2023_conv.csv --rate 2 --replicas 1,2,4 --ttft-ms 500 "
    "--tpot-ms 50 --job prompts.jsonl",
    "Exit status: 0; 2 bad usage; 1 anything else.",
)
HELP = "\n\n".join(_PARAGRAPHS)
_LEAST_RATE, _MOST_TOKENS, _MOST_DOLLARS = 1e-9, 1e9, 1e9
"""Bounds of flags: values far beyond them would give infinite figures."""
_MOST_REPLICAS = 1000
_STATUS_SECONDS = 0.2
"""Time between two updates of what is being done."""
_LEAST_IN_MINUTES = 600.0
"""Seconds below which tenths are shown, to distinguish numbers of replicas."""

_traffic = partial(typer.Option, rich_help_panel="Traffic", show_default=False)
_output = partial(typer.Option, rich_help_panel="Output", show_default=False)
_TRACE = (
    "Online requests: a CSV with TIMESTAMP, ContextTokens and GeneratedTokens (Azure), JSON Lines with timestamp, "
    "input_length, output_length and hash_ids (Mooncake), or the service's own --trace-log."
)
_RATE = "Online requests a second, to which the times of the trace are stretched (default: its own)."
_POISSON = "Let online requests arrive at random times, at --rate."
_REQUESTS = "Only this many of the trace, from the first; without a trace, how many are drawn (default: 1000)."
_PROMPTS = "Without a trace: mean tokens of drawn prompts."
_OUTPUTS = "Without a trace: mean tokens of drawn answers."
_JOB = (
    "A job beside them: any input of run except a stream, or results of an earlier run, whose lengths are those of its "
    "answers. Its lines are there from the start, as a batch, in the order of `run`."
)
_FORMAT = "With --job: jsonl, json, txt, csv, tsv, parquet or arrow, whatever the extension says."
_EXPECTED = (
    "Tokens of an answer of the job, where the file does not say (default: like the answers of earlier runs of it, "
    "else of the model, else as many as a line allows)."
)
_MODEL = f"A built-in name, a local folder, a GGUF file or a hub id (default: {DEFAULT_MODEL})."
_COSTS = (
    "A file of step costs, such as one that --save-costs wrote on another machine; refused if they were measured of "
    "another model, or with other options of the engine, than the flags name."
)
_SAVE_COSTS = "Write the step costs that were used."
_PLOT = "Draw the outcome: an .svg or .html file."


@with_engine_flags
@with_job_sampling_flags
def simulate_command(
    context: typer.Context,
    trace: Annotated[Path | None, _traffic(metavar="FILE", help=_TRACE)] = None,
    rate: Annotated[float | None, _traffic(metavar="R", help=_RATE)] = None,
    poisson: Annotated[bool, _traffic("--poisson", help=_POISSON)] = False,
    requests: Annotated[int | None, _traffic(min=1, metavar="N", help=_REQUESTS)] = None,
    prompt_tokens: Annotated[float, _traffic(min=1, help=_PROMPTS, show_default=True)] = 1000.0,
    output_tokens: Annotated[float, _traffic(min=1, help=_OUTPUTS, show_default=True)] = 200.0,
    job: Annotated[str | None, _traffic(metavar="FILE", help=_JOB)] = None,
    input_format: Annotated[str | None, _traffic(help=_FORMAT)] = None,
    expected_tokens: Annotated[int | None, _traffic(min=1, metavar="N", help=_EXPECTED)] = None,
    replicas: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of replicas to try.")] = "1",
    model: Annotated[str | None, typer.Option(help=_MODEL, show_default=False)] = None,
    costs: Annotated[Path | None, typer.Option(metavar="FILE", help=_COSTS, show_default=False)] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, metavar="DOLLARS", help="What one replica costs.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that the simulation draws.")] = 0,
    as_json: Annotated[bool, _output("--json", help="Print a JSON array instead of a table.")] = False,
    plot: Annotated[Path | None, _output(metavar="FILE", help=_PLOT)] = None,
    save_costs: Annotated[Path | None, _output(metavar="FILE", help=_SAVE_COSTS)] = None,
    *,
    engine: EngineConfig,
    sampling: dict[str, Any],
) -> None:
    """See `HELP`."""
    from rich.console import Console

    from batchwright.kept_costs import write_costs
    from batchwright.simulation.fleet import Fleet, simulate
    from batchwright.simulation.outcome import outcome_of

    defaults = _defaults(sampling, has_job=job is not None)
    name = DEFAULT_MODEL if model is None else model
    require_generating(name)
    numbers = _numbers(replicas)
    if price_per_hour is not None and not 0.0 <= price_per_hour <= _MOST_DOLLARS:
        raise InputError(f"--price-per-hour {price_per_hour:g}: must be a number of dollars up to {_MOST_DOLLARS:,.0f}")
    if plot is not None or save_costs is not None:
        read = {"--trace": trace, "--costs": costs, "--model": model, "--json-schema": context.params["json_schema"]}
        others = {flag: [Path(given)] for flag, given in read.items() if given is not None}
        _check_written(plot, save_costs, others | {"--job": [] if job is None else _local_files(job)})
    console = Console(stderr=True)
    online = _online(trace, rate, requests, (prompt_tokens, output_tokens), seed, poisson=poisson, has_job=bool(job))
    kept = _measured_costs(console, name, engine) if costs is None else _costs_in(costs, model, context.params)
    if save_costs is not None:
        write_costs(save_costs, kept)
    try:
        sizes = kept.facts.sizes(engine)
    except ValueError as error:
        raise InputError(str(error)) from error
    step_costs = kept.costs
    lengths = None
    if job is not None:
        [replica] = Fleet(1, sizes, engine, step_costs).engines()
        with _status(console, f"counting the tokens of {job}", "lines") as counted:
            lengths = _lengths(
                job, input_format, name, kept, sizes.max_model_len, replica, defaults, expected_tokens, seed, counted
            )
    lines = [] if lengths is None else lengths.requests
    outcomes = []
    for number in numbers:
        fleet = Fleet(number, sizes, engine, step_costs, seed=seed)
        doing = f"simulating {number:,} replica{'' if number == 1 else 's'}"
        with _status(console, doing, f"of {len(online) + len(lines):,} requests") as ended:
            result = simulate(fleet, online, lines, planned=True, progress=ended)
        outcome = outcome_of(
            fleet,
            result,
            ttft_ms=engine.ttft_ms,
            tpot_ms=engine.tpot_ms,
            price_per_hour=price_per_hour,
            left_out=() if lengths is None else lengths.left_out,
            lengths_from=None if lengths is None else lengths.lengths_from,
        )
        outcomes.append(outcome)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(outcomes), indent=2).decode())
    else:
        _print(kept, step_costs.within(0.9), outcomes, engine)
        # Replicas are alike: what one refuses, all do.
        for refused in outcomes[0].refusals:
            print(f"requests: {refused.described}", file=sys.stderr)
        if lengths is not None:
            _print_notes(lengths, expected_tokens)
    if plot is not None:
        from batchwright.cli.simulation_plots import draw

        draw(outcomes, plot, has_slo=engine.ttft_ms is not None or engine.tpot_ms is not None)


def _defaults(sampling: Mapping[str, Any], *, has_job: bool) -> SamplingParams:
    """Return the parameters of the lines of a job that do not set them. Raises `InputError` if there is no job."""
    from batchwright.jobs.common_failure import SAMPLING_FLAGS
    from batchwright.jobs.run import sampling_defaults

    if sampling and not has_job:
        flags = ["--job-seed" if name == "seed" else SAMPLING_FLAGS[name] for name in sampling]
        raise InputError(f"{', '.join(flags)}: sampling is that of the lines of a --job, and there is none")
    try:
        defaults = sampling_defaults(None, sampling)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
    assert isinstance(defaults, SamplingParams)
    return defaults


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1 or max(numbers) > _MOST_REPLICAS:
        raise InputError(f"--replicas {text}: must be numbers from 1 to {_MOST_REPLICAS:,}, such as 1,2,4")
    return numbers


def _local_files(job: str) -> list[Path]:
    """Return the files of a job, unless they are elsewhere."""
    from batchwright.jobs.input_names import STREAM, expanded
    from batchwright.jobs.remote.addresses import scheme_of

    return [] if job == STREAM or scheme_of(job) is not None else [Path(name) for name in expanded([job])]


def _check_written(plot: Path | None, save_costs: Path | None, read: Mapping[str, list[Path]]) -> None:
    """Raise `InputError` or `MissingExtra` for files that cannot be written, or that flags name to be `read`."""
    from batchwright.cli.simulation_plots import require_library

    others = {f"the file of {flag}": files for flag, files in read.items()}
    if save_costs is not None:
        require_writable("--save-costs", save_costs, others)
        others["the file of --save-costs"] = [save_costs]
    if plot is None:
        return
    if plot.suffix not in (".svg", ".html"):
        raise InputError(f"--plot {plot}: must be a file named .svg or .html")
    require_writable("--plot", plot, others)
    require_library()


def _online(
    trace: Path | None,
    rate: float | None,
    most: int | None,
    means: tuple[float, float],
    seed: int,
    *,
    poisson: bool,
    has_job: bool,
) -> list[SimulatedRequest]:
    """Return the online requests that the flags describe."""
    from batchwright.simulation import traces

    _check_traffic(rate, most, means, poisson=poisson, is_given=poisson or trace is not None)
    if trace is not None:
        try:
            with trace.open(encoding="utf-8-sig") as file:
                found = traces.read_trace(file, str(trace), most)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"--trace {trace} cannot be read: {reason}") from error
    elif poisson:
        found = traces.drawn_lengths(1000 if most is None else most, *means, seed)
    elif has_job:
        return []
    else:
        raise InputError("there is no traffic: give a --trace, or --poisson with a --rate, or a --job")
    if rate is None:
        return found
    return traces.poisson(found, rate, seed) if poisson else traces.with_rate(found, rate)


def _check_traffic(
    rate: float | None, most: int | None, means: tuple[float, float], *, poisson: bool, is_given: bool
) -> None:
    """Raise `InputError` for values that make no sense, and for options of online requests if there are none."""
    if rate is not None and not _LEAST_RATE <= rate < float("inf"):
        raise InputError(f"--rate {rate:g}: must be a number of requests a second, at least {_LEAST_RATE:g}")
    if poisson and rate is None:
        raise InputError("--poisson needs --rate, such as --rate 2")
    for flag, mean in zip(("--prompt-tokens", "--output-tokens"), means, strict=True):
        if not 1.0 <= mean <= _MOST_TOKENS:
            raise InputError(f"{flag} {mean:g}: must be a number of tokens from 1 to {_MOST_TOKENS:,.0f}")
    if rate is not None and not is_given:
        raise InputError(f"--rate {rate:g}: needs --trace or --poisson, which say what comes at that rate")
    if most is not None and not is_given:
        raise InputError(f"--requests {most}: needs --trace or --poisson, of which it takes so many")


def _lengths(
    job: str,
    input_format: str | None,
    model: str,
    kept: KeptCosts,
    longest: int,
    replica: SimulatedReplica,
    defaults: SamplingParams,
    expected_tokens: int | None,
    seed: int,
    progress: Callable[[int], None],
) -> JobLengths:
    from batchwright.inference.loading import load_tokenizer
    from batchwright.jobs.earlier_answers import earlier_answers
    from batchwright.jobs.job_lengths import job_lengths

    return job_lengths(
        job,
        lambda: load_tokenizer(model),
        defaults=defaults,
        longest=longest,
        refusal=replica.refusal,
        expected_tokens=expected_tokens,
        runs=lambda: earlier_answers(model) if kept.may_be_of(model) else (),
        seed=seed,
        input_format=input_format,
        progress=progress,
    )


@contextmanager
def _status(console: Console, doing: str, what: str) -> Iterator[Callable[[int], None]]:
    """Show on a terminal what is being done; the result is called with how many of `what` are done."""
    shown_at = time.monotonic()
    with console.status(escape(f"{doing} …")) as status:

        def progress(done: int) -> None:
            nonlocal shown_at
            if (now := time.monotonic()) >= shown_at + _STATUS_SECONDS:
                shown_at = now
                status.update(escape(f"{doing}: {done:,} {what}"))

        yield progress


def _measured_costs(console: Console, model: str, config: EngineConfig) -> KeptCosts:
    """Return the step costs that are kept for the model, else those of a probe of it."""
    from batchwright.inference.loading import load_engine, measure_costs
    from batchwright.kept_costs import find_costs

    if (kept := find_costs(model, config)) is not None:
        return kept
    with console.status("") as status:

        def progress(text: str) -> None:
            status.update(f"no step costs of {model} are kept yet: {text}")

        with load_engine(model, config, progress) as engine:
            return measure_costs(engine, progress)


def _costs_in(file: Path, model: str | None, given: Mapping[str, Any]) -> KeptCosts:
    """Return the step costs in `file`.

    `given`: values of flags by name. Raises `InputError` if the costs are those of another model than `model`, if any,
    or of an engine with other options.
    """
    from batchwright.kept_costs import read_costs

    try:
        kept = read_costs(file)
    except OSError as error:
        raise InputError(f"--costs {file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"--costs {error}") from error
    if model is not None and not kept.may_be_of(model):
        raise InputError(
            f"--costs {file}: was measured of another model than --model {model}: name the one that it was measured "
            "of, or measure this one with --save-costs on the machine that is to serve"
        )
    for name, measured in kept.measured_otherwise(given).items():
        flag = f"--{'no-' * (given[name] is False)}{name.replace('_', '-')}"
        value = "" if isinstance(given[name], bool) else f" {given[name]}"
        raise InputError(
            f"--costs {file}: was measured with {name}={measured}, not with {flag}{value}: leave the flag out, or "
            "measure steps with it by --save-costs on the machine that is to serve"
        )
    return kept


def _print(kept: KeptCosts, error: float, outcomes: list[Outcome], config: EngineConfig) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("replicas")
    for outcome in outcomes:
        table.add_column(f"{outcome.replicas}", justify="right")
    for title, values in _rows(outcomes, config):
        if any(value is not None for value in values):
            table.add_row(title, *("-" if value is None else value for value in values))
    console = Console()
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)
    where = kept.identity.get("machine", "an unknown machine")
    print(f"by {kept.steps:,} steps measured on {where}; 90% of them within {error:.1%}", file=sys.stderr)


def _print_notes(lengths: JobLengths, expected_tokens: int | None) -> None:
    """Say where the lengths of answers are known from, and which parts of a job's file are not simulated."""
    print(f"job lines: answers {_answers(lengths, expected_tokens)}", file=sys.stderr)
    for each in lengths.left_out:
        print(f"job lines: {visible(each.described)}", file=sys.stderr)
    if not lengths.results:
        return
    prefixes = (
        "what their run found in its cache counts as one prefix that all share"
        if lengths.cached_tokens
        else "prefixes that they share are not known; give the input of their run to have these"
    )
    print(f"job lines: {lengths.results:,} are results, which have lengths and no text: {prefixes}", file=sys.stderr)


def _answers(lengths: JobLengths, expected_tokens: int | None) -> str:
    """Return what answers are assumed to be like."""
    from batchwright.cli.plan_views import answers_like

    if lengths.lengths_from == "expected_tokens":
        return f"have {expected_tokens:,} tokens, as --expected-tokens says, where the file does not say"
    if lengths.lengths_from == "limits":
        return (
            "are as long as lines allow, where the file does not say, since no run tells how long they are: give "
            "--expected-tokens, or the results of a run as --job"
        )
    return f"are {answers_like(lengths.lengths_from, lengths.runs)}" + (
        "" if lengths.lengths_from == "lines" else ", where the file does not say; --expected-tokens says otherwise"
    )


def _rows(outcomes: list[Outcome], config: EngineConfig) -> list[tuple[str, list[str | None]]]:
    goals = [f"{name} ≤ {value:g} ms" for name, value in (("TTFT", config.ttft_ms), ("TPOT", config.tpot_ms)) if value]
    rows: list[tuple[str, list[str | None]]] = [
        ("online requests", [f"{each.online_requests:,}" if each.online_requests else None for each in outcomes]),
        (f"SLO met ({', '.join(goals) or 'answered'})", [_share(each.slo_attainment) for each in outcomes]),
    ]
    for name, found in (("TTFT", [each.ttft_ms for each in outcomes]), ("TPOT", [each.tpot_ms for each in outcomes])):
        for level in ("p50", "p90", "p99"):
            cells = [None if each is None else _ms(getattr(each, level)) for each in found]
            rows.append((f"{name} {level}", cells))
    prices = [
        ("cost per hour", [each.cost_per_hour for each in outcomes]),
        ("cost of all", [each.cost for each in outcomes]),
        ("cost per million tokens", [each.cost_per_million_tokens for each in outcomes]),
    ]
    return [
        *rows,
        ("job lines", [f"{each.job_lines:,}" if each.job_lines else None for each in outcomes]),
        ("job done after", [_seconds(each.job_seconds) for each in outcomes]),
        ("all done after", [_seconds(each.seconds) for each in outcomes]),
        ("refused", [f"{each.refused:,}" if each.refused else None for each in outcomes]),
        ("output tokens/s", [f"{each.tokens_per_second:,.0f}" for each in outcomes]),
        ("prompt found in cache", [_share(each.cached_tokens / max(1, each.prompt_tokens)) for each in outcomes]),
        ("utilization", [_share(each.utilization) for each in outcomes]),
        ("sequences per step", [f"{each.sequences_per_step:.1f}" for each in outcomes]),
        ("KV cache, peak", [_share(each.kv_peak) for each in outcomes]),
        ("KV cache, mean", [_share(each.kv_mean) for each in outcomes]),
        ("preemptions", [f"{each.preemptions:,}" if each.preemptions else None for each in outcomes]),
        *((title, [None if each is None else money(each) for each in found]) for title, found in prices),
    ]


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"


def _seconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.1f} s" if value < _LEAST_IN_MINUTES else duration(value)
