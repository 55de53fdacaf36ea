"""`/metrics`: the figures of the service for Prometheus, read when they are scraped.

docs/metrics.md says what each of them means; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from batchwright.histograms import Histogram
from batchwright.limiting.quotas import NAMES as QUOTAS
from batchwright.priority_levels import ANSWERS, DEADLINES
from batchwright.request import Traffic
from batchwright.service.observability.figures import (
    END_REASONS,
    CallFigures,
    ConnectionFigures,
    HttpFigures,
    dispatch_reasons,
    endpoint_figures,
    engine_stats,
)
from batchwright.service.observability.slo_classes import TARGETS, VERDICTS, SloFigures
from batchwright.service.observability.timed_store import StoreFigures
from batchwright.service.worker.worker import WorkerStats
from batchwright.store.records import BatchStatus
from batchwright.version import __version__

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats
    from batchwright.pacing.figures import PacerFigures
    from batchwright.service.composition import Services

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "batchwright_"
_ValueFamily: TypeAlias = CounterMetricFamily | GaugeMetricFamily
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the histograms' buckets."""


def counter(name: str, documentation: str, *labels: str) -> CounterMetricFamily:
    """Return a counter; its name ends with `_total`, which is added."""
    return CounterMetricFamily(_PREFIX + name, documentation, labels=labels)


def gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    """Return a gauge, a value that goes up and down."""
    return GaugeMetricFamily(_PREFIX + name, documentation, labels=labels)


def histogram(name: str, documentation: str, *labels: str) -> HistogramMetricFamily:
    """Return a histogram, to be filled with `fill`."""
    return HistogramMetricFamily(_PREFIX + name, documentation, labels=labels)


def single(family: _ValueFamily, value: float) -> Metric:
    """Return a family without labels, with `value` added."""
    family.add_metric([], value)
    return family


def labelled(family: _ValueFamily, values: Mapping[str, float]) -> Metric:
    """Return a family that has one label, with the value of each label added."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def fill(family: HistogramMetricFamily, labels: list[str], milliseconds: Histogram) -> None:
    """Add a histogram of milliseconds to a family, in seconds."""
    bounds = [*map(str, _SECONDS), "+Inf"]
    counts = milliseconds.at_most([bound * 1e3 for bound in _SECONDS])
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), milliseconds.total / 1e3)


_COUNTERS = {
    "steps": ("engine_steps", "Steps computed."),
    "occupancy_sum": ("engine_step_sequences", "Sequences in those steps."),
    "rows_computed": ("engine_rows", "Rows of tokens that went through the model."),
    "prefill_tokens": ("engine_prefill_tokens", "Prompt tokens computed, recomputed ones counted again."),
    "decode_tokens": ("engine_decode_tokens", "Rows that computed a next token."),
    "drafted_tokens": ("engine_drafted_tokens", "Guesses at next tokens, computed along with decodes."),
    "accepted_tokens": ("engine_accepted_tokens", "Of those guesses, those that were right."),
    "forced_tokens": ("engine_forced_tokens", "Generated tokens that a grammar left no choice about."),
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
    """Yield the engine's metrics. Occupancy is `rate(engine_step_sequences_total) / rate(engine_steps_total)`."""
    info = gauge("engine_info", "1, with what computes as a label.", "implementation")
    yield labelled(info, {stats.implementation: 1})
    for name, described in _COUNTERS.items():
        yield single(counter(*described), getattr(stats, name))
    for name, described in _GAUGES.items():
        yield single(gauge(*described), getattr(stats, name))
    for families, make in ((_BY_TRAFFIC_GAUGES, gauge), (_BY_TRAFFIC_COUNTERS, counter)):
        for name, described in families.items():
            values: dict[str, float] = {traffic: getattr(each, name) for traffic, each in stats.traffic.items()}
            yield labelled(make(*described, "traffic"), values)
    for name, described in _BY_TRAFFIC_TIMES.items():
        times = histogram(*described, "traffic")
        for traffic, each in stats.traffic.items():
            fill(times, [traffic], getattr(each, name))
        yield times


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Contents of the store, of all tenants and processes."""

    batches: dict[BatchStatus, int]
    lines: Mapping[str, int]
    deliveries: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Scrape:
    """What is shown: the figures of the services, and what the database says about them."""

    services: Services
    ready: bool
    counts: StoreCounts | None
    """Contents of the store; None: the database does not answer, and the rest is still shown."""
    kept_quotas: Sequence[tuple[str, int, int]]
    """Name, limit and use of each quota on what is kept; none while the database does not answer."""


def exposition(scrape: Scrape) -> bytes:
    """Return the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(scrape))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Families:
    """Collector of all metrics."""

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        services = self._scrape.services
        version = gauge("build_info", "1, with the version of the package as a label.", "version")
        yield labelled(version, {__version__: 1})
        yield single(gauge("ready", "1 when the service takes work, as /ready says; else 0."), self._scrape.ready)
        yield from _http(services.http)
        yield from _connections(services.connections)
        yield from _calls(services.inference.figures)
        yield from _levels(services.inference.figures)
        yield from _slos(services.inference.slos)
        if (engine := engine_stats(services.inference.inner)) is not None:
            yield from engine_families(engine)
        reasons = counter("dispatches", "Batches of embeddings by why they were dispatched when they were.", "reason")
        yield labelled(reasons, dict(sorted(dispatch_reasons(services.inference.inner).items())))
        yield from _endpoints(endpoint_figures(services.inference.inner))
        yield from _quotas(services, self._scrape.kept_quotas)
        yield from _worker(services.worker.stats, services.worker.in_flight)
        given_up = counter("deliveries_given_up", "Messages to webhooks that this process gave up.")
        yield single(given_up, services.courier.given_up)
        yield from _store(services.store_figures, self._scrape.counts)


