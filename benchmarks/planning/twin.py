"""The digital twin against the engine: online traces beside a job, served for real and simulated.

The engine writes to all of its KV cache once, is probed as `batchwright simulate` would, and warmed up for some
seconds. Before each trace the cost model is fitted to what is kept of the steps so far, as after each run. Then it is
served in real time, some times, through `AsyncEngine`, and simulated with that cost model.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from batchwright import AsyncEngine, Engine, InferenceRequest, InferenceResponse
from batchwright.engine.cost_probe import probe
from batchwright.engine_config import EngineConfig
from batchwright.request import Traffic
from batchwright.scheduling.sizes import EngineSizes
from batchwright.scheduling.step_costs import StepCosts, StepRecord, fitted
from batchwright.simulation.fleet import Fleet, simulate
from batchwright.simulation.outcome import times_of
from batchwright.simulation.requests import SimulatedRequest
from batchwright.simulation.traces import drawn_lengths, poisson, read_trace, shifted, with_rate
from benchmarks.throughput.report import machine, table

_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
_CONFIG = EngineConfig(kv_memory="1GiB", device="cpu", ttft_ms=1000, tpot_ms=100)
_SHORTER = 8
"""By which the lengths of the traces are divided, so that this machine bears enough of their requests."""
_ONLINE, _JOB = 0.45, 0.3
"""Shares of the engine's time that online requests and the job take."""
_SEEDS = 11
"""Simulations, which count together: the errors of steps are drawn."""
_WARM_UP = 60.0
"""Seconds of requests before the first trace."""
_BAR, _MEDIAN_BAR = 0.05, 0.03

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine, or its twin, did."""

    ttft: Sequence[float]
    """Milliseconds to the first token, of every online request."""
    tpot: Sequence[float]
    """Milliseconds for each token after it, of every online request with more than one."""
    job: float
    """Seconds until the last line of the job had ended."""


def _figures(served: Sequence[Served]) -> tuple[float, float, float]:
    """Return the 99th percentiles of the requests of all rounds, and the mean time of the job."""
    ttft, tpot = [each for one in served for each in one.ttft], [each for one in served for each in one.tpot]
    return _p99(ttft), _p99(tpot), statistics.mean(one.job for one in served)


@app.command()
def twin(
    seconds: Annotated[float, typer.Option(min=1, help="Of each trace.")] = 225.0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each trace is served; all count together.")] = 3,
    model: Annotated[str, typer.Option(help="Model.")] = "smollm2-135m",
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the page here.")] = None,
) -> None:
    """`batchwright simulate` against the engine: TTFT p99, TPOT p99 and the time of a job beside online requests."""
    page = asyncio.run(_page(model, seconds, rounds))
    print(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


async def _page(model: str, seconds: float, rounds: int) -> str:
    engine = Engine(model, _CONFIG)
    record, facts = engine.core.scheduler.record, engine.facts
    _write_cache(engine)
    record.clear()
    probe(engine)
    sizes = facts.sizes(_CONFIG)
    vocab = engine.core.body.vocab_size
    so_far = StepRecord()
    rows, errors, errors_after = [], list[float](), list[float]()
    async with AsyncEngine(engine) as asynchronous:
        costs = fitted(record.measurements)
        online, job = _planned(_chats(), costs, sizes, _WARM_UP)
        await _serve(asynchronous, online, job, vocab)
        for name, requests in _traces():
            so_far.include(record)
            record.clear()
            costs = fitted(so_far.measurements)
            online, job = _planned(requests, costs, sizes, seconds)
            served = [await _serve(asynchronous, online, job, vocab) for _ in range(rounds)]
            predicted, predicted_after = (
                _predicted(each, sizes, online, job) for each in (costs, fitted(record.measurements))
            )
            cells = []
            each_round = zip(*(_figures([each]) for each in served), strict=True)
            for place, (figure, real) in enumerate(zip(_figures(served), each_round, strict=True)):
                errors.append(predicted[place] / figure - 1.0)
                errors_after.append(predicted_after[place] / figure - 1.0)
                span = f" ({min(real):,.1f} to {max(real):,.1f})" if rounds > 1 else ""
                cells.append(
                    f"{figure:,.1f}{span} · {predicted[place]:,.1f} · {errors[-1]:+.1%} · {errors_after[-1]:+.1%}"
                )
            rows.append([name, f"{len(online):,} + {len(job):,}", *cells])
    host = machine()
    served_as = "one round" if rounds == 1 else f"{rounds} rounds together, and the range of each alone"
    return "\n\n".join(
        [
            "# The digital twin",
            f"{model}, {engine.stats.implementation}, under three online traces of {seconds:g} s beside a job, with a"
            f" goal of {_CONFIG.ttft_ms:g} ms to the first token and {_CONFIG.tpot_ms:g} ms for each after it. Each"
            f" cell: the engine ({served_as}), the simulation ({_SEEDS} of them together), the"
            " error, and the error with a cost model fitted to the steps of the trace itself, which no forecast can"
            " know: the errors that remain do not come from changes of the machine. The cost model is fitted anew"
            f" before each trace, to what is kept of the steps so far, at last {costs.steps}: 90% of them are within"
            f" {costs.within(0.9):.1%} of it."
            f" {host['date']}; {host['processor']}, Python {host['python']}.",
            table(["trace", "requests + lines", "TTFT p99, ms", "TPOT p99, ms", "job, s"], rows),
            _verdict("Each within {bar:.0%}, the median within {median:.0%}", errors),
            _verdict("With a cost model fitted to the steps of the trace itself", errors_after),
        ]
    )


def _write_cache(engine: Engine) -> None:
    """Write to all blocks of the KV cache once: the host of a virtual machine allocates their memory only then.

    That takes 7% of the steps in which it happens, once in the life of a service.
    """
    draw, blocks = random.Random(0), engine.core.scheduler.blocks
    vocab, longest = engine.core.body.vocab_size, 32 * blocks.block_size
    for _ in range(0, blocks.num_blocks * blocks.block_size, longest):
        prompt = [draw.randrange(vocab) for _ in range(longest)]
        engine.submit(InferenceRequest(prompt, max_tokens=1, ignore_eos=True, seed=0))
        while engine.unfinished:
            engine.step()


def _predicted(
    costs: StepCosts, sizes: EngineSizes, online: Sequence[SimulatedRequest], job: Sequence[SimulatedRequest]
) -> tuple[float, float, float]:
    """Return the figures of some simulations."""
    return _figures([_simulated(costs, sizes, online, job, seed) for seed in range(_SEEDS)])


def _verdict(text: str, errors: Sequence[float]) -> str:
    worst, median = max(map(abs, errors)), statistics.median(map(abs, errors))
    verdict = "Met" if worst <= _BAR and median <= _MEDIAN_BAR else "Missed"
    return f"{text.format(bar=_BAR, median=_MEDIAN_BAR)}: worst {worst:.1%}, median {median:.1%}: **{verdict}.**"


def _traces() -> list[tuple[str, list[SimulatedRequest]]]:
    """Return three kinds of traffic: chats with their bursts, chats with shared prefixes, and random arrivals."""
    draw = random.Random(7)
    prefixes = [tuple(range(100 * number, 100 * number + 8)) for number in range(40)]
    behind = [
        replace(each, prompt_tokens=each.prompt_tokens + 128, blocks=draw.choice(prefixes), block_tokens=16)
        for each in drawn_lengths(4000, 80.0, 30.0, 5)
    ]
    return [
        ("Azure, conversations", _chats()),
        ("shared prefixes, random times", poisson(behind, 1.0, 3)),
        ("Poisson, drawn lengths", poisson(drawn_lengths(4000, 150.0, 40.0, 2), 1.0, 4)),
    ]


def _chats() -> list[SimulatedRequest]:
    """Return the Azure trace with shorter lengths; without the file, bursts of requests with lengths like its own."""
    path = _DATA / "azure_llm_2023_conv.csv"
    if not path.exists():
        return poisson(drawn_lengths(4000, 1155 / _SHORTER, 211 / _SHORTER, 1), 1.0, 1)
    with path.open(encoding="utf-8") as file:
        found = read_trace(file, path.name, 4000)
    return [
        replace(
            each,
            prompt_tokens=max(1, each.prompt_tokens // _SHORTER),
            output_tokens=max(2, each.output_tokens // _SHORTER),
        )
        for each in found
    ]


def _planned(
    requests: Sequence[SimulatedRequest], costs: StepCosts, sizes: EngineSizes, seconds: float
) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
    """Return online requests of so many seconds and a job that take their shares of the engine's time."""
    lines = drawn_lengths(400, 100.0, 60.0, 9)
    rate = _ONLINE / _seconds_each(requests[:400], costs, sizes)
    online = [each for each in with_rate(requests, rate) if each.arrived_at < seconds]
    job = lines * 100
    # The first of them comes when the job has begun, which takes a moment.
    online = [replace(each, arrived_at=each.arrived_at + 1.0) for each in shifted(online)]
    return online, job[: max(1, int(_JOB * seconds / _seconds_each(lines, costs, sizes)))]


