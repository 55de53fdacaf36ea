"""Metrics of the engine for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from batchwright.service.observability.families import counter, fill, gauge, histogram

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

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
    info = gauge("engine_info", "1, with what computes as a label.", "implementation")
    info.add_metric([stats.implementation], 1)
    yield info
    for name, told in _COUNTERS.items():
        total = counter(*told)
        total.add_metric([], getattr(stats, name))
        yield total
    for name, told in _GAUGES.items():
        value = gauge(*told)
        value.add_metric([], getattr(stats, name))
        yield value
    for names, make in ((_BY_TRAFFIC_GAUGES, gauge), (_BY_TRAFFIC_COUNTERS, counter)):
        for name, told in names.items():
            family = make(*told, "traffic")
            for traffic, each in stats.traffic.items():
                family.add_metric([traffic], getattr(each, name))
            yield family
    for name, told in _BY_TRAFFIC_TIMES.items():
        times = histogram(*told, "traffic")
        for traffic, each in stats.traffic.items():
            fill(times, [traffic], getattr(each, name))
        yield times