def _http(figures: HttpFigures) -> Iterator[Metric]:
    requests = counter("http_requests", "Requests over HTTP by route and status.", "method", "route", "status")
    for (method, path, status), count in figures.requests.copy().items():
        requests.add_metric([method, path, str(status)], count)
    yield requests
    seconds = histogram("http_request_seconds", "From a request to the end of its answer.", "route")
    for path, latency in figures.latency_ms.copy().items():
        fill(seconds, [path], latency)
    yield seconds


def _connections(figures: ConnectionFigures) -> Iterator[Metric]:
    accepted = counter("connections_accepted", "Connections of clients, those that were refused included.")
    yield single(accepted, figures.accepted)
    yield single(gauge("connections", "Connections of clients that are open."), figures.open)
    ended = counter("connections_ended", "Connections that the service refused or ended, by why.", "reason")
    yield labelled(ended, {reason: figures.ended[reason] for reason in END_REASONS})


def _calls(calls: Mapping[Traffic, CallFigures]) -> Iterator[Metric]:
    outcomes = counter("calls", "Calls of the model by class of traffic and outcome.", "traffic", "outcome")
    in_flight = gauge("calls_in_flight", "Calls waiting or running now.", "traffic")
    tokens = {
        "prompt_tokens": counter("prompt_tokens", "Tokens of prompts that were answered.", "traffic"),
        "cached_tokens": counter("cached_tokens", "Of those, found in the prefix cache.", "traffic"),
        "generated_tokens": counter("generated_tokens", "Tokens generated in answers.", "traffic"),
    }
    times = {
        "latency_ms": histogram("call_seconds", "From a call to its answer, of those that succeeded.", "traffic"),
        "ttft_ms": histogram("time_to_first_token_seconds", "From a streamed call to its first token.", "traffic"),
        "tpot_ms": histogram("time_per_output_token_seconds", "Between two tokens of a streamed call.", "traffic"),
    }
    for traffic, figures in calls.items():
        for outcome in ("answered", "failed", "cancelled"):
            outcomes.add_metric([traffic, outcome], getattr(figures, outcome))
        in_flight.add_metric([traffic], figures.in_flight)
        for name, family in tokens.items():
            family.add_metric([traffic], getattr(figures, name))
        for name, times_of in times.items():
            fill(times_of, [traffic], getattr(figures, name))
    yield from (outcomes, in_flight, *tokens.values(), *times.values())


def _levels(calls: Mapping[Traffic, CallFigures]) -> Iterator[Metric]:
    labels = ("traffic", "priority")
    seconds = histogram("priority_call_seconds", "From a call to its answer by priority, if it succeeded.", *labels)
    outcomes = counter("priority_calls", "Calls by priority and how they ended.", *labels, "outcome")
    deadlines = counter("priority_deadlines", "Calls with a deadline by whether it was met.", *labels, "outcome")
    for traffic, figures in calls.items():
        for name, level in figures.levels.ordered():
            of_level = [traffic, str(name)]
            fill(seconds, of_level, level.latency_ms)
            for outcome in ANSWERS:
                outcomes.add_metric([*of_level, outcome], getattr(level, outcome))
            for outcome in DEADLINES:
                deadlines.add_metric([*of_level, outcome], getattr(level, outcome))
    yield from (seconds, outcomes, deadlines)


def _slos(classes: Mapping[str, SloFigures]) -> Iterator[Metric]:
    verdicts = counter("slo_requests", "Online requests of a class by whether they met its targets.", "slo", "outcome")
    misses = counter("slo_misses", "Answered requests of a class that missed a target.", "slo", "target")
    goals = gauge("slo_goal_ratio", "Share of the requests of a class that is to meet its targets.", "slo")
    targets = gauge("slo_target_seconds", "Targets of a class.", "slo", "target")
    seconds = histogram("slo_seconds", "Times of answered requests of a class, by target.", "slo", "target")
    for name, figures in classes.items():
        goals.add_metric([name], figures.objective.goal)
        for verdict in VERDICTS:
            verdicts.add_metric([name, verdict], figures.verdicts[verdict])
        for target in TARGETS:
            label = target.removesuffix("_ms")
            fill(seconds, [name, label], figures.times[target])
            if (limit := getattr(figures.objective, target)) is not None:
                targets.add_metric([name, label], limit / 1e3)
                misses.add_metric([name, label], figures.misses[target])
    yield from (verdicts, misses, goals, targets, seconds)


