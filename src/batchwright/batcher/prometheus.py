"""The statistics of batchers for Prometheus, read at each scrape: nothing is added to the path of a request.

One collector per registry holds all its batchers, since a family of metrics may appear only once in a scrape. It holds
them weakly: a batcher that is gone is no longer exported.

Shares and means are exported as their underlying counters, so that they can be computed for any span of time: occupancy
is `rate(batched_requests_total) / rate(batches_total)`, by reason too; padding efficiency is `rate(tokens_total) /
rate(padded_tokens_total)`; tokens per second of model time are `rate(tokens_total) + rate(generated_tokens_total)` over
`rate(model_seconds_total)`. The two gauges have their values since the batcher was created.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Protocol

from batchwright.batcher.batcher_stats import BatcherStats
from batchwright.errors import MissingExtra
from batchwright.histograms import Histogram
from batchwright.priority_levels import ANSWERS, DEADLINES, PriorityLevels

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtra(
        "batchwright.export_metrics needs prometheus-client: pip install 'batchwright[prometheus]'"
    ) from error

_PREFIX = "batchwright_batcher_"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the histograms' buckets."""

_COUNTERS = {
    "requests": ("requests", "Requests taken into the queue."),
    "splits": ("splits", "Batches that failed and were computed again in parts."),
    "out_of_memory": ("out_of_memory", "Batches, and halves of them, for which memory ran out."),
    "tokens": ("tokens", "Lengths of the computed requests, without padding or failed ones."),
    "cells": ("padded_tokens", "Lengths of the computed requests, with padding."),
    "generated_tokens": ("generated_tokens", "Tokens generated, by the model's tokenizer."),
    "model_seconds": ("model_seconds", "Time in the model of batches that succeeded."),
}
_GAUGES = {
    "waiting": ("waiting_requests", "Requests in the queue now."),
    "running": ("running_requests", "Requests in the model now."),
    "occupancy": ("occupancy_requests", "Mean number of requests in a batch, since the batcher was made."),
    "padding_efficiency": ("padding_efficiency_ratio", "Lengths over padded lengths, since the batcher was made."),
    "is_model_down": ("model_down", "1 while the model fails every request and is tried with one at a time, else 0."),
}
_OUTCOMES = ("succeeded", "failed", "expired", "cancelled")
_REJECTIONS = {"overloaded": "overloaded", "refused": "deadline", "too_large": "too_large"}
_HISTOGRAMS = {
    "queue_ms": ("queue_time_seconds", "From submission to dispatch."),
    "model_ms": ("model_time_seconds", "Of a batch in the model."),
    "latency_ms": ("latency_seconds", "From submission to the answer, of requests that succeeded."),
    "ttft_ms": ("time_to_first_token_seconds", "From submission to the first token."),
    "tpot_ms": ("time_per_output_token_seconds", "Between two tokens of a sequence."),
}
"""Histograms by attribute of the statistics; the last two only if tokens are computed one by one."""
_REPLICA_COUNTERS = {
    "batches": ("replica_batches", "Batches that this replica computed."),
    "items": ("replica_requests", "Requests that this replica computed."),
    "failures": ("replica_failures", "Batches that failed on this replica and not on another."),
}


class HasStats(Protocol):
    """A batcher or processor. If it has `replicas`, the statistics of each are also exported."""

    def stats(self) -> BatcherStats: ...


