"""Figures of this process: HTTP requests, connections, calls of both classes of traffic, and what computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchwright.histograms import Histogram, Recent
from batchwright.inference.inference import engine_stats_of, pacing_of
from batchwright.priority_levels import PriorityLevels

if TYPE_CHECKING:
    from batchwright.batcher.batcher_stats import BatcherStats
    from batchwright.engine.engine_stats import EngineStats
    from batchwright.inference.inference import Inference
    from batchwright.pacing.figures import PacerFigures


@dataclass(slots=True)
class HttpFigures:
    """Numbers of requests by (method, path of the route, status), and latency of each route in milliseconds."""

    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    latency_ms: dict[str, Histogram] = field(default_factory=dict)

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        self.requests[method, path, status] += 1
        self.latency_ms.setdefault(path, Histogram()).add(seconds * 1e3)


END_REASONS = (
    "accept_failed",
    "body_timeout",
    "header_timeout",
    "made_room",
    "no_descriptors",
    "too_many_connections",
    "too_many_connections_from_address",
    "write_timeout",
)
"""Reasons why the service refuses or ends connections."""


@dataclass(slots=True)
class ConnectionFigures:
    """Connections of clients."""

    accepted: int = 0
    """Number of accepted connections, refused ones included."""
    open: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Numbers of connections that the service refused or ended, by reason."""

    def count(self, reason: str) -> None:
        """Count an end for one of `END_REASONS`."""
        self.ended[reason] += 1


@dataclass(slots=True)
class CallFigures:
    """Calls of one class of traffic. Times in milliseconds."""

    in_flight: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    embedded_tokens: int = 0
    """Number of prompt tokens in requests for embeddings."""
    levels: PriorityLevels = field(default_factory=PriorityLevels)
    """Latency, deadlines met and refusals by priority."""
    latency_ms: Histogram = field(default_factory=Histogram)
    ttft_ms: Histogram = field(default_factory=Histogram)
    """Time to the first token. This and `tpot_ms` are measured for streams only."""
    tpot_ms: Histogram = field(default_factory=Histogram)
    recent_latency_ms: Recent = field(default_factory=Recent)
    recent_ttft_ms: Recent = field(default_factory=Recent)
    recent_tpot_ms: Recent = field(default_factory=Recent)


def engine_stats(inference: Inference) -> EngineStats | None:
    """Return the figures of the engine that generates; None where there is none in this process."""
    return engine_stats_of(inference)


def batcher_stats(inference: Inference) -> list[BatcherStats]:
    """Return the figures of the batchers of embeddings."""
    return [part.batcher.stats() for part in _parts(inference) if hasattr(part, "batcher")]


def dispatch_reasons(inference: Inference) -> Mapping[str, int]:
    """Return the number of batches of embeddings by the reason for which they were dispatched."""
    reasons: Counter[str] = Counter()
    for stats in batcher_stats(inference):
        reasons.update(stats.reasons)
    return reasons


def endpoint_figures(inference: Inference) -> Iterator[tuple[str, str, PacerFigures]]:
    """Yield the address and the model of each endpoint elsewhere that was asked, with what was found of its limits."""
    for part in _parts(inference):
        if hasattr(part, "address"):
            for model, figures in pacing_of(part).items():
                yield part.address, model, figures


def _parts(inference: Inference) -> Iterator[Any]:
    """Return the implementations behind a routed one, or the one itself."""
    return iter(getattr(inference, "routes", None) or (inference,))
