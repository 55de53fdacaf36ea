"""What the dashboard shows, as `GET /dashboard/state` answers it and `GET /dashboard/events` sends it every second.

Figures of the process (tokens, queues, the engine) are everybody's; jobs are those of the tenant that asks. Shares are
0..1, times milliseconds unless a name says seconds, `…_at` Unix seconds. What is not known (yet) is null.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from batchwright.service.observability.activity import Point, TokenRates
from batchwright.store.records import BatchStatus


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Percentiles(_Part):
    """Of the last values, a thousand at most."""

    count: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class ClassState(_Part):
    """One class of traffic: online requests, or lines of batches."""

    waiting: int = 0
    """Not begun: in the engine's queue, and for batches the pending lines of jobs in progress too."""
    running: int = 0
    """Being computed now."""
    answered: int = 0
    """Since the process started."""
    failed: int = 0
    """Since the process started: answered with an error, cancelled ones left out."""
    cancelled: int = 0
    tokens: TokenRates = TokenRates()
    latency_ms: Percentiles = Percentiles()
    """From the call to its answer."""
    ttft_ms: Percentiles = Percentiles()
    """To the first token."""
    tpot_ms: Percentiles = Percentiles()
    """Between two tokens."""


class EngineState(_Part):
    """The engine in this process."""

    implementation: str
    """Which body and attention compute, in which dtype, where."""
    steps: int
    occupancy: float | None
    """Mean number of sequences in a step, over the last ten seconds; null when there was no step."""
    max_num_seqs: int
    kv_used: float | None
    """Share of the KV cache that sequences hold now."""
    prefix_hit_rate: float
    """Share of the prompt tokens found in the prefix cache, since the process started."""
    padding_efficiency: float
    preemptions: int


class QuotaState(_Part):
    """A limit that holds for whoever looks."""

    of: Literal["tenant", "key"]
    name: str
    """As in the quotas: `requests_per_minute`, ..."""
    limit: int
    used: int


class ServerState(_Part):
    """A process that works on the same store."""

    name: str
    """Host and process id."""
    here: bool
    """The one that shows this."""
    online: int | None
    """Online requests waiting or running; null for one that tells nothing (yet), as the following."""
    lines: int | None
    """Batch lines being computed."""
    tokens: TokenRates | None


class JobState(_Part):
    """A batch of the tenant."""

    id: str
    kind: Literal["batch", "simple"]
    """`simple`: made by `POST /v1/batch/async`; its address is `/v1/batch/{id}`."""
    name: str | None = None
    """`name` of its metadata, if whoever made it gave it one; the dashboard takes the name of the file."""
    parent_id: str | None = None
    """The job of which it retries lines."""
    endpoint: str
    model: str | None
    status: BatchStatus
    paused: bool
    total: int
    completed: int
    failed: int
    progress: float
    """Share of its lines that are finished."""
    eta_seconds: float | None
    """Until it ends, at the rate of late; null when it is not known or has ended."""
    lines_per_second: float | None
    input_tokens: int
    output_tokens: int
    created_at: float
    expires_at: float
    ended_at: float | None
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    problem: str | None
    """The first reason for which its validation failed."""


class JobCounts(_Part):
    """The tenant's batches of both kinds, by status."""

    validating: int = 0
    in_progress: int = 0
    finalizing: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0
    cancelling: int = 0
    cancelled: int = 0


class DashboardState(_Part):
    """Everything on the page at one moment."""

    at: float
    version: str
    uptime_seconds: float
    ready: bool
    draining: bool
    """Stopping: no new work is taken."""
    keys_required: bool
    models: list[str]
    backend: str
    """`engine`, or the address of an endpoint elsewhere."""
    tokens: TokenRates
    online: ClassState
    batch: ClassState
    engine: EngineState | None
    """Null when an endpoint elsewhere computes."""
    dispatch_reasons: dict[str, int]
    """Why batches or steps were dispatched when they were: counts since the process started."""
    lines_pending: int
    """Of all batches in progress, whatever process computes them."""
    lines_claimed: int
    deliveries_pending: int
    """Messages to webhooks under way."""
    deliveries_failed: int
    quotas: list[QuotaState] = []
    """Empty where nothing is limited."""
    servers: list[ServerState] = []
    """All of them, by name; empty where this is the only one."""
    job_counts: JobCounts
    jobs: list[JobState]
    """At most 50: those that have not ended, then the newest that have."""
    history: list[Point]
    """The last 120 seconds, oldest first."""
