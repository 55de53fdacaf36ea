"""The state that the dashboard shows: `GET /dashboard/state` returns it, `GET /dashboard/events` sends it every second.

Figures of the process (tokens, queues, the engine) are the same for everybody; jobs are those of the tenant that asks.
Shares are 0..1, times milliseconds unless the name says seconds, `…_at` Unix seconds. Null means not known (yet).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchwright.histograms import Recent
from batchwright.inference.inference import least_seconds_of
from batchwright.limiting.rates import KINDS
from batchwright.planning.needed_work import Answered
from batchwright.request import Traffic
from batchwright.service.composition import Services
from batchwright.service.observability.activity import Point, TokenRates
from batchwright.service.observability.figures import dispatch_reasons, engine_stats
from batchwright.service.observability.slo_classes import VERDICTS
from batchwright.service.worker.processes import process_name
from batchwright.store.records import ENDED, ApiKey, BatchRecord, BatchStatus
from batchwright.version import __version__
from batchwright.wire.api_model import ApiModel

_JOBS = 50
_UNENDED: tuple[BatchStatus, ...] = ("in_progress", "validating", "finalizing", "cancelling")


class _Part(ApiModel):
    model_config = ConfigDict(frozen=True)


class Percentiles(_Part):
    """Percentiles of the last values, at most a thousand."""

    count: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class ClassState(_Part):
    """One class of traffic: online requests, or lines of batches."""

    waiting: int = 0
    """Number not begun: in the engine's queue, and for batches also pending lines of jobs in progress."""
    running: int = 0
    """Number being computed now."""
    answered: int = 0
    """Number answered since the process started."""
    failed: int = 0
    """Number answered with an error since the process started, without cancelled ones."""
    cancelled: int = 0
    tokens: TokenRates = TokenRates()
    latency_ms: Percentiles = Percentiles()
    """Time from the call to its answer."""
    ttft_ms: Percentiles = Percentiles()
    """Time to the first token."""
    tpot_ms: Percentiles = Percentiles()
    """Time between two tokens."""


class LevelState(_Part):
    """Online requests of one priority, since the process started."""

    priority: int | Literal["other"]
    """`other`: all priorities beyond the first nine that occurred."""
    succeeded: int
    failed: int
    refused: int
    """Number not taken because the service was full or stopping."""
    in_time_share: float | None
    """Share of those with a deadline that were answered by then; null: there were none."""
    p50: float | None
    """Percentiles of the time to the answer."""
    p99: float | None


class SloState(_Part):
    """A class of online requests with service level objectives."""

    name: str
    goal: float
    """Share of its requests that is to meet all targets."""
    attained: float | None
    """Share of the last requests, a thousand at most, that did; null: there were none."""
    ttft_ms: float | None
    """Targets; null: none."""
    tpot_ms: float | None
    latency_ms: float | None
    met: int
    missed: int
    failed: int
    refused: int


class EngineState(_Part):
    """The engine in this process."""

    implementation: str
    """The body, attention, dtype and device that compute."""
    steps: int
    occupancy: float | None
    """Mean number of sequences in a step, over the last ten seconds; null when there was no step."""
    max_num_seqs: int
    kv_used: float | None
    """Share of the KV cache that sequences hold now."""
    prefix_hit_rate: float
    """Share of prompt tokens found in the prefix cache since the process started."""
    padding_efficiency: float
    preemptions: int


class QuotaState(_Part):
    """A limit that holds for the viewer's tenant or key."""

    of: Literal["tenant", "key"]
    name: str
    """Name of the quota, such as `requests_per_minute`."""
    limit: int
    used: int


class ServerState(_Part):
    """A process that works on the same store."""

    name: str
    """Host and process id; `server 1`, ... for a viewer who may not see host names."""
    here: bool
    """Whether this is the process that serves the page."""
    online: int | None
    """Online requests waiting or running. Null, like the next two, if the process has published nothing (yet)."""
    lines: int | None
    """Batch lines being computed."""
    tokens: TokenRates | None


