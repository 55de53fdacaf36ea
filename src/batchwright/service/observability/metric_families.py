"""Families of Prometheus metrics as `/metrics` shows them, and those of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from batchwright.histograms import Histogram

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

PREFIX = "batchwright_"
ValueFamily: TypeAlias = CounterMetricFamily | GaugeMetricFamily
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the histograms' buckets."""


def counter(name: str, told: str, *labels: str) -> CounterMetricFamily:
    """Return a counter; its name ends with `_total`, which is added."""
    return CounterMetricFamily(PREFIX + name, told, labels=labels)


def gauge(name: str, told: str, *labels: str) -> GaugeMetricFamily:
    """Return a gauge, a value that goes up and down."""
    return GaugeMetricFamily(PREFIX + name, told, labels=labels)


def histogram(name: str, told: str, *labels: str) -> HistogramMetricFamily:
    """Return a histogram, to be filled with `fill`."""
    return HistogramMetricFamily(PREFIX + name, told, labels=labels)


def single(family: ValueFamily, value: float) -> Metric:
    """Return a family without labels, with its value."""
    family.add_metric([], value)
    return family


def labelled(family: ValueFamily, values: Mapping[str, float]) -> Metric:
    """Return a family with one label, with the value of each."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def fill(family: HistogramMetricFamily, labels: list[str], milliseconds: Histogram) -> None:
    """Show a histogram of milliseconds, in seconds."""
    bounds = [*map(str, _SECONDS), "+Inf"]
    counts = milliseconds.at_most([bound * 1e3 for bound in _SECONDS])
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), milliseconds.total / 1e3)


_COUNTERS = {
    "steps": ("engine_steps", "Steps computed."),
    "occupancy_sum": ("engine_step_sequences", "Sequences in those steps."),
    "rows_computed": ("engine_rows", "Rows of tokens that went through the model."),
    "prefill_tokens": ("engine_prefill_tokens", "Prompt tokens computed, recomputed ones counted again."),
    "decode_tokens": ("engine_decode_tokens", "Rows that computed a single next token."),
    "drafted_tokens": ("engine_drafted_tokens", "Guesses at next tokens, computed along with decodes."),
    "accepted_tokens": ("engine_accepted_tokens", "Of those guesses, those that were right."),
    "cached_tokens": ("engine_cached_tokens", "Prompt tokens taken from the prefix cache."),
    "step_seconds": ("engine_step_seconds", "Time in steps, scheduling included."),
    "model_seconds": ("engine_model_seconds", "Of that, in the forward pass and the choice of tokens."),
}
_GAUGES = {
    "max_num_seqs": ("engine_max_sequences", "Most sequences in a step."),
    "kv_blocks": ("engine_kv_blocks", "Blocks of the KV cache."),
    "kv_blocks_used": ("engine_kv_blocks_used", "Of these, held by sequences now."),
}
_BY_TRAFFIC_GAUGES = {
    "waiting": ("engine_waiting_sequences", "Sequences without a place now."),
    "running": ("engine_running_sequences", "Sequences with a place now."),
}
_BY_TRAFFIC_COUNTERS = {
    "preemptions": ("engine_preemptions", "Times that a sequence gave up its place."),
    "computed_tokens": ("engine_computed_tokens", "Tokens computed, of prompts and outputs."),
    "generated_tokens": ("engine_generated_tokens", "Tokens generated."),
}
_BY_TRAFFIC_TIMES = {
    "ttft_ms": ("engine_time_to_first_token_seconds", "From submission to the first token."),
    "tpot_ms": ("engine_time_per_output_token_seconds", "Between two tokens of a sequence."),
}


def engine_families(stats: EngineStats) -> Iterator[Metric]:
    """Yield all metrics. Occupancy is `rate(engine_step_sequences_total) / rate(engine_steps_total)`."""

    def by_traffic(name: str) -> dict[str, float]:
        return {traffic: getattr(each, name) for traffic, each in stats.traffic.items()}

    info = gauge("engine_info", "1, with what computes as a label.", "implementation")
    yield labelled(info, {stats.implementation: 1})
    for name, told in _COUNTERS.items():
        yield single(counter(*told), getattr(stats, name))
    for name, told in _GAUGES.items():
        yield single(gauge(*told), getattr(stats, name))
    for name, told in _BY_TRAFFIC_GAUGES.items():
        yield labelled(gauge(*told, "traffic"), by_traffic(name))
    for name, told in _BY_TRAFFIC_COUNTERS.items():
        yield labelled(counter(*told, "traffic"), by_traffic(name))
    for name, told in _BY_TRAFFIC_TIMES.items():
        times = histogram(*told, "traffic")
        for traffic, each in stats.traffic.items():
            fill(times, [traffic], getattr(each, name))
        yield times
