"""Counters of the service: requests over HTTP, and calls of both classes of traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchwright.histograms import Histogram, Recent


@dataclass(slots=True)
class HttpFigures:
    """Requests by (method, path of the route, status), and how long each route took in milliseconds."""

    requests: dict[tuple[str, str, int], int] = field(default_factory=dict)
    latency_ms: dict[str, Histogram] = field(default_factory=dict)

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        key = (method, path, status)
        self.requests[key] = self.requests.get(key, 0) + 1
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
    """Accepted connections, refused ones included."""
    open: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    """Connections by why the service refused or ended them, without those that ended as they should."""

    def count(self, reason: str) -> None:
        """Count an end for one of `END_REASONS`."""
        self.ended[reason] = self.ended.get(reason, 0) + 1


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
    """Prompt tokens that are of embeddings."""
    latency_ms: Histogram = field(default_factory=Histogram)
    ttft_ms: Histogram = field(default_factory=Histogram)
    """Time to the first token of streams, as `tpot_ms`; of other calls it is not seen here."""
    tpot_ms: Histogram = field(default_factory=Histogram)
    recent_latency_ms: Recent = field(default_factory=Recent)
    recent_ttft_ms: Recent = field(default_factory=Recent)
    recent_tpot_ms: Recent = field(default_factory=Recent)
