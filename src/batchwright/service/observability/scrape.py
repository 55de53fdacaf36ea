"""`/metrics`: the figures of the service for Prometheus, read when they are scraped.

docs/metrics.md tells what each of them means; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchwright.limiting.quotas import NAMES as QUOTAS
from batchwright.request import Traffic
from batchwright.service.observability.figures import END_REASONS, CallFigures, ConnectionFigures, HttpFigures
from batchwright.service.observability.metric_families import (
    counter,
    engine_families,
    fill,
    gauge,
    histogram,
    labelled,
    single,
)
from batchwright.service.observability.timed_store import StoreFigures
from batchwright.service.worker.worker import WorkerStats
from batchwright.store.records import BatchStatus

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What the store holds, of all tenants and processes."""

    batches: dict[BatchStatus, int]
    lines: Mapping[str, int]
    deliveries: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class QuotaFigures:
    """Use of quotas by online requests, and refusals."""

    refused: Mapping[str, int]
    """Refused requests, by the name of the quota."""
    kept: Sequence[tuple[str, int, int]]
    """Name, limit and use of each quota on what is kept; none while the database does not answer."""
    online: Sequence[tuple[str, int, int]]
    """Name, limit and use of each quota on online requests that was used lately."""
    servers: int
    """Number of processes on this store, this one included."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """Everything that is shown."""

    version: str
    ready: bool
    http: HttpFigures
    connections: ConnectionFigures
    calls: Mapping[Traffic, CallFigures]
    engine: EngineStats | None
    reasons: Mapping[str, int]
    worker: WorkerStats
    lines_in_flight: int
    store: StoreFigures
    quotas: QuotaFigures
    counts: StoreCounts | None
    """Figures of the store; None: the database does not answer, and the rest is shown all the same."""


def exposition(scrape: Scrape) -> bytes:
    """Return the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(scrape))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        scrape = self._scrape
        yield labelled(
            gauge("build_info", "1, with the version of the package as a label.", "version"), {scrape.version: 1}
        )
        yield single(gauge("ready", "1 when the service takes work, as /ready says; else 0."), float(scrape.ready))
        yield from _http(scrape.http)
        yield from _connections(scrape.connections)
        yield from _calls(scrape.calls)
        if scrape.engine is not None:
            yield from engine_families(scrape.engine)
        reasons = counter("dispatches", "Batches of embeddings by why they were dispatched when they were.", "reason")
        yield labelled(reasons, dict(sorted(scrape.reasons.items())))
        yield from _quotas(scrape.quotas)
        yield from _worker(scrape.worker, scrape.lines_in_flight)
        yield from _store(scrape.store, scrape.counts)


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
    yield labelled(ended, {reason: figures.ended.get(reason, 0) for reason in END_REASONS})


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


def _quotas(figures: QuotaFigures) -> Iterator[Metric]:
    refused = counter("quota_refusals", "Requests refused with 429, by the quota that they met.", "quota")
    yield labelled(refused, {name: figures.refused.get(name, 0) for name in QUOTAS})
    limits = gauge(
        "quota_limit", "Limit on what is kept, or on online requests where there were some of late.", "quota"
    )
    known = (*figures.online, *figures.kept)
    yield labelled(limits, {name: limit for name, limit, _ in known})
    used = gauge("quota_used", "What is used of it, by all servers.", "quota")
    yield labelled(used, {name: amount for name, _, amount in known})
    yield single(gauge("servers", "Processes that work on this store."), figures.servers)


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
    for name, told, label, values in shown:
        yield labelled(gauge(name, told, label), values)
