"""One run: an engine, its traffic, and the outcome. Clients run where a server's do: on the event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from batchwright import AsyncEngine, InferenceRequest
from batchwright.engine.engine_stats import EngineStats
from batchwright.request import Traffic
from benchmarks.coserve.traffic import arrivals, lines


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run."""

    name: str
    model: str
    kv_gib: int
    ramp: float
    """Seconds of traffic before the window."""
    seconds: float
    """Seconds of the window: requests that are due in it count, and tokens that are generated in it."""
    rate: float = 0.0
    """Online requests per second."""
    job: bool = False
    ttft_ms: float | None = None
    """TTFT bound of the engine's SLO; None: it is given no SLO."""
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """One online request that was due in the window. Milliseconds, as its client saw them."""

    ttft_ms: float
    tpot_ms: float


@dataclass(slots=True)
class Outcome:
    setting: Setting
    seconds: float
    """Actual seconds of the window."""
    online_tokens: int
    """Online tokens generated in the window."""
    batch_tokens: int
    steps: int
    step_seconds: float
    preemptions: int
    margin: float
    """Margin of the learned model of step times, at the end."""
    implementation: str
    served: list[Served] = field(default_factory=list)

    @property
    def online_rate(self) -> float:
        """Tokens a second."""
        return self.online_tokens / self.seconds

    @property
    def batch_rate(self) -> float:
        """Tokens a second."""
        return self.batch_tokens / self.seconds

    @property
    def step_ms(self) -> float:
        """Mean milliseconds of a step."""
        return self.step_seconds / self.steps * 1e3

    def within(self, ttft_ms: float, tpot_ms: float) -> float:
        """Share of the online requests that met both bounds."""
        met = sum(each.ttft_ms <= ttft_ms and each.tpot_ms <= tpot_ms for each in self.served)
        return met / len(self.served)


def run(setting: Setting, vocab_size: int) -> Outcome:
    """Load the model, then run."""
    engine = AsyncEngine(
        setting.model,
        dtype="bfloat16",
        device="cpu",
        kv_memory=f"{setting.kv_gib}GiB",
        ttft_ms=setting.ttft_ms,
        tpot_ms=setting.tpot_ms,
    )
    return asyncio.run(_run(engine, setting, vocab_size))


async def _run(engine: AsyncEngine, setting: Setting, vocab_size: int) -> Outcome:
    async with engine:
        await engine.generate(InferenceRequest([1] * 64, max_tokens=4, ignore_eos=True))  # the first step sets up
        source = lines(vocab_size)
        workers = 2 * engine.stats.max_num_seqs if setting.job else 0
        job = [asyncio.create_task(_work(engine, source)) for _ in range(workers)]
        window = asyncio.create_task(_window(engine, setting))
        served = await _ask_all(engine, setting, vocab_size) if setting.rate else []
        outcome = await window
        outcome.served = served
        for task in job:
            task.cancel()
        await asyncio.gather(*job, return_exceptions=True)
    return outcome


async def _ask_all(engine: AsyncEngine, setting: Setting, vocab_size: int) -> list[Served]:
    """Send requests at their times until all that are due in the window are answered."""
    began, counted, others = time.perf_counter(), list[asyncio.Task[Served]](), list[asyncio.Task[Served]]()
    for arrival in arrivals(setting.rate, vocab_size):
        due = began + arrival.at
        await asyncio.sleep(due - time.perf_counter())
        in_window = 0.0 <= arrival.at - setting.ramp < setting.seconds
        if not in_window and arrival.at > setting.ramp and all(task.done() for task in counted):
            break
        task = asyncio.create_task(_ask(engine, arrival.request, due))
        (counted if in_window else others).append(task)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return [task.result() for task in counted]


async def _ask(engine: AsyncEngine, request: InferenceRequest, due: float) -> Served:
    first = last = math.nan
    tokens = 0
    async for event in engine.stream(request):
        if event.response is not None and event.response.error is not None:
            raise event.response.error
        last = time.perf_counter()
        if not tokens:
            first = last
        tokens += len(event.token_ids)
    if tokens != request.max_tokens:
        raise RuntimeError(f"{tokens} of {request.max_tokens} tokens came")
    return Served((first - due) * 1e3, (last - first) / (tokens - 1) * 1e3)


async def _work(engine: AsyncEngine, source: Iterator[InferenceRequest]) -> None:
    """Work on one place of the job: one line after another."""
    while True:
        response = await engine.generate(next(source))
        if response.error is not None:
            raise response.error


async def _window(engine: AsyncEngine, setting: Setting) -> Outcome:
    await asyncio.sleep(setting.ramp)
    began, before = time.perf_counter(), engine.stats
    await asyncio.sleep(setting.seconds)
    after = engine.stats
    return Outcome(
        setting,
        seconds=time.perf_counter() - began,
        online_tokens=_generated(after, "online") - _generated(before, "online"),
        batch_tokens=_generated(after, "batch") - _generated(before, "batch"),
        steps=after.steps - before.steps,
        step_seconds=after.step_seconds - before.step_seconds,
        preemptions=after.preemptions - before.preemptions,
        margin=after.step_margin,
        implementation=after.implementation,
    )


def _generated(stats: EngineStats, traffic: Traffic) -> int:
    return stats.traffic[traffic].generated_tokens