def export_metrics(batcher: HasStats, name: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Export the statistics of `batcher` to `registry` with the label `batcher="name"`, for as long as it exists.

    Raises ValueError if another batcher of that name is exported there, and `MissingExtra` without prometheus-client.
    """
    with _exporting:
        exports = _exports.get(registry)
        if exports is None:
            exports = _Exports()
            registry.register(exports)
            _exports[registry] = exports
        exports.add(batcher, name)


class _Exports(Collector):
    """The batchers of one registry."""

    def __init__(self) -> None:
        self._batchers: dict[str, weakref.ref[HasStats]] = {}

    def add(self, batcher: HasStats, name: str) -> None:
        known = self._batchers.get(name)
        if known is not None and known() is not None:
            raise ValueError(f"name={name!r}: a batcher is exported under it already; give each a name of its own")
        self._batchers = {name: known for name, known in self._batchers.items() if known() is not None}
        self._batchers[name] = weakref.ref(batcher)

    def describe(self) -> Iterable[Metric]:
        return _Families().all()

    def collect(self) -> Iterable[Metric]:
        families = _Families()
        for name, reference in sorted(self._batchers.copy().items()):
            batcher = reference()
            if batcher is not None:
                families.add(name, batcher)
        return families.all()


class _Families:
    """Metrics of one scrape."""

    def __init__(self) -> None:
        batcher = ["batcher"]
        self.counters = {key: _counter(*described, batcher) for key, described in _COUNTERS.items()}
        self.gauges = {key: _gauge(*described, batcher) for key, described in _GAUGES.items()}
        self.histograms = {
            key: HistogramMetricFamily(_PREFIX + name, documentation, labels=batcher)
            for key, (name, documentation) in _HISTOGRAMS.items()
        }
        by_priority = [*batcher, "priority"]
        self.level_latency = HistogramMetricFamily(
            _PREFIX + "priority_latency_seconds",
            "From submission to the answer by priority, of requests that succeeded.",
            labels=by_priority,
        )
        self.level_answers = _counter(
            "priority_requests", "Requests by priority and how they ended.", [*by_priority, "outcome"]
        )
        self.level_deadlines = _counter(
            "priority_deadlines", "Requests with a deadline by whether it was met.", [*by_priority, "outcome"]
        )
        self.memory = _gauge("memory_limit_bytes", "What a batch may take of memory now.", batcher)
        self.answers = _counter("answers", "Requests by how they ended.", [*batcher, "outcome"])
        self.rejections = _counter("rejections", "Requests not taken, by why.", [*batcher, "reason"])
        self.batches = _counter("batches", "Batches by why they were dispatched when they were.", [*batcher, "reason"])
        self.batched = _counter("batched_requests", "Requests in those batches.", [*batcher, "reason"])
        self.replicas = {
            key: _counter(*described, [*batcher, "replica"]) for key, described in _REPLICA_COUNTERS.items()
        }
        self.pauses = _gauge(
            "replica_pause_seconds",
            "For how long this replica was last taken out; 0 since it last computed a batch.",
            [*batcher, "replica"],
        )

    def add(self, name: str, batcher: HasStats) -> None:
        stats = batcher.stats()
        for families in (self.counters, self.gauges):
            for key, family in families.items():
                family.add_metric([name], getattr(stats, key))
        for outcome in _OUTCOMES:
            self.answers.add_metric([name, outcome], getattr(stats, outcome))
        for key, reason in _REJECTIONS.items():
            self.rejections.add_metric([name, reason], getattr(stats, key))
        for reason, count in stats.reasons.items():
            self.batches.add_metric([name, reason], count)
            self.batched.add_metric([name, reason], stats.items_by_reason.get(reason, 0))
        for key, histogram in self.histograms.items():
            if (times := getattr(stats, key, None)) is not None:
                _fill(histogram, [name], times)
        self._add_levels(name, stats.levels)
        if stats.memory_limit_mb is not None:
            self.memory.add_metric([name], stats.memory_limit_mb * 1e6)
        for number, replica in enumerate(getattr(batcher, "replicas", ())):
            for key, family in self.replicas.items():
                family.add_metric([name, str(number)], getattr(replica, key))
            self.pauses.add_metric([name, str(number)], replica.pause)

    def _add_levels(self, name: str, levels: PriorityLevels) -> None:
        for level, figures in levels.ordered():
            labels = [name, str(level)]
            _fill(self.level_latency, labels, figures.latency_ms)
            for outcome in ANSWERS:
                self.level_answers.add_metric([*labels, outcome], getattr(figures, outcome))
            for outcome in DEADLINES:
                self.level_deadlines.add_metric([*labels, outcome], getattr(figures, outcome))

    def all(self) -> Iterator[Metric]:
        yield from self.counters.values()
        yield from self.gauges.values()
        yield from (self.memory, self.answers, self.rejections, self.batches, self.batched)
        yield from self.histograms.values()
        yield from (self.level_latency, self.level_answers, self.level_deadlines)
        yield from self.replicas.values()
        yield self.pauses


_exports: weakref.WeakKeyDictionary[CollectorRegistry, _Exports] = weakref.WeakKeyDictionary()
_exporting = threading.Lock()


def _counter(name: str, documentation: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, documentation, labels=labels)


def _gauge(name: str, documentation: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, documentation, labels=labels)


def _fill(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    bounds = [*map(str, _SECONDS), "+Inf"]
    counts = histogram.at_most([bound * 1e3 for bound in _SECONDS])
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), histogram.total / 1e3)
