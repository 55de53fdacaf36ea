"""What a simulation shows: service levels, times, memory and cost, as numbers to print or to write as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from batchwright.simulation.fleet import Fleet, SimulationResult
from batchwright.simulation.replica import Served, WhyRefused


class Times(msgspec.Struct, frozen=True):
    """Latency percentiles in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float


WhyLeftOut = Literal["encoder", "broken", "too_long", "no_answer", "identical"]
_REASONS: Mapping[WhyLeftOut, str] = {
    "encoder": "for models that generate nothing",
    "broken": "broken",
    "too_long": "too long for the engine",
    "no_answer": "without a length of an answer",
    "identical": "the same as another line",
}


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a job that are not computed, for one reason."""

    reason: WhyLeftOut
    lines: int
    first_line: int
    """Number of the first of them."""
    message: str | None = None
    """What is wrong with it."""

    @property
    def described(self) -> str:
        """The text that is shown for them."""
        where = f"{'line' if self.lines == 1 else 'the first is line'} {self.first_line:,}"
        message = "" if self.message is None else f": {self.message}"
        return f"{self.lines:,} left out, {_REASONS[self.reason]} ({where}{message})"


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that could never be computed, for one reason."""

    reason: WhyRefused
    requests: int
    message: str
    """What is said of the first of them."""

    @property
    def described(self) -> str:
        """The text that is shown for them."""
        limit = "context of the model" if self.reason == "context" else "KV cache"
        which = "the first: " if self.requests > 1 else ""
        return f"{self.requests:,} refused, longer than the {limit} ({which}{self.message})"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Results of simulating a number of replicas; figures without data are None."""

    replicas: int
    online_requests: int
    refused: int
    """Requests that could never be computed: too long for the model, or for the KV cache."""
    refusals: tuple[Refused, ...] = ()
    """The same, by reason."""
    slo_attainment: float | None
    """Share of the online requests that met the goals, or were answered where there are none."""
    ttft_ms: Times | None
    tpot_ms: Times | None
    job_lines: int
    """Requests of batches, refused ones included: those of the job, and of a trace that has some."""
    job_left_out: tuple[LeftOut, ...] = ()
    """Lines of its file that are not simulated, by reason."""
    job_lengths_from: str | None = None
    """Where the lengths of its answers are known from, of which lines do not say it: `expected_tokens`, `same job` or
    `earlier runs` (of the model), `limits` (they are as long as lines allow); `lines`: all say it."""
    job_seconds: float | None
    """Seconds until the last of `job_lines` had ended; None if there were none, or all were refused."""
    seconds: float
    """Seconds until all requests had ended."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in a KV cache."""
    output_tokens: int
    tokens_per_second: float
    """Tokens of answers per second."""
    steps: int
    sequences_per_step: float
    utilization: float
    """Share of the time, over all replicas, in which they computed."""
    kv_peak: float
    """Largest share of the KV cache of a replica that was in use."""
    kv_mean: float
    """Mean share, while they computed."""
    preemptions: int
    cost: float | None = None
    """Dollars of all replicas over `seconds`."""
    cost_per_hour: float | None = None
    cost_per_million_tokens: float | None = None
    """Dollars for a million tokens of answers."""


def outcome_of(
    fleet: Fleet,
    result: SimulationResult,
    *,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    price_per_hour: float | None = None,
    left_out: tuple[LeftOut, ...] = (),
    lengths_from: str | None = None,
) -> Outcome:
    """Return the figures of a simulation, judged by these goals; `price_per_hour`: dollars for one replica.

    `left_out`: lines of the job's file that are not in it; `lengths_from`: see `Outcome.job_lengths_from`.
    """
    online, lines = result.of("online"), result.of("batch")
    answered = [each for each in result.served if not each.refused]
    outputs = sum(each.request.output_tokens for each in answered)
    busy = sum(each.busy_seconds for each in result.replicas)
    steps = sum(each.steps for each in result.replicas)
    blocks = fleet.sizes.num_blocks
    per_hour = None if price_per_hour is None else price_per_hour * fleet.replicas
    cost = None if per_hour is None else per_hour * result.seconds / 3600.0
    return Outcome(
        replicas=fleet.replicas,
        online_requests=len(online),
        refused=len(result.served) - len(answered),
        refusals=_refusals(result.served),
        slo_attainment=sum(_met(each, ttft_ms, tpot_ms) for each in online) / len(online) if online else None,
        ttft_ms=times_of([each.ttft * 1e3 for each in online if not each.refused]),
        tpot_ms=times_of([each.tpot * 1e3 for each in online if not each.refused and each.tpot is not None]),
        job_lines=len(lines),
        job_left_out=left_out,
        job_lengths_from=lengths_from,
        job_seconds=max((each.ended_at for each in lines if not each.refused), default=None),
        seconds=result.seconds,
        prompt_tokens=sum(each.request.prompt_tokens for each in answered),
        cached_tokens=sum(each.cached_tokens for each in answered),
        output_tokens=outputs,
        tokens_per_second=outputs / result.seconds if result.seconds else 0.0,
        steps=steps,
        sequences_per_step=sum(each.occupancy_sum for each in result.replicas) / steps if steps else 0.0,
        utilization=busy / (fleet.replicas * result.seconds) if result.seconds else 0.0,
        kv_peak=max(each.kv_blocks_peak for each in result.replicas) / blocks,
        kv_mean=sum(each.kv_block_seconds for each in result.replicas) / busy / blocks if busy else 0.0,
        preemptions=sum(each.preemptions for each in answered),
        cost=cost,
        cost_per_hour=per_hour,
        cost_per_million_tokens=cost / outputs * 1e6 if cost is not None and outputs else None,
    )


def times_of(values: Sequence[float]) -> Times | None:
    """Return the percentiles of `values`; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Times(p50=p50, p90=p90, p99=p99, mean=sum(ordered) / len(ordered))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value at this share of sorted values, interpolated linearly."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _refusals(served: Sequence[Served]) -> tuple[Refused, ...]:
    found: dict[WhyRefused, list[str]] = {}
    for each in served:
        if each.refusal is not None:
            found.setdefault(each.refusal.reason, []).append(each.refusal.message)
    return tuple(Refused(reason=reason, requests=len(said), message=said[0]) for reason, said in found.items())


def _met(served: Served, ttft_ms: float | None, tpot_ms: float | None) -> bool:
    if served.refused:
        return False
    if ttft_ms is not None and served.ttft * 1e3 > ttft_ms:
        return False
    return tpot_ms is None or served.tpot is None or served.tpot * 1e3 <= tpot_ms
