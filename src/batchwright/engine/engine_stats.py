"""The statistics of an engine that every run reports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from batchwright.histograms import Histogram, Recent
from batchwright.request import Traffic


@dataclass(slots=True)
class TrafficStats:
    """Statistics of one class of traffic. Latencies are milliseconds, of requests that got the tokens they measure."""

    waiting: int = 0
    """Sequences that wait for a slot now."""
    running: int = 0
    """Sequences that have a slot now."""
    submitted: int = 0
    completed: int = 0
    """Requests answered without an error."""
    failed: int = 0
    """Requests answered with an error, cancelled and expired ones included."""
    preemptions: int = 0
    computed_tokens: int = 0
    """Prompt and output tokens computed in steps, with recomputed ones counted again."""
    prefill_tokens: int = 0
    """Prompt tokens computed, as in `EngineStats`."""
    generated_tokens: int = 0
    ttft_ms: Histogram = field(default_factory=Histogram)
    tpot_ms: Histogram = field(default_factory=Histogram)
    recent_ttft_ms: Recent = field(default_factory=Recent)
    recent_tpot_ms: Recent = field(default_factory=Recent)

    @classmethod
    def merged(cls, now: Sequence[TrafficStats], gone: Sequence[TrafficStats]) -> TrafficStats:
        """Return the statistics of several engines as of one; `gone`: those of engines that hold nothing any more."""
        every = [*now, *gone]
        summed = _summed(cls, every, ())
        summed |= {name: sum(getattr(each, name) for each in now) for name in ("waiting", "running")}
        summed |= {
            name: Recent.merged(getattr(each, name) for each in every) for name in ("recent_ttft_ms", "recent_tpot_ms")
        }
        return cls(**summed)

    def copy(self) -> TrafficStats:
        """Return a copy that does not change."""
        latencies = ("ttft_ms", "tpot_ms", "recent_ttft_ms", "recent_tpot_ms")
        return replace(self, **{name: getattr(self, name).copy() for name in latencies})


@dataclass(slots=True)
class EngineStats:
    """Statistics since the engine started. Times are seconds, latencies milliseconds."""

    implementation: str = ""
    """Names of the body, attention, dtype and device."""
    max_num_seqs: int = 0
    kv_blocks: int = 0
    block_size: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed (recomputed ones counted again), without prefix-cache hits."""
    decode_tokens: int = 0
    """Rows that computed a next token, forced ones included."""
    drafted_tokens: int = 0
    """Guesses at next tokens, computed along with decodes."""
    accepted_tokens: int = 0
    """Drafted tokens that were right: each saved its sequence a step."""
    forced_tokens: int = 0
    """Generated tokens that a grammar left no choice about: known without a step of their own."""
    masks: int = 0
    """Masks of allowed tokens that were computed for answers of a given form."""
    mask_seconds: float = 0.0
    """Time spent on masks, which is part of the steps."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that ended."""
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were taken from the prefix cache when the request was first admitted."""
    prefill_seconds: float = 0.0
    """Model time of prefill tokens, by their share of each step."""
    decode_seconds: float = 0.0
    model_seconds: float = 0.0
    """Time in the forward pass and the choice of tokens."""
    step_seconds: float = 0.0
    """Time in whole steps, scheduling and bookkeeping included."""
    preemptions: int = 0
    occupancy_sum: int = 0
    """Sum over steps of the sequences in the step."""
    occupancy_peak: int = 0
    kv_blocks_used: int = 0
    """Blocks in use now."""
    kv_blocks_peak: int = 0
    rows_computed: int = 0
    """Rows that went through the model's matrix products."""
    ttft_ms: Histogram = field(default_factory=Histogram)
    tpot_ms: Histogram = field(default_factory=Histogram)
    latency_ms: Histogram = field(default_factory=Histogram)
    last_step_seconds: float = 0.0
    last_step_predicted: float | None = None
    """Seconds that were predicted for the last step; None before any prediction."""
    peak_memory_bytes: int = 0
    """Peak resident memory of the replica's process; 0 for an engine in this process."""
    step_margin: float = 1.0
    """Ratio of measured to predicted seconds that 95% of the recent steps stayed within; at least 1."""
    traffic: dict[Traffic, TrafficStats] = field(
        default_factory=lambda: {"online": TrafficStats(), "batch": TrafficStats()}
    )

    @classmethod
    def merged(cls, now: Sequence[EngineStats], gone: Sequence[EngineStats] = ()) -> EngineStats:
        """Return the statistics of several engines as of one; `gone`: those of ended engines, whose counts are
        included.

        Raises ValueError without any engine.
        """
        every = [*now, *gone]
        if not every:
            raise ValueError("merged(): give the figures of at least one engine")
        latest = every[0]
        summed = _summed(cls, every, ("implementation", "block_size", "last_step_predicted", "step_margin", "traffic"))
        gauges = ("max_num_seqs", "kv_blocks", "kv_blocks_used", "peak_memory_bytes")
        summed |= {name: sum(getattr(each, name) for each in now or gone[:1]) for name in gauges}
        summed |= {
            name: max(getattr(each, name) for each in every)
            for name in ("occupancy_peak", "kv_blocks_peak", "last_step_seconds", "step_margin")
        }
        traffic: dict[Traffic, TrafficStats] = {
            name: TrafficStats.merged([each.traffic[name] for each in now], [each.traffic[name] for each in gone])
            for name in latest.traffic
        }
        return cls(
            **summed,
            implementation=latest.implementation,
            block_size=latest.block_size,
            last_step_predicted=latest.last_step_predicted,
            traffic=traffic,
        )

    def copy(self) -> EngineStats:
        """Return a copy that does not change."""
        latencies = {name: getattr(self, name).copy() for name in ("ttft_ms", "tpot_ms", "latency_ms")}
        return replace(self, **latencies, traffic={name: each.copy() for name, each in self.traffic.items()})

    @property
    def occupancy_mean(self) -> float:
        """Mean number of sequences in a step."""
        return self.occupancy_sum / self.steps if self.steps else 0.0

    @property
    def padding_efficiency(self) -> float:
        """Ratio of useful rows to computed rows: 1.0 means no padding."""
        useful = self.prefill_tokens + self.decode_tokens + self.accepted_tokens
        return useful / self.rows_computed if self.rows_computed else 1.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens computed per second of their model time; 0 before any."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Output tokens computed per second of their model time, right guesses included; 0 before any."""
        return (self.decode_tokens + self.accepted_tokens) / self.decode_seconds if self.decode_seconds else 0.0


def _summed(kind: type[Any], every: Sequence[Any], without: Collection[str]) -> dict[str, Any]:
    """Return the sums of fields that are numbers, and the histograms of all values, by name."""
    names = [each.name for each in fields(kind) if each.name not in without]
    found = {name: [getattr(each, name) for each in every] for name in names}
    return {
        name: Histogram.merged(values) if isinstance(values[0], Histogram) else sum(values)
        for name, values in found.items()
        if not isinstance(values[0], Recent)
    }


@dataclass(frozen=True, slots=True)
class UnfinishedWork:
    """Work on requests that have not ended."""

    answers: Sequence[tuple[int, int]]
    """For each unfinished answer, its tokens so far and its limit."""
    prompt_tokens: int
    """Prompt tokens computed."""
    prompt_tokens_left: int