_ENDPOINT_COUNTERS = {
    "sent": ("endpoint_requests", "Requests sent to an endpoint elsewhere, tries that failed included."),
    "refused": ("endpoint_refusals", "Of these, refused for a limit."),
}
_ENDPOINT_GAUGES = {
    "under_way": ("endpoint_requests_under_way", "Requests that an endpoint elsewhere computes now."),
    "waiting": ("endpoint_requests_waiting", "Requests that wait for their turn there."),
    "concurrency": ("endpoint_most_under_way", "Requests that may be under way there."),
    "next_in": ("endpoint_wait_seconds", "Time until the next request may go, by limits and refusals."),
}


def _endpoints(endpoints: Iterable[tuple[str, str, PacerFigures]]) -> Iterator[Metric]:
    labels = ("endpoint", "model")
    families: dict[str, _ValueFamily] = {
        **{name: counter(*described, *labels) for name, described in _ENDPOINT_COUNTERS.items()},
        **{name: gauge(*described, *labels) for name, described in _ENDPOINT_GAUGES.items()},
    }
    limits = gauge(
        "endpoint_limit", "Limits of an endpoint elsewhere, in a window.", *labels, "kind", "window_seconds", "source"
    )
    left = gauge("endpoint_limit_left", "What is left of them.", *labels, "kind", "window_seconds", "source")
    for address, model, figures in endpoints:
        for name, family in families.items():
            family.add_metric([address, model], getattr(figures, name))
        for limit in figures.limits:
            of_limit = [limit.kind, f"{limit.window:g}", "stated" if limit.is_stated else "told"]
            limits.add_metric([address, model, *of_limit], limit.limit)
            left.add_metric([address, model, *of_limit], limit.left)
        if figures.found_per_minute is not None:
            limits.add_metric([address, model, "requests", "60", "found"], figures.found_per_minute)
    yield from (*families.values(), limits, left)


def _quotas(services: Services, kept: Sequence[tuple[str, int, int]]) -> Iterator[Metric]:
    quotas = services.quotas
    refused = counter("quota_refusals", "Requests refused with 429, by the quota that they met.", "quota")
    counts = quotas.refused + services.store_figures.refused
    yield labelled(refused, {name: counts[name] for name in QUOTAS})
    limits = gauge(
        "quota_limit", "Limit on what is kept, or on online requests where there were some of late.", "quota"
    )
    known = (*sorted(quotas.limiter.standings(quotas.now)), *kept)
    yield labelled(limits, {name: limit for name, limit, _ in known})
    used = gauge("quota_used", "What is used of it, by all servers.", "quota")
    yield labelled(used, {name: amount for name, _, amount in known})
    yield single(gauge("servers", "Processes that work on this store."), 1 + len(services.peers.others))


def _worker(stats: WorkerStats, in_flight: int) -> Iterator[Metric]:
    lines = counter("worker_lines", "Lines of batches that this process computed, by outcome.", "outcome")
    yield labelled(lines, {outcome: getattr(stats, outcome) for outcome in ("succeeded", "failed", "refused")})
    yield single(counter("worker_crashed_lines", "Lines given up because their process died each time."), stats.crashed)
    yield single(counter("worker_commits", "Transactions that committed results."), stats.commits)
    yield single(counter("worker_leases_lost", "Leases that ran out before they were renewed."), stats.leases_lost)
    yield single(gauge("worker_lines_in_flight", "Lines being computed by this process now."), in_flight)


def _store(figures: StoreFigures, counts: StoreCounts | None) -> Iterator[Metric]:
    seconds = histogram("store_seconds", "Of operations of the store.", "operation")
    for name, latency in figures.latency_ms.copy().items():
        fill(seconds, [name], latency)
    yield seconds
    unavailable = counter("store_unavailable", "Operations that found the database not answering.")
    yield single(unavailable, figures.unavailable)
    if counts is None:
        return
    batches = dict.fromkeys(get_args(BatchStatus), 0) | counts.batches
    shown: tuple[tuple[str, str, str, Mapping[Any, int]], ...] = (
        ("batches", "Batches in the store by status, simple ones included.", "status", batches),
        ("lines", "Lines of batches in progress that are not finished, of all processes.", "state", counts.lines),
        ("deliveries", "Messages to webhooks: under way, and given up.", "state", counts.deliveries),
    )
    for name, documentation, label, values in shown:
        yield labelled(gauge(name, documentation, label), values)