class JobState(_Part):
    """A job of the tenant."""

    id: str
    kind: Literal["batch", "simple"]
    """`simple`: made by `POST /v1/batch/async`; its address is `/v1/batch/{id}`."""
    name: str | None = None
    """`name` of its metadata, if given; uploads in the dashboard set it to the name of the file."""
    parent_id: str | None = None
    """The job whose lines this one retries."""
    endpoint: str
    model: str | None
    status: BatchStatus
    paused: bool
    total: int
    completed: int
    failed: int
    progress: float
    """Share of its tokens that are computed, or of its lines that are finished while its tokens are not known, 0..1."""
    eta_seconds: float | None
    """Time until the job ends, as foreseen; null if that is not known or the job has ended."""
    lines_per_second: float | None
    input_tokens: int
    output_tokens: int
    shared: float | None
    """Share of the text of its prompts with which lines that are computed earlier begin too; null if that is not known
    (yet)."""
    cached: float | None
    """Share of its input tokens that were found in a cache; null: none were read yet."""
    least_seconds: float | None
    """Least time in which this machine computes what was answered so far; null if its rates are not known, or if less
    time has passed: others compute it."""
    share_of_time: float | None
    """That time as a share of the time for which the job has been in progress, paused or not."""
    created_at: float
    expires_at: float
    ended_at: float | None
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    problem: str | None
    """The first reason why its validation failed."""


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
    """Everything that the page shows at one moment."""

    at: float
    version: str
    uptime_seconds: float
    ready: bool
    draining: bool
    """Whether the service is stopping and takes no new work."""
    keys_required: bool
    models: list[str]
    backend: str
    """`engine`, or the address of an endpoint, which is hidden from a viewer who may not see host names."""
    tokens: TokenRates
    online: ClassState
    batch: ClassState
    engine: EngineState | None
    """Null when an endpoint elsewhere computes."""
    levels: list[LevelState] = Field(default_factory=list)
    """Online requests by priority, the most urgent first."""
    slos: list[SloState] = Field(default_factory=list)
    """Classes with service level objectives, if there are any."""
    dispatch_reasons: dict[str, int]
    """Why batches or steps were dispatched when they were: counts since the process started."""
    lines_pending: int
    """Pending lines of all batches in progress, whichever process computes them."""
    lines_claimed: int
    deliveries_pending: int
    """Messages to webhooks that are under way."""
    deliveries_failed: int
    quotas: list[QuotaState] = Field(default_factory=list)
    """The viewer's limits; empty without limits."""
    servers: list[ServerState] = Field(default_factory=list)
    """All processes by name; empty if this is the only one."""
    job_counts: JobCounts
    jobs: list[JobState]
    """Up to 50 jobs: those that have not ended, then the newest that have."""
    history: list[Point]
    """The last 120 seconds, oldest first."""


async def dashboard_state(services: Services, tenant: str, key: ApiKey | None = None) -> DashboardState:
    """Return everything that the page shows to a tenant. Raises `StoreUnavailable`."""
    counts, lines, deliveries, jobs, quotas = await asyncio.gather(
        services.jobs.count_batches(tenant),
        services.store.count_lines(),
        services.store.count_deliveries(),
        _jobs(services, tenant),
        _quotas(services, tenant, key),
    )
    rates = [services.live.rates(traffic) for traffic in ("online", "batch")]
    now, backend = services.unix_time(), services.settings.backend
    return DashboardState(
        at=now,
        version=__version__,
        uptime_seconds=max(0.0, now - services.started_at),
        ready=await services.why_not_ready() is None,
        draining=services.draining,
        keys_required=await services.keys.required(),
        models=list(services.inference.models),
        backend=backend if backend == "engine" or _sees_hosts(key) else "an endpoint elsewhere",
        tokens=TokenRates(prompt=sum(each.prompt for each in rates), generated=sum(each.generated for each in rates)),
        online=_traffic(services, "online", 0),
        batch=_traffic(services, "batch", lines.get("pending", 0)),
        engine=_engine(services),
        levels=_levels(services),
        slos=_slos(services),
        dispatch_reasons=dict(dispatch_reasons(services.inference.inner)),
        lines_pending=lines.get("pending", 0),
        lines_claimed=lines.get("claimed", 0),
        deliveries_pending=deliveries.get("pending", 0),
        deliveries_failed=deliveries.get("failed", 0),
        quotas=quotas,
        servers=_servers(services, named=_sees_hosts(key)),
        job_counts=JobCounts(**counts),
        jobs=jobs,
        history=services.live.history(),
    )


def _traffic(services: Services, traffic: Traffic, pending: int) -> ClassState:
    figures = services.inference.figures[traffic]
    stats = engine_stats(services.inference.inner)
    engine = None if stats is None else stats.traffic[traffic]
    running = figures.in_flight if engine is None else min(engine.running, figures.in_flight)
    return ClassState(
        waiting=figures.in_flight - running + pending,
        running=running,
        answered=figures.answered,
        failed=figures.failed,
        cancelled=figures.cancelled,
        tokens=services.live.rates(traffic),
        latency_ms=_percentiles(figures.recent_latency_ms),
        # The engine sees the tokens of every request; with an endpoint elsewhere, only those of streams are seen.
        ttft_ms=_percentiles(figures.recent_ttft_ms if engine is None else engine.recent_ttft_ms),
        tpot_ms=_percentiles(figures.recent_tpot_ms if engine is None else engine.recent_tpot_ms),
    )


def _levels(services: Services) -> list[LevelState]:
    return [
        LevelState(
            **_common(LevelState, level),
            priority=priority,
            p50=level.latency_ms.percentile(50),
            p99=level.latency_ms.percentile(99),
        )
        for priority, level in services.inference.figures["online"].levels.ordered()
    ]


def _slos(services: Services) -> list[SloState]:
    return [
        SloState(
            name=name,
            attained=figures.attained,
            **_common(SloState, figures.objective),
            **{verdict: figures.verdicts[verdict] for verdict in VERDICTS},
        )
        for name, figures in services.inference.slos.items()
    ]