def _seconds_each(requests: Sequence[SimulatedRequest], costs: StepCosts, sizes: EngineSizes) -> float:
    fleet = Fleet(1, sizes, EngineConfig(), costs, seed=None)
    return simulate(fleet, [], requests).seconds / len(requests)


def _simulated(
    costs: StepCosts,
    sizes: EngineSizes,
    online: Sequence[SimulatedRequest],
    job: Sequence[SimulatedRequest],
    seed: int,
) -> Served:
    fleet = Fleet(1, sizes, _CONFIG, costs, seed=seed)
    result = simulate(fleet, online, job)
    answered, lines = result.of("online"), result.of("batch")
    return Served(
        [each.ttft * 1e3 for each in answered],
        [each.tpot * 1e3 for each in answered if each.tpot is not None],
        max(each.ended_at for each in lines),
    )


async def _serve(
    engine: AsyncEngine, online: Sequence[SimulatedRequest], job: Sequence[SimulatedRequest], vocab: int
) -> Served:
    """Send requests at their times, and lines as `run` does; return what clients saw."""
    # What an earlier trace has left in the cache is not to be found.
    number = time.time_ns()
    draw = random.Random(number)
    requests = [_request(each, "online", draw, number, vocab) for each in online]
    lines = iter([_request(each, "batch", draw, number, vocab) for each in job])
    began, ended = time.perf_counter(), list[float]()

    async def work() -> None:
        for line in lines:
            await _ask(engine, line)
            ended.append(time.perf_counter() - began)

    workers = [asyncio.create_task(work()) for _ in range(2 * engine.stats.max_num_seqs)]
    asked = []
    for each, request in zip(online, requests, strict=True):
        await asyncio.sleep(began + each.arrived_at - time.perf_counter())
        asked.append(asyncio.create_task(_ask(engine, request)))
    answers = await asyncio.gather(*asked)
    await asyncio.gather(*workers)
    ttft = [_value(each.ttft_ms) for each in answers]
    tpot = [
        (each.latency_ms - first) / (each.tokens_generated - 1)
        for each, first in zip(answers, ttft, strict=True)
        if each.tokens_generated > 1
    ]
    return Served(ttft, tpot, max(ended))


