"""Puts together what the dashboard shows to one tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from batchwright.histograms import Recent
from batchwright.limiting.rates import KINDS
from batchwright.request import Traffic
from batchwright.server.dashboard.dashboard_state import (
    ClassState,
    DashboardState,
    EngineState,
    JobCounts,
    JobState,
    Percentiles,
    QuotaState,
    ServerState,
)
from batchwright.service.composition import Services
from batchwright.service.observability.activity import TokenRates
from batchwright.service.observability.engines import dispatch_reasons, engine_stats
from batchwright.service.worker.worker import process_name
from batchwright.store.records import ENDED, ApiKey, BatchProblem, BatchRecord, BatchStatus
from batchwright.version import __version__

_JOBS = 50
_UNENDED: tuple[BatchStatus, ...] = ("in_progress", "validating", "finalizing", "cancelling")


async def dashboard_state(services: Services, tenant: str, key: ApiKey | None = None) -> DashboardState:
    """Everything on the page. Raises `StoreUnavailable`."""
    counts, lines, deliveries, jobs, quotas = await asyncio.gather(
        services.jobs.count_batches(tenant),
        services.store.count_lines(),
        services.store.count_deliveries(),
        _jobs(services, tenant),
        _quotas(services, tenant, key),
    )
    rates = [services.live.rates(traffic) for traffic in ("online", "batch")]
    now = services.unix_time()
    return DashboardState(
        at=now,
        version=__version__,
        uptime_seconds=max(0.0, now - services.started_at),
        ready=await services.why_not_ready() is None,
        draining=services.draining,
        keys_required=await services.keys.required(),
        models=list(services.inference.models),
        backend=_backend(services.settings.backend, key),
        tokens=TokenRates(prompt=sum(each.prompt for each in rates), generated=sum(each.generated for each in rates)),
        online=_traffic(services, "online", 0),
        batch=_traffic(services, "batch", lines.get("pending", 0)),
        engine=_engine(services),
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
        # The engine sees the tokens of every request; from outside they are seen in streams only.
        ttft_ms=_percentiles(figures.recent_ttft_ms if engine is None else engine.recent_ttft_ms),
        tpot_ms=_percentiles(figures.recent_tpot_ms if engine is None else engine.recent_tpot_ms),
    )


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


def _backend(backend: str, key: ApiKey | None) -> str:
    return backend if backend == "engine" or _sees_hosts(key) else "an endpoint elsewhere"


def _sees_hosts(key: ApiKey | None) -> bool:
    """Whether somebody may know what machines there are: who looks after the service, and all while there is no key."""
    return key is None or not {"metrics", "admin"}.isdisjoint(key.scopes)


def _servers(services: Services, *, named: bool) -> list[ServerState]:
    others = [_server(peer.name, told, here=False) for peer, told in services.peers.others]
    if not others:
        return []
    here = _server(process_name(), services.live.snapshot(services.worker.in_flight), here=True)
    servers = sorted([here, *others], key=lambda server: server.name)
    if named:
        return servers
    return [server.model_copy(update={"name": f"server {number}"}) for number, server in enumerate(servers, 1)]


def _server(name: str, told: Mapping[str, Any], *, here: bool) -> ServerState:
    tokens = TokenRates(prompt=told["prompt"], generated=told["generated"]) if "prompt" in told else None
    return ServerState(name=name, here=here, online=told.get("online"), lines=told.get("lines"), tokens=tokens)


def _percentiles(recent: Recent) -> Percentiles:
    p50, p90, p99 = (recent.percentile(q) for q in (50, 90, 99))
    return Percentiles(count=len(recent), p50=p50, p90=p90, p99=p99)


def _engine(services: Services) -> EngineState | None:
    stats = engine_stats(services.inference.inner)
    if stats is None:
        return None
    return EngineState(
        implementation=stats.implementation,
        steps=stats.steps,
        occupancy=services.live.occupancy,
        max_num_seqs=stats.max_num_seqs,
        kv_used=stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else None,
        prefix_hit_rate=stats.prefix_hit_rate,
        padding_efficiency=stats.padding_efficiency,
        preemptions=stats.preemptions,
    )


async def _jobs(services: Services, tenant: str) -> list[JobState]:
    """Those that have not ended, then the newest that have; of both kinds."""
    found: dict[str, BatchRecord] = {}
    for simple in (False, True):
        pages = [await services.jobs.batches(tenant, limit=_JOBS, simple=simple)]
        if len(pages[0]) == _JOBS:
            # Older ones may still be under way.
            pages += [
                await services.jobs.batches(tenant, limit=_JOBS, simple=simple, status=status) for status in _UNENDED
            ]
        found.update({batch.id: batch for page in pages for batch in page})
    ordered = sorted(found.values(), key=lambda batch: (batch.status in ENDED, -batch.created_at, batch.id))
    return [_job(services, batch) for batch in ordered[:_JOBS]]


def _job(services: Services, batch: BatchRecord) -> JobState:
    progress = services.jobs.progress(batch)
    ended = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
    return JobState(
        id=batch.id,
        kind="simple" if batch.simple else "batch",
        name=batch.metadata.get("name"),
        parent_id=batch.parent_id,
        endpoint=batch.endpoint,
        model=batch.model,
        status=batch.status,
        paused=batch.paused,
        total=progress.total,
        completed=progress.completed,
        failed=progress.failed,
        progress=progress.fraction,
        eta_seconds=progress.eta_seconds,
        lines_per_second=progress.lines_per_second,
        input_tokens=batch.usage.input_tokens,
        output_tokens=batch.usage.output_tokens,
        created_at=batch.created_at,
        expires_at=batch.expires_at,
        ended_at=ended,
        input_file_id=batch.input_file_id,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        problem=_told(batch.errors[0]) if batch.errors else None,
    )


def _told(problem: BatchProblem) -> str:
    return problem.message if problem.line is None else f"Line {problem.line}: {problem.message}"