async def _quotas(services: Services, tenant: str, key: ApiKey | None) -> list[QuotaState]:
    found = []
    limiter, now = services.quotas.limiter, services.quotas.now
    for subject in services.quotas.subjects(tenant, key):
        of: Literal["tenant", "key"] = "tenant" if subject.name.startswith("tenant:") else "key"
        stored = await services.store.quota_use(tenant, None if of == "tenant" or key is None else key.id)
        used = {
            "storage_bytes": stored.storage_bytes,
            "enqueued_lines": stored.enqueued_lines,
            "enqueued_tokens": stored.enqueued_tokens,
            "concurrent_requests": limiter.inside(subject.name),
        }
        for kind in KINDS:
            if (standing := limiter.standing([subject], kind, now)) is not None:
                used[f"{kind}_per_minute"] = standing.limit - standing.remaining
        found += [
            QuotaState(of=of, name=name, limit=limit, used=used[name])
            for name, limit in subject.quotas.as_values().items()
        ]
    return found


def _sees_hosts(key: ApiKey | None) -> bool:
    """Return whether the viewer may see host names: operators may, and everybody while no keys are used."""
    return key is None or not {"metrics", "admin"}.isdisjoint(key.scopes)


def _servers(services: Services, *, named: bool) -> list[ServerState]:
    others = [_server(peer.name, snapshot, here=False) for peer, snapshot in services.peers.others]
    if not others:
        return []
    here = _server(process_name(), services.live.snapshot(services.worker.in_flight), here=True)
    servers = sorted([here, *others], key=lambda server: server.name)
    if named:
        return servers
    return [server.model_copy(update={"name": f"server {number}"}) for number, server in enumerate(servers, 1)]


def _server(name: str, snapshot: Mapping[str, Any], *, here: bool) -> ServerState:
    tokens = TokenRates(prompt=snapshot["prompt"], generated=snapshot["generated"]) if "prompt" in snapshot else None
    return ServerState(name=name, here=here, online=snapshot.get("online"), lines=snapshot.get("lines"), tokens=tokens)


def _percentiles(recent: Recent) -> Percentiles:
    p50, p90, p99 = (recent.percentile(q) for q in (50, 90, 99))
    return Percentiles(count=len(recent), p50=p50, p90=p90, p99=p99)


def _engine(services: Services) -> EngineState | None:
    stats = engine_stats(services.inference.inner)
    if stats is None:
        return None
    return EngineState(
        **_common(EngineState, stats),
        occupancy=services.live.occupancy,
        kv_used=stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else None,
    )


def _common(state: type[BaseModel], source: object) -> dict[str, Any]:
    """Return the attributes of `source` that are fields of `state`."""
    return {name: getattr(source, name) for name in state.model_fields if hasattr(source, name)}


async def _jobs(services: Services, tenant: str) -> list[JobState]:
    """Return the jobs that have not ended, then the newest that have, of both kinds."""
    found: dict[str, BatchRecord] = {}
    for simple in (False, True):
        pages = [await services.jobs.batches(tenant, limit=_JOBS, simple=simple)]
        if len(pages[0]) == _JOBS:
            # Older jobs may still be under way.
            pages += [
                await services.jobs.batches(tenant, limit=_JOBS, simple=simple, status=status) for status in _UNENDED
            ]
        found.update({batch.id: batch for page in pages for batch in page})
    ordered = sorted(found.values(), key=lambda batch: (batch.status in ENDED, -batch.created_at, batch.id))
    return [_job(services, batch) for batch in ordered[:_JOBS]]


def _job(services: Services, batch: BatchRecord) -> JobState:
    progress = services.jobs.progress(batch)
    problem = batch.errors[0] if batch.errors else None
    line = "" if problem is None or problem.line is None else f"Line {problem.line}: "
    usage, taken = batch.usage, _seconds_in_progress(batch, services.unix_time())
    least = _least_seconds(services, batch)
    if least is not None and (taken is None or taken < least):
        least = None
    return JobState(
        **_common(JobState, batch),
        **_common(JobState, progress),
        kind="simple" if batch.simple else "batch",
        name=batch.metadata.get("name"),
        progress=progress.fraction,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cached=usage.cached_tokens / usage.input_tokens if usage.input_tokens else None,
        least_seconds=least,
        share_of_time=least / taken if least is not None and taken else None,
        ended_at=batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at,
        problem=None if problem is None else line + problem.message,
    )


def _least_seconds(services: Services, batch: BatchRecord) -> float | None:
    usage = batch.usage
    answered = Answered(batch.counts.completed, usage.input_tokens, usage.cached_tokens, usage.output_tokens)
    return least_seconds_of(services.inference.inner, batch.endpoint, batch.model, answered)


def _seconds_in_progress(batch: BatchRecord, now: float) -> float | None:
    if batch.in_progress_at is None:
        return None
    until = batch.finalizing_at or batch.cancelling_at or batch.expired_at or now
    return max(0.0, until - batch.in_progress_at)