def _request(each: SimulatedRequest, traffic: Traffic, draw: random.Random, trace: int, vocab: int) -> InferenceRequest:
    """Return a request of these lengths, whose prefix is that of others of the `trace` with the same blocks."""
    ordinary = range(vocab // 40, vocab)
    tokens = [
        token
        for block in each.blocks
        for token in random.Random(f"{trace} {block}").choices(ordinary, k=each.block_tokens)
    ]
    tokens += draw.choices(ordinary, k=each.prompt_tokens - len(tokens))
    # Drawn answers, as chats have them: they are not guessed ahead, which a simulation could not know.
    options: dict[str, Any] = {"temperature": 0.8, "seed": draw.randrange(2**31), "ignore_eos": True}
    return InferenceRequest(tokens, max_tokens=each.output_tokens, traffic=traffic, **options)


async def _ask(engine: AsyncEngine, request: InferenceRequest) -> InferenceResponse:
    response = await engine.generate(request)
    if response.error is not None:
        raise response.error
    return response


def _p99(values: Sequence[float]) -> float:
    found = times_of(values)
    if found is None:
        raise RuntimeError("the trace is too short: give more seconds")
    return found.p99


def _value(found: float | None) -> float:
    if found is None:
        raise RuntimeError("an answer came without a first token")
    return found


if __name__ == "__main__":
    app()
