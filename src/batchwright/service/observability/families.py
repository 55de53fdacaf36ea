"""Families of metrics as `/metrics` shows them."""

from __future__ import annotations

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from batchwright.histograms import Histogram

PREFIX = "batchwright_"
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


def fill(family: HistogramMetricFamily, labels: list[str], milliseconds: Histogram) -> None:
    """Show a histogram of milliseconds, in seconds."""
    bounds = [*map(str, _SECONDS), "+Inf"]
    counts = milliseconds.at_most([bound * 1e3 for bound in _SECONDS])
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), milliseconds.total / 1e3)
